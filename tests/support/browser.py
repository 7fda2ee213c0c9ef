"""A headless Chromium of this machine, driven by selenium; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--disable-lcd-text"),
    "--force-color-profile=srgb",
)

Browser = webdriver.Chrome


def missing() -> str:
    """Say what there is no browser without; empty when there is one."""
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium here (Debian: apt-get install chromium)"
    if not shutil.which(DRIVER):
        return "no chromedriver here (Debian: apt-get install chromium-driver)"
    return ""


@contextlib.contextmanager
def browser(profile: Path, *, dark: bool = False) -> Iterator[Browser]:
    """Run a browser with a fresh profile for the length of the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        see_as(driver, 1280, 900, dark=dark)
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def tab(
    driver: Browser, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[Browser]:
    """Work in a new tab of a browser for the length of the block; its console begins empty."""
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    try:
        see_as(driver, width, height, dark=dark)
        driver.get_log("browser")
        yield driver
    finally:
        driver.close()
        driver.switch_to.window(first)


def see_as(driver: Browser, width: int, height: int, *, dark: bool = False) -> None:
    """Give the window an exact size, below what a window may have, and a colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def until(driver: Browser, script: str, what: str, within_s: float = 30.0) -> Any:
    """Wait until a script returns something true, and give it."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.wait import WebDriverWait

    look: Callable[[Browser], Any] = lambda found: found.execute_script(script)  # noqa: E731
    try:
        return WebDriverWait(driver, within_s, poll_frequency=0.1).until(look)
    except TimeoutException:
        text = driver.execute_script("return document.body.innerText")
        raise AssertionError(f"{what} did not happen in {within_s} s:\n{text}") from None


def complaints(driver: Browser) -> list[str]:
    """Give what the console says: errors of the page, refused by its policy or not loaded."""
    return [f"{row['level']}: {row['message']}" for row in driver.get_log("browser")]


def violations(driver: Browser) -> list[str]:
    """Give what axe-core finds inaccessible now: each rule with an element that breaks it."""
    if not driver.execute_script("return Boolean(window.axe)"):
        source = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
        driver.execute_script(source)
    # What is partly transparent for a moment would be judged by its colour at that moment.
    found = driver.execute_async_script(
        "const done = arguments[0];"
        "for (const one of document.getAnimations()) one.cancel();"
        "axe.run(document).then(r => done(r.violations), e => done([{id: String(e), nodes: []}]))"
    )
    return [
        f"{rule['id']}: {node['html']}"
        for rule in found
        for node in rule["nodes"] or [{"html": ""}]
    ]
