"""The page in a real browser: what people see, with the keyboard, on a phone, and under attack."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from snapshot_shared.errors import Failure
from tests.support.browser import (
    Browser,
    browser,
    complaints,
    missing,
    see_as,
    tab,
    until,
    violations,
)
from tests.support.page_stories import POISON, be_busy, begin, break_things
from tests.support.page_world import GIB, PageWorld, checkpoint, device_uuid, lose_node, page_world

WHY_NOT = missing()
pytestmark = [
    pytest.mark.turns,
    pytest.mark.browser,
    pytest.mark.waits,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

MARKUP = "<img src=x onerror=document.title='owned'><script>alert(1)</script>"
UNFOLD = "document.querySelectorAll('details').forEach(e => { e.open = true; })"
LIVE = "return document.querySelector('#live').textContent === 'live'"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests: it takes longer to start than most of them."""
    with browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@contextlib.asynccontextmanager
async def opened(
    world: PageWorld, chromium: Browser, address: str = "", **size: Any
) -> AsyncIterator[Browser]:
    """Open the page; at the end nothing may have been complained of on the console."""
    with tab(chromium, **size) as driver:
        await at(driver.get, world.url + address)
        await at(until, driver, LIVE, "the stream of events")
        yield driver
        assert complaints(driver) == []


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PageWorld]:
    async with page_world(tmp_path) as found:
        yield found


@pytest.fixture
async def driver(world: PageWorld, chromium: Browser) -> AsyncIterator[Browser]:
    """The page of a world, opened as most people see it."""
    async with opened(world, chromium) as found:
        yield found


async def at(work: Callable[..., Any], *words: Any) -> Any:
    """Let the browser work while the world goes on."""
    return await asyncio.to_thread(work, *words)


async def shows(driver: Browser, text: str) -> None:
    await holds(driver, f"document.body.innerText.includes({text!r})", repr(text))


async def holds(driver: Browser, condition: str, what: str) -> None:
    await at(until, driver, f"return {condition}", what)


async def rests(driver: Browser, script: str) -> Any:
    return await at(driver.execute_script, f"return {script}")


async def press(driver: Browser, key: str) -> None:
    """Press a key, whatever has the focus then: rows are replaced as they change."""
    await at(ActionChains(driver).send_keys(key).perform)


def hold(driver: Browser, path: str) -> str:
    """Press the mouse on a link and return where it leads; it may be drawn anew meanwhile."""
    while True:
        link = driver.find_element(By.XPATH, path)
        with contextlib.suppress(StaleElementReferenceException):
            address = link.get_attribute("href")
            driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
            ActionChains(driver).click_and_hold(link).perform()
            return str(address)


async def test_a_capture_is_followed_while_it_goes_on(world: PageWorld, driver: Browser) -> None:
    await be_busy(world)
    await shows(driver, "save 2 parts: write on node-3")
    await shows(driver, "68 GiB of 80 GiB, 2 sessions")
    await shows(driver, "DynamoCheckpoint llama-70b")
    await holds(
        driver,
        "document.querySelector('#flow').textContent.includes('save gpu-1: write 4')",
        "the picture",
    )
    lanes = "[...document.querySelectorAll('#flow .head')].map(e => e.textContent)"
    assert await rests(driver, lanes) == ["operator", "agent node-3", "gms node-3"]
    assert await rests(driver, "document.querySelectorAll('#spans li').length") >= 5
    bars = "[...document.querySelectorAll('[role=progressbar]')].map(e => e.ariaValueNow)"
    assert "54" in await rests(driver, bars) or "55" in await rests(driver, bars)


async def test_what_is_wrong_stands_first_with_what_to_do(
    tmp_path: Path, chromium: Browser
) -> None:
    await lose_node(tmp_path)
    async with page_world(tmp_path) as world, opened(world, chromium, dark=True) as driver:
        await break_things(world)
        await shows(driver, "Show 4 more")
        await at(driver.execute_script, "document.querySelector('#fold').click()")
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


