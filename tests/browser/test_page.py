"""The page in a real browser: what people see, with the keyboard, on a phone, and under attack."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from snapshot_shared.errors import Failure
from tests.support.browser import Browser, browser, complaints, missing, see_as, until
from tests.support.page_stories import be_busy, begin, break_things
from tests.support.page_world import GIB, PageWorld, checkpoint, lose_node, page_world

WHY_NOT = missing()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.waits,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

MARKUP = "<img src=x onerror=document.title='owned'><script>alert(1)</script>"
LIVE = "return document.querySelector('#live').textContent === 'live'"


@contextlib.asynccontextmanager
async def opened(world: PageWorld, folder: Path, **size: Any) -> AsyncIterator[Browser]:
    """Open the page; at the end nothing may have been complained of on the console."""
    with browser(folder / "profile", **size) as driver:
        await at(driver.get, world.url)
        await at(until, driver, LIVE, "the stream of events")
        yield driver
        assert complaints(driver) == []


async def at(work: Callable[..., Any], *words: Any) -> Any:
    """Let the browser work while the world goes on."""
    return await asyncio.to_thread(work, *words)


async def shows(driver: Browser, text: str) -> None:
    await at(until, driver, f"return document.body.innerText.includes({text!r})", repr(text))


async def rests(driver: Browser, script: str) -> Any:
    return await at(driver.execute_script, f"return {script}")


async def press(driver: Browser, key: str) -> None:
    """Press a key, whatever has the focus then: rows are replaced as they change."""
    await at(ActionChains(driver).send_keys(key).perform)


async def test_an_empty_cluster_says_what_to_type(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        await shows(driver, "snapshotctl up --nodes 2")
        await shows(driver, "snapshotctl apply -f deploy/examples/checkpoint.yaml")
        assert await rests(driver, "document.querySelector('#problems').hidden")
        assert await rests(driver, "document.querySelector('#detail').hidden")


async def test_a_capture_is_followed_while_it_goes_on(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        await be_busy(world)
        await shows(driver, "save 2 parts: write on node-3")
        await shows(driver, "68 GiB of 80 GiB, 2 sessions")
        await shows(driver, "DynamoCheckpoint llama-70b")
        await at(
            until,
            driver,
            "return document.querySelector('#flow').textContent.includes('save gpu-1: write 4')",
            "the picture",
        )
        lanes = "[...document.querySelectorAll('#flow .head')].map(e => e.textContent)"
        assert await rests(driver, lanes) == ["operator", "agent node-3", "gms node-3"]
        assert await rests(driver, "document.querySelectorAll('#spans li').length") >= 5
        bars = "[...document.querySelectorAll('[role=progressbar]')].map(e => e.ariaValueNow)"
        assert "54" in await rests(driver, bars) or "55" in await rests(driver, bars)


async def test_what_is_wrong_stands_first_with_what_to_do(tmp_path: Path) -> None:
    await lose_node(tmp_path)
    async with page_world(tmp_path) as world, opened(world, tmp_path, dark=True) as driver:
        await break_things(world)
        for text in (
            "Node node-4 is Lost",
            "DynamoCheckpoint mistral-7b is damaged",
            "DynamoCheckpoint qwen-32b failed",
            "A dead letter on node-2",
            "read the worker's log",
            "Quarantined",
        ):
            await shows(driver, text)
        assert (await rests(driver, "document.title")).startswith("(")
        first = "document.querySelector('main > section:not([hidden])').id"
        assert await rests(driver, first) == "problems"
        ground = await rests(driver, "getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(16, 20, 26)"


async def test_the_keyboard_opens_an_object_and_comes_back_from_it(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        await begin(world)
        await shows(driver, "mistral-7b-1")
        for _ in range(60):
            await press(driver, Keys.TAB)
            if await rests(driver, "document.activeElement.textContent") == "mistral-7b":
                break
        outline = await rests(driver, "getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        assert await rests(driver, "document.activeElement.matches('#objects a')")
        title = "document.activeElement.id === 'detail-title'"
        await press(driver, Keys.ENTER)
        await at(until, driver, f"return {title}", "the focus goes to the details")
        assert "/mistral-7b" in await rests(driver, "location.hash")
        # A change of the view leaves the focus where it is.
        world.nodes["node-1"].used = [20 * GIB, 20 * GIB]
        await world.nodes["node-1"].appear()
        await shows(driver, "20 GiB of 80 GiB")
        assert await rests(driver, title)
        await press(driver, Keys.ESCAPE)
        assert await rests(driver, "location.hash") == ""
        assert await rests(driver, "document.activeElement.textContent") == "mistral-7b"


async def test_a_row_that_changes_keeps_the_focus(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        await world.join("node-1")
        await world.apply(checkpoint("llm"))
        await shows(driver, "llm")
        await at(driver.execute_script, "document.querySelector('#objects a').focus()")
        await world.capture(GIB)
        phase = "document.querySelector('#objects .state').textContent"
        await at(until, driver, f"return {phase} === 'Ready'", "the checkpoint is Ready")
        assert await rests(driver, "document.activeElement.textContent") == "llm"


async def test_a_phone_shows_everything_without_sideways_scrolling(tmp_path: Path) -> None:
    await lose_node(tmp_path)
    async with page_world(tmp_path) as world, opened(world, tmp_path, width=360) as driver:
        await break_things(world)
        await shows(driver, "A dead letter on node-2")
        await shows(driver, "Orders and reports")
        assert await rests(driver, "document.documentElement.scrollWidth") == 360
        wide = """[...document.querySelectorAll('main *')].filter(e =>
            e.getBoundingClientRect().right > 361 && !e.closest('.scroll, code, .cut')
        ).map(e => e.className || e.tagName)"""
        assert await rests(driver, wide) == []


async def test_markup_from_the_cluster_is_shown_as_text(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        node = await world.join("node-1", product=MARKUP)
        node.version = MARKUP
        await node.appear()
        labels = {"team": "<b>bold</b>"}
        await world.apply(checkpoint("llm", model=MARKUP, labels=labels))
        await world.run_worker()
        failure = Failure(reason=MARKUP, message=MARKUP, next_step=MARKUP)
        order = await world.order("prepare")
        await world.span(order, MARKUP, 1.0, 1.0, error=MARKUP)
        await world.fail(order, failure)
        for _ in range(2):
            await world.done(await world.order("abort"))
        await world.dead_message("node-1", MARKUP, failure)
        await shows(driver, "A dead letter on node-1")
        await shows(driver, f"GMS {MARKUP}")
        await shows(driver, f"GPU 0 {MARKUP}")
        await shows(driver, "team=<b>bold</b>")
        await at(
            until,
            driver,
            f"return document.querySelector('#spans').textContent.includes({MARKUP!r})",
            "the span",
        )
        assert (
            await rests(
                driver, "document.querySelectorAll('main img, main script, main b b').length"
            )
            == 0
        )
        assert "owned" not in await rests(driver, "document.title")


async def test_a_lost_connection_is_shown_and_found_again(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world:
        with browser(tmp_path / "profile") as driver:
            await at(driver.get, world.url)
            await at(until, driver, LIVE, "the stream of events")
            port = world.url.rstrip("/").rpartition(":")[2]
            assert await world.stop("page") == 0
            await shows(driver, "connection lost at")
            assert await rests(driver, "document.querySelector('main').matches('.stale')")
            await world.start_page(SNAPBACK_HTTP_ADDRESS=f"127.0.0.1:{port}")
            await at(until, driver, LIVE, "the stream is found again")
            await world.join("node-1")
            await shows(driver, "node-1")


async def test_a_command_is_copied(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        await at(
            driver.execute_cdp_cmd,
            "Browser.grantPermissions",
            {"permissions": ["clipboardReadWrite"], "origin": world.url},
        )
        button = await at(driver.find_element, By.CSS_SELECTOR, "#nodes > .cmds button")
        await at(button.click)
        await shows(driver, "Copied")
        read = "navigator.clipboard.readText().then(arguments[0], e => arguments[0](String(e)))"
        text = await at(driver.execute_async_script, read)
        assert text == "nats --context snapback-default kv watch snap_nodes"


async def test_who_wants_no_motion_gets_none(tmp_path: Path) -> None:
    async with page_world(tmp_path) as world, opened(world, tmp_path) as driver:
        see_as(driver, 1280, 900)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await at(driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": [still]})
        await be_busy(world)
        await shows(driver, "DynamoCheckpoint llama-70b")
        await at(until, driver, "return document.querySelector('.pulse') !== null", "the picture")
        assert await rests(driver, "document.getAnimations().length") == 0
