"""The fault switch is there only when it was asked for."""

import pytest

from snapshot_shared import subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotFound
from tests.support.agent_rig import Rig

REQUEST = encode_json(SimRequest(arm=Fault(action="crash", step="spawn")))


async def test_an_agent_that_does_not_simulate_has_no_fault_switch(rig: Rig) -> None:
    await rig.process()
    with pytest.raises(NotFound):
        await rig.bus.request(subjects.rpc(rig.node, "agent", "sim"), REQUEST)


async def test_an_agent_of_a_simulation_answers_with_what_is_armed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPBACK_SIM", "1")
    await rig.process()
    answer = await rig.bus.request(subjects.rpc(rig.node, "agent", "sim"), REQUEST)
    assert decode_json(answer, SimReply).armed == [Fault(action="crash", step="spawn")]