async def test_the_keyboard_opens_an_object_and_comes_back_from_it(
    world: PageWorld, driver: Browser
) -> None:
    await begin(world)
    await shows(driver, "mistral-7b-1")
    for _ in range(60):
        await press(driver, Keys.TAB)
        if await rests(driver, "document.activeElement.textContent") == "mistral-7b":
            break
    # One question, for rows are drawn anew while the restore ends.
    outlined = "getComputedStyle(document.activeElement).outlineStyle"
    found = f"[{outlined}, document.activeElement.matches('#objects a')]"
    assert await rests(driver, found) == ["solid", True]
    title = "document.activeElement.id === 'detail-title'"
    await press(driver, Keys.ENTER)
    await holds(driver, title, "the focus goes to the details")
    assert "/mistral-7b" in await rests(driver, "location.hash")
    # A change of the view leaves the focus where it is.
    world.nodes["node-1"].used = [20 * GIB, 20 * GIB]
    await world.nodes["node-1"].appear()
    await shows(driver, "20 GiB of 80 GiB")
    assert await rests(driver, title)
    await press(driver, Keys.ESCAPE)
    found = "[location.hash, document.activeElement.textContent]"
    assert await rests(driver, found) == ["", "mistral-7b"]


async def test_a_row_that_changes_keeps_the_focus(world: PageWorld, driver: Browser) -> None:
    await world.join("node-1")
    await world.apply(checkpoint("llm"))
    await shows(driver, "llm")
    await at(driver.execute_script, "document.querySelector('#objects a').focus()")
    await world.capture(GIB)
    phase = "document.querySelector('#objects .state').textContent"
    await holds(driver, f"{phase} === 'Ready'", "the checkpoint is Ready")
    assert await rests(driver, "document.activeElement.textContent") == "llm"


async def test_a_phone_shows_all_large_enough_without_sideways_scrolling(
    tmp_path: Path, chromium: Browser
) -> None:
    await lose_node(tmp_path)
    async with page_world(tmp_path) as world, opened(world, chromium, width=360) as driver:
        await break_things(world)
        await shows(driver, "Show 4 more")
        await at(driver.execute_script, "document.querySelector('#fold').click()")
        await shows(driver, "A dead letter on node-2")
        await shows(driver, "Orders and reports")
        await at(driver.execute_script, UNFOLD)
        assert await rests(driver, "document.documentElement.scrollWidth") == 360
        wide = """[...document.querySelectorAll('main *')].filter(e =>
            e.getBoundingClientRect().right > 361 && !e.closest('.scroll, code, .cut')
        ).map(e => e.className || e.tagName)"""
        assert await rests(driver, wide) == []
        small = """[...document.querySelectorAll('a, button, summary, input')].filter(e => {
            const box = e.getBoundingClientRect();
            return box.width && !e.matches('.skip') && (box.width < 24 || box.height < 24);
        }).map(e => `${e.tagName} ${e.textContent} ${e.offsetHeight}`)"""
        assert await rests(driver, small) == []


async def test_markup_from_the_cluster_is_shown_as_text(world: PageWorld, driver: Browser) -> None:
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
    await holds(
        driver, f"document.querySelector('#spans').textContent.includes({MARKUP!r})", "the span"
    )
    assert (
        await rests(driver, "document.querySelectorAll('main img, main script, main b b').length")
        == 0
    )
    assert "owned" not in await rests(driver, "document.title")


async def test_a_lost_connection_is_shown_and_found_again(
    tmp_path: Path, chromium: Browser
) -> None:
    async with page_world(tmp_path) as world:
        with tab(chromium) as driver:
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


MANY = """const rows = Array.from({length: 200}, (_, n) =>
    ({key: `k${n}`, name: `llm-${n}`, kind: 'Pod', state: 'ok', phase: 'Running', rev: ''}));
    view.objects = {rows, all: 300}; search('llm-7')"""


