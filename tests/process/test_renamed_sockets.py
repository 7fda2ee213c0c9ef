"""Unix sockets that were renamed have their names again before the restored process runs."""

from __future__ import annotations

import pytest

from tests.process.killing import restore_in
from tests.process.node import Node
from tests.support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.waits]


async def test_a_restored_process_never_sees_its_socket_without_its_name(node: Node) -> None:
    halted = await restore_in(node, "resumed")
    # CRIU waits after it has let the process run.
    await until(lambda: len(halted.container.lines()) > 2, "lines of the restored process")
    halted.go_on()
    report = await halted.answered()
    assert report.kind == "restored", report
    assert {line["renamed"] for line in halted.container.lines()} == {True}
