"""The command open: the page of a cluster, in the browser."""

from __future__ import annotations

import os
import webbrowser
from typing import Annotated

import typer

from snapshot_shared.errors import NotFound
from snapshotctl.command import command, new_app
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl open", "snapshotctl --cluster big open --no-browser")
async def open_(
    tools: Tools,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and no more.")
    ] = False,
) -> None:
    """Print the address of the page, and open it in the browser.

    Where there is no display it is only printed. The address is that of the local cluster, or
    SNAPBACK_PAGE_URL.
    """
    url = _address(tools)
    if tools.screen.wants_table:
        tools.screen.line(url)
    else:
        tools.screen.value({"page": url})
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    # Without a display it would be a browser of text, which takes the terminal.
    if has_display and not no_browser and not webbrowser.open(url):
        tools.screen.note("no browser could be started; open the address yourself")


def _address(tools: Tools) -> str:
    """Return the address of the page. NotFound."""
    if (named := os.environ.get("SNAPBACK_PAGE_URL")) and tools.cluster is None:
        return named
    steps = "start it as docs/page.md says, and set SNAPBACK_PAGE_URL to its address"
    if tools.kubernetes is not None:
        raise NotFound("the chart has no page", next_step=steps)
    record = tools.folders.record_at(tools.find_server())
    if record is None or not record.page:
        raise NotFound("no page of this cluster is known here", next_step=steps)
    return record.page