async def test_an_empty_cluster_says_what_to_type_and_that_can_be_copied(
    world: PageWorld, driver: Browser
) -> None:
    await shows(driver, "snapshotctl up --nodes 2")
    await shows(driver, "snapshotctl apply -f deploy/examples/checkpoint.yaml")
    assert await rests(driver, "document.querySelector('#problems').hidden")
    assert await rests(driver, "document.querySelector('#detail').hidden")
    await at(
        driver.execute_cdp_cmd,
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite"], "origin": world.url},
    )
    await at(driver.execute_script, "document.querySelector('#nodes details').open = true")
    button = await at(driver.find_element, By.CSS_SELECTOR, "#nodes .cli button")
    await at(button.click)
    await shows(driver, "Copied")
    read = "navigator.clipboard.readText().then(arguments[0], e => arguments[0](String(e)))"
    text = await at(driver.execute_async_script, read)
    assert text == "nats --context snapback-default kv watch snap_nodes"
    # Axe sees a contrast that is too low.
    assert await at(violations, driver) == []
    await at(driver.execute_script, "document.querySelector('#sums').style.color = '#ddd'")
    assert ["color-contrast" in rule for rule in await at(violations, driver)] == [True]
    # A search says how much it has searched.
    await at(driver.execute_script, MANY)
    words = await rests(driver, "document.querySelector('#matches').textContent")
    assert words.endswith("Only the first 200 of 300 objects were searched.")


