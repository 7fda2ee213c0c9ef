"""Takes the pictures of docs/page.md: `python -m tests.browser.screenshots [FOLDER]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.browser import browser, missing, see_as, until
from tests.support.page_stories import be_busy, break_things
from tests.support.page_world import PageWorld, lose_node, page_world

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MAX_BYTES = 200 * 1024
WIDTH = 1280
MAX_HEIGHT = 1040

Story = Callable[[PageWorld], Awaitable[None]]


async def empty(world: PageWorld) -> None:
    """Nothing yet."""


STORIES: dict[str, tuple[Story, str, bool]] = {
    "empty": (empty, "Nothing is captured or running", False),
    "busy": (be_busy, "save gpu-1: write 4", False),
    "broken": (break_things, "A dead letter", True),
}


def picture(url: str, folder: Path, name: str, text: str, dark: bool) -> Path:
    """Take the whole page once it shows a text."""
    file = folder / f"page-{name}.png"
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile), dark=dark) as driver:
        driver.get(url)
        until(driver, f"return document.body.textContent.includes({text!r})", text)
        until(driver, "return document.querySelector('#live').textContent === 'live'", "live")
        height = driver.execute_script("return document.documentElement.scrollHeight")
        see_as(driver, WIDTH, min(height, MAX_HEIGHT), dark=dark)
        driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 700))")
        driver.save_screenshot(str(file))
    return file


async def main() -> int:
    """Take all three; 1 when there is no browser, or a picture is too big."""
    if why := missing():
        sys.stderr.write(f"no screenshots: {why}\n")
        return 1
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    status = 0
    for name, (story, text, dark) in STORIES.items():
        with tempfile.TemporaryDirectory() as home:
            if name == "broken":
                await lose_node(Path(home))
            async with page_world(Path(home)) as world:
                await story(world)
                file = await asyncio.to_thread(picture, world.url, folder, name, text, dark)
        size = file.stat().st_size
        sys.stdout.write(f"{file.name}: {size // 1024} KiB\n")
        if size > MAX_BYTES:
            sys.stderr.write(f"{file.name} has more than {MAX_BYTES // 1024} KiB\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
