"""Takes pictures of the page, wide and on a phone, light and dark.

`python -m tests.browser.screenshots` puts all of them into .screenshots, and those that
docs/page.md shows into docs/images, cut to one screen. With a FOLDER it writes only there.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.browser import Browser, browser, missing, see_as, until
from tests.support.page_stories import be_busy, break_things
from tests.support.page_world import PageWorld, lose_node, page_world

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 200 * 1024
MAX_HEIGHT = 6000
PACE_S = 2.5
SIZES = {"wide": (1440, 900), "phone": (390, 844)}

Story = Callable[[PageWorld], Awaitable[None]]


async def empty(world: PageWorld) -> None:
    """Nothing yet."""


STORIES: dict[str, tuple[Story, str, str]] = {
    "empty": (empty, "", "Nothing is captured or running"),
    "busy": (be_busy, "", "save gpu-1: write 4"),
    "broken": (break_things, "", "A dead letter"),
    "search": (break_things, "?q=node-3", "Found for"),
}
"""What happened before, the address, and a text that the page shows then."""

SHOWN = {
    "busy-wide-light": "page-busy.png",
    "broken-wide-dark": "page-broken.png",
    "busy-phone-light": "page-phone.png",
}
"""The pictures of docs/page.md."""


def take(driver: Browser, file: Path, height: int) -> None:
    """Take a picture of the page from its top, without another size of the window."""
    width = driver.execute_script("return innerWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    options = {"clip": clip, "captureBeyondViewport": True}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    file.write_bytes(base64.b64decode(found["data"]))


def pictures(url: str, folder: Path, images: Path | None, name: str, text: str) -> None:
    """Take the whole page at each size and in each scheme, once it shows a text."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as driver:
        for size, (width, height) in SIZES.items():
            for is_dark in (False, True):
                see_as(driver, width, height, dark=is_dark)
                driver.get(url)
                until(driver, f"return document.body.textContent.includes({text!r})", text)
                until(
                    driver, "return document.querySelector('#live').textContent === 'live'", "live"
                )
                wait = "requestAnimationFrame(() => setTimeout(arguments[0], 700))"
                driver.execute_async_script(wait)
                whole = driver.execute_script("return document.documentElement.scrollHeight")
                scene = f"{name}-{size}-{'dark' if is_dark else 'light'}"
                take(driver, folder / f"{scene}.png", min(whole, MAX_HEIGHT))
                if images is not None and scene in SHOWN:
                    take(driver, images / SHOWN[scene], height)


async def main() -> int:
    """Take all; 1 when there is no browser, or a picture for the documents is too big."""
    if why := missing():
        sys.stderr.write(f"no screenshots: {why}\n")
        return 1
    images = None if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (story, query, text) in STORIES.items():
        with tempfile.TemporaryDirectory() as home:
            if story is break_things:
                await lose_node(Path(home))
            async with page_world(Path(home)) as world:
                world.pace_s = PACE_S
                await story(world)
                await asyncio.to_thread(pictures, world.url + query, folder, images, name, text)
    sizes = {file: file.stat().st_size for file in images.glob("page-*.png")} if images else {}
    for file, size in sizes.items():
        sys.stdout.write(f"{file.name}: {size // 1024} KiB\n")
    sys.stdout.write(f"all: {folder}\n")
    return int(any(size > MAX_BYTES for size in sizes.values()))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