async def test_who_wants_no_motion_gets_none(world: PageWorld, driver: Browser) -> None:
    see_as(driver, 1280, 900)
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    await at(driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", {"features": [still]})
    await be_busy(world)
    await shows(driver, "DynamoCheckpoint llama-70b")
    await holds(driver, "document.querySelector('.pulse') !== null", "the picture")
    assert await rests(driver, "document.getAnimations().length") == 0


async def test_problems_fold_to_the_worst_so_that_the_open_object_is_on_the_screen(
    tmp_path: Path,
    chromium: Browser,
) -> None:
    await lose_node(tmp_path)
    shown = "[...document.querySelectorAll('#problems .rows > li')].filter(e => e.offsetHeight)"
    async with page_world(tmp_path) as world, opened(world, chromium, width=1440) as driver:
        # One small problem is not folded.
        await shows(driver, "start the agent of node-4 again")
        assert await rests(driver, "document.querySelector('#fold').hidden")
        await break_things(world)
        await shows(driver, "Show 4 more")
        assert await rests(driver, f"{shown}.map(e => e.dataset.key)") == ["nodes/-/node-4"]
        assert await rests(driver, "document.querySelector('#problems .count').textContent") == "5"
        top = "document.querySelector('#detail').getBoundingClientRect().top"
        assert await rests(driver, top) < 300
        # The keyboard unfolds them, and they stay so when the page changes and is loaded again.
        await at(driver.execute_script, "document.querySelector('#fold').focus()")
        await press(driver, Keys.ENTER)
        assert await rests(driver, f"{shown}.length") == 5
        assert await rests(driver, "document.querySelector('#fold').ariaExpanded") == "true"
        await world.dead_message("node-1", "snap.order.node-1.agent.x", POISON)
        await shows(driver, "A dead letter on node-1")
        assert await rests(driver, f"{shown}.length") == 6
        await at(driver.refresh)
        await shows(driver, "A dead letter on node-1")
        assert await rests(driver, f"{shown}.length") == 6
        button = await at(driver.find_element, By.ID, "fold")
        await at(button.click)
        assert await rests(driver, f"{shown}.length") == 1


NAMES = "[...document.querySelectorAll('#{} [data-spot=name]')].map(e => e.textContent)"


async def listed(driver: Browser, panel: str) -> list[str]:
    found: list[str] = await rests(driver, NAMES.format(panel))
    return found


async def test_a_search_filters_every_list_by_name_model_node_gpu_and_state(
    tmp_path: Path, chromium: Browser
) -> None:
    await lose_node(tmp_path)
    async with page_world(tmp_path) as world, opened(world, chromium) as driver:
        await break_things(world)
        await holds(driver, "document.title === '(5) Snapback'", "five problems")
        await press(driver, "/")
        assert await rests(driver, "document.activeElement.id") == "query"
        # A model, of which only the checkpoint knows, finds what was captured and its artifact.
        await press(driver, "mistralai/Mistral")
        assert await listed(driver, "nodes") == []
        assert await listed(driver, "artifacts") == ["default/mistral-7b"]
        assert await listed(driver, "run-rows") == ["mistral-7b"]
        assert "qwen-32b" not in await listed(driver, "objects")
        assert "None matches the search." in await rests(
            driver, "document.querySelector('#nodes').innerText"
        )
        await press(driver, Keys.ESCAPE)
        assert len(await listed(driver, "nodes")) == 4
        # A node.
        await press(driver, "NODE-3")
        assert await listed(driver, "nodes") == ["node-3"]
        assert {"qwen-32b", "mistral-7b-2"} <= set(await listed(driver, "objects"))
        assert "mistral-7b-1" not in await listed(driver, "objects")
        # A GPU, by its uuid and by its product, and two words at once.
        uuid = device_uuid("node-2", 1)
        await press(driver, Keys.ESCAPE)
        await press(driver, uuid)
        assert await listed(driver, "nodes") == ["node-2"]
        assert (await listed(driver, "objects"))[0] == "mistral-7b-1"
        await press(driver, Keys.ESCAPE)
        await press(driver, "h100 lost")
        assert await listed(driver, "nodes") == ["node-4"]
        # A state, among the problems as well.
        await press(driver, Keys.ESCAPE)
        await press(driver, "noteligible")
        assert await rests(driver, "document.querySelectorAll('#problems .rows > li').length") == 1
        assert (await listed(driver, "objects"))[0] == "qwen-32b"


async def test_a_search_is_in_the_address_and_can_be_passed_on(
    tmp_path: Path, chromium: Browser
) -> None:
    async with page_world(tmp_path) as world, opened(world, chromium, "?q=node-2") as driver:
        await begin(world)
        await shows(driver, "Found for “node-2”: 2 objects, 1 node.")
        assert await listed(driver, "nodes") == ["node-2"]
        # An object is opened and closed within the search.
        await at(driver.execute_script, "document.querySelector('#objects a').click()")
        assert await rests(driver, "location.hash") != ""
        await press(driver, Keys.ESCAPE)
        assert await rests(driver, "location.search + location.hash") == "?q=node-2"
        await at(driver.refresh)
        await shows(driver, "Found for “node-2”")
        assert await rests(driver, "document.querySelector('#query').value") == "node-2"
        # The name of a node is such an address; the browser goes back from it.
        clear = await at(driver.find_element, By.ID, "clear")
        await at(clear.click)
        assert await rests(driver, "location.search") == ""
        await at(driver.execute_script, "document.querySelector('#nodes a').click()")
        assert await rests(driver, "location.search") == "?q=node-1"
        assert await listed(driver, "nodes") == ["node-1"]
        await at(driver.back)
        await holds(driver, "document.querySelectorAll('#nodes .node').length === 2", "2")
        # A search without a result says so, and how to clear it; the field has the focus.
        await press(driver, MARKUP)
        await shows(driver, f"Nothing matches “{MARKUP}”. Escape in the search field, or Clear")
        await press(driver, Keys.ESCAPE)
        await shows(driver, "mistral-7b-1")
        assert await rests(driver, "document.querySelector('#matches').hidden")
        assert "owned" not in await rests(driver, "document.title")


async def test_a_gpu_has_its_whole_product_and_uuid_on_a_phone_and_a_desktop(
    world: PageWorld, driver: Browser
) -> None:
    product = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    await world.join("node-1", product=product)
    await shows(driver, f"GPU 1 {product}")
    for width in (390, 1440):
        await at(see_as, driver, width, 900)
        await shows(driver, device_uuid("node-1", 1))
        cut = """[...document.querySelectorAll('.gpu *')].filter(e =>
            e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== 'visible'
            || getComputedStyle(e).textOverflow === 'ellipsis').length"""
        assert await rests(driver, cut) == 0


async def test_what_a_capture_and_a_restore_have_cost_stands_by_their_objects(
    world: PageWorld, driver: Browser
) -> None:
    await begin(world)
    text = "[...document.querySelectorAll('{} .figure')].map(e => e.textContent).join()"
    for panel in ("#objects", "#artifacts"):
        found = text.format(panel)
        script = f"return {found}.match(/captured 28 GiB in .* \\(.* GB.s\\)/)"
        await at(until, driver, script, panel)
        assert "worker paused for 64 ms" in await rests(driver, found)
    script = f"return {text.format('#objects')}.includes('restored in ')"
    await at(until, driver, script, "the restore")
    for name, words in (
        ("mistral-7b", "worker paused for 64 ms"),
        ("mistral-7b-1", "restored"),
    ):
        key = f"[...document.querySelectorAll('#objects a')].find(e => e.text === '{name}')"
        await at(driver.execute_script, f"{key}.click()")
        script = f"return document.querySelector('#figures').innerText.includes('{words}')"
        await at(until, driver, script, words)


async def test_captures_and_restores_are_bars_on_one_axis_that_a_table_tells_in_words(
    world: PageWorld, driver: Browser
) -> None:
    world.pace_s = 0.5
    await be_busy(world)
    await holds(driver, "document.querySelectorAll('#runs tbody tr').length === 3", "three runs")
    rows = "[...document.querySelectorAll('#runs tbody tr')]"
    assert await listed(driver, "runs") == ["llama-70b", "mistral-7b-1", "mistral-7b"]
    words = await rests(driver, f"{rows}.map(e => e.children[1].textContent)")
    assert "write from" in words[0]
    assert words[0].endswith("on, under way")
    assert [text.split(" from")[0] for text in words[1].split("; ")] == [
        "load",
        "commit",
        "resume",
    ]
    # Lengths of bars are those of times, from the same begin and on the same scale.
    edges = f"""{rows}.slice(1).map(row => Math.max(...[...row.querySelectorAll('i')].map(
        bar => bar.getBoundingClientRect().right))
        - row.querySelector('.lane').getBoundingClientRect().left)"""
    lengths = "view.runs.rows.slice(1).map(run => run.length)"
    ends, seconds = await rests(driver, f"[{edges}, {lengths}]")
    assert ends[0] / ends[1] == pytest.approx(seconds[0] / seconds[1], rel=0.1)
    # The open capture has a bar an order.
    steps = "[...document.querySelectorAll('#timeline tbody tr')].map(e => e.cells[0].innerText)"
    await holds(driver, f"{steps}.length === 4", "its orders")
    assert [text.split("\n")[0] for text in await rests(driver, steps)] == [
        "prepare",
        "dump",
        "save gpu-0",
        "save gpu-1",
    ]


RUN = {"kind": "capture", "node": "n", "phase": "Ready", "state": "ok", "over": True, "at": 0}


def write(seconds: float | None) -> list[dict[str, Any]]:
    return [{"phase": "write", "start": 0, "length": seconds, "state": "ok"}]


async def give_runs(driver: Browser, *runs: dict[str, Any]) -> None:
    """Show these runs; `at` is here seconds before now."""
    script = """const rows = arguments[0].map(run => ({...run, at: now() - run.at}));
        view.runs = {rows, all: rows.length}; render()"""
    await at(driver.execute_script, script, [{**RUN, "key": run["name"], **run} for run in runs])


async def shares(driver: Browser) -> list[float]:
    """Return how much of its lane each run takes, in the order of the rows."""
    script = """[...document.querySelectorAll('#runs .lane')].map(lane =>
        lane.querySelector('i').getBoundingClientRect().width / lane.clientWidth)"""
    found: list[float] = await rests(driver, script)
    return found


async def test_a_run_is_opened_by_a_click_during_which_the_axis_moves_on(
    world: PageWorld, driver: Browser
) -> None:
    drawn = "document.querySelector('#runs thead tr')"
    await be_busy(world)
    await shows(driver, "save 2 parts: write on node-3")
    for name in ("mistral-7b", "llama-70b"):
        address = await at(hold, driver, f"//*[@id='runs']//a[.='{name}']")
        await at(driver.execute_script, f"{drawn}.dataset.old = ''")
        await holds(driver, f"!('old' in {drawn}.dataset)", "the axis moves on")
        await at(ActionChains(driver).release().perform)
        assert await rests(driver, "location.href") == address


async def test_a_long_run_under_way_leaves_those_that_ended_a_third_of_the_axis(
    driver: Browser,
) -> None:
    long = {"name": "long", "length": None, "phases": write(None), "over": False, "at": 1000}
    await give_runs(driver, long, {"name": "ended", "length": 4.0, "phases": write(4.0)})
    open_share, ended_share = await shares(driver)
    assert ended_share == pytest.approx(1 / 3, rel=0.02)
    assert open_share > 1
    words = "document.querySelector('#runs .lane + .sr').textContent"
    assert await rests(driver, words) == "write from 0.0 ms on, under way"
    # It has the whole axis if no work has ended.
    await give_runs(driver, long)
    assert await shares(driver) == [pytest.approx(1, rel=0.02)]
    # A run of unknown length has no figure.
    open_run = {"name": "open", "length": None, "phases": write(None), "over": False, "at": 6}
    await give_runs(driver, {"name": "forgotten", "length": None, "phases": []}, open_run)
    took = "[...document.querySelectorAll('#runs td.took')].map(e => e.textContent)"
    assert await rests(driver, took) == ["-", "…"]
    assert (await rests(driver, "document.querySelector('#runs .axis').textContent"))[-1] == "s"


async def test_the_orders_of_the_open_object_move_on_without_an_event(driver: Browser) -> None:
    orders = [
        {"label": "prepare", "phase": "prepare", "where": "", "start": 0, "length": 5},
        {"label": "dump", "phase": "write", "where": "", "start": 5, "length": None},
    ]
    run = {**RUN, "key": "open", "length": None, "over": False, "steps": orders}
    script = """shown.data = {runs: [{...arguments[0], at: now() - 10}]};
        document.querySelector('#detail').hidden = false; timeline(shown.data.runs)"""
    await at(driver.execute_script, script, run)
    left = "parseFloat(document.querySelector('#timeline .pulse').style.left)"
    before = await rests(driver, left)
    await holds(driver, f"{left} < {before}", "the open order takes a larger share")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (390, False),
        (1440, True),
        pytest.param(390, True, marks=pytest.mark.slow),
        pytest.param(1440, False, marks=pytest.mark.slow),
    ],
)
async def test_axe_finds_nothing_in_any_state(
    tmp_path: Path, chromium: Browser, width: int, dark: bool
) -> None:
    await lose_node(tmp_path)
    found: dict[str, list[str]] = {}
    async with (
        page_world(tmp_path) as world,
        opened(world, chromium, width=width, dark=dark) as driver,
    ):
        found["empty"] = await at(violations, driver)
        await be_busy(world)
        await holds(driver, "document.querySelectorAll('#timeline tr').length > 3", "it")
        found["busy, an open object"] = await at(violations, driver)
        for name in ("node-1", "node-2"):
            await world.dead_message(name, "snap.order.x", POISON)
        await shows(driver, "Show 2 more")
        found["problems folded"] = await at(violations, driver)
        await at(driver.execute_script, f"{UNFOLD}; document.querySelector('#fold').click()")
        await shows(driver, "A dead letter on node-2")
        found["everything unfolded"] = await at(violations, driver)
        await press(driver, "/")
        await press(driver, "node-1")
        await shows(driver, "Found for")
        found["search"] = await at(violations, driver)
        await press(driver, "nowhere")
        await shows(driver, "Nothing matches")
        found["search without a result"] = await at(violations, driver)
    assert {state: rules for state, rules in found.items() if rules} == {}
