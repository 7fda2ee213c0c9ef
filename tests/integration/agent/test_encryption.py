"""Artifacts that are encrypted and signed, of workers that save their own state."""

import json
from pathlib import Path

import pytest

from snapshot_agent.domain import control
from snapshot_shared.artifact import PART_MANIFEST, SIGNATURE
from snapshot_shared.errors import Failure
from snapshot_shared.orders import ArtifactRef
from tests.support.agent_rig import Pod, Rig, fresh_uid
from tests.support.artifact_keys import forged, put_encryption, put_signing

ANSWER = "what only the worker knows"


async def captured(rig: Rig, *arguments: str) -> tuple[ArtifactRef, Path]:
    content = fresh_uid()
    pod = await rig.running("--answer", ANSWER, *arguments)
    return await rig.captured(pod, content), rig.generation(content)


async def refusal(rig: Rig, artifact: ArtifactRef) -> tuple[Failure, Pod]:
    """Restore an artifact; return why that was refused, and the worker."""
    pod = await rig.running(standby=True)
    report = await rig.carry_out(rig.restore_order(pod, artifact))
    assert report.failure is not None, report
    return report.failure, pod


async def restored(rig: Rig, artifact: ArtifactRef) -> str:
    pod = await rig.running(standby=True)
    report = await rig.carry_out(rig.restore_order(pod, artifact))
    assert report.kind == "restored", report
    return pod.events()[-1]


def untouched(pod: Pod) -> bool:
    names = (control.RESTORE_COMPLETE, control.RESTORE_FAILED)
    return not any((pod.control / name).exists() for name in names)


@pytest.fixture
def keys(rig: Rig) -> Path:
    """The folder of the node's keys, with one to encrypt."""
    folder = rig.state.parent / "keys"
    put_encryption(folder)
    rig.settings["SNAPBACK_ARTIFACT_KEYS"] = str(folder)
    return folder


async def test_the_state_of_a_worker_is_encrypted_and_comes_back(keys: Path, node: Rig) -> None:
    artifact, folder = await captured(node, "--state-bytes", "20971520")
    found = [path for path in (folder / "process").iterdir() if path.name != PART_MANIFEST]
    assert sorted(path.name for path in found) == ["answer.json", "weights.bin"]
    assert not any(ANSWER.encode() in path.read_bytes() for path in found)
    assert await restored(node, artifact) == f"restored {ANSWER} 20971520"


async def test_an_artifact_is_verified_without_a_key(rig: Rig, keys: Path) -> None:
    async with rig.agent():
        artifact, _ = await captured(rig)
    del rig.settings["SNAPBACK_ARTIFACT_KEYS"]
    async with rig.agent():
        report = await rig.carry_out(rig.verify_order(artifact))
        assert report.kind == "verified", report
        failure, pod = await refusal(rig, artifact)
        assert failure.reason == "KeyUnavailable"
        assert untouched(pod)


async def test_bytes_that_were_changed_with_all_their_digests_do_not_reach_the_worker(
    keys: Path, node: Rig
) -> None:
    artifact, folder = await captured(node, "--state-bytes", "100")
    part = folder / "process"
    file = part / "weights.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    artifact = forged(artifact, folder)
    failure, pod = await refusal(node, artifact)
    assert failure.reason == "ArtifactCorrupt"
    assert failure.values["file"] == "weights.bin"
    assert not (pod.control / control.RESTORE_COMPLETE).exists()


async def test_only_what_a_trusted_key_has_signed_is_restored_where_that_is_required(
    rig: Rig,
) -> None:
    ours, theirs = rig.state.parent / "ours", rig.state.parent / "theirs"
    put_signing(theirs, trusted=ours)
    async with rig.agent():
        unsigned, _ = await captured(rig)
    rig.settings["SNAPBACK_ARTIFACT_KEYS"] = str(theirs)
    async with rig.agent():
        signed, folder = await captured(rig)
        other, elsewhere = await captured(rig)
    rig.settings |= {"SNAPBACK_ARTIFACT_KEYS": str(ours), "SNAPBACK_REQUIRE_SIGNATURE": "1"}
    async with rig.agent():
        assert await restored(rig, signed) == f"restored {ANSWER} 1024"
        failure, pod = await refusal(rig, unsigned)
        assert failure.reason == "NotTrusted"
        assert failure.next_step
        assert untouched(pod)
        (elsewhere / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes())
        failure, pod = await refusal(rig, other)
        assert failure.reason == "NotTrusted"
        assert untouched(pod)
        (folder / "process" / "answer.json").write_text(json.dumps({"answer": "a lie"}) + " " * 14)
        failure, pod = await refusal(rig, forged(signed, folder))
        assert (failure.reason, untouched(pod)) == ("NotTrusted", True)


async def test_an_unsigned_artifact_is_restored_where_nothing_is_required(rig: Rig) -> None:
    async with rig.agent():
        unsigned, folder = await captured(rig)
        assert not (folder / SIGNATURE).exists()
    keys = rig.state.parent / "keys"
    put_signing(keys)
    rig.settings["SNAPBACK_ARTIFACT_KEYS"] = str(keys)
    async with rig.agent():
        assert await restored(rig, unsigned) == f"restored {ANSWER} 1024"
