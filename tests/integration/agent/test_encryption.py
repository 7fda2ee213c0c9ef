"""Artifacts that are encrypted and signed, of workers that save their own state."""

import json
import sys
from pathlib import Path

import pytest

from snapshot_agent.domain import control
from snapshot_shared.artifact import PART_MANIFEST, SIGNATURE
from snapshot_shared.errors import Failure
from snapshot_shared.orders import ArtifactRef
from tests.support.agent_rig import Rig, fresh_uid
from tests.support.artifact_keys import forged, put_encryption, put_signing

ANSWER = "what only the worker knows"

# Turns the key around, which can be undone. It refuses while any worker is asked to be quiet.
KMS = """#!{python}
import pathlib, sys
print(sys.argv[1], file=open("{log}", "a"))
if sys.argv[1] == "wrap" and any(pathlib.Path("{state}").rglob("quiesce")):
    sys.exit("a worker is quiet")
sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])
"""


async def captured(rig: Rig, *arguments: str) -> tuple[ArtifactRef, Path]:
    content = fresh_uid()
    pod = await rig.running("--answer", ANSWER, *arguments)
    return await rig.captured(pod, content), rig.generation(content)


async def refused(rig: Rig, artifact: ArtifactRef, reason: str) -> Failure:
    """Restore an artifact; return why that was refused before the worker was touched."""
    pod = await rig.running(standby=True)
    failure = await rig.refused(rig.restore_order(pod, artifact), reason)
    assert not (pod.control / control.RESTORE_COMPLETE).exists()
    assert reason == "ArtifactCorrupt" or not (pod.control / control.RESTORE_FAILED).exists()
    return failure


async def restored(rig: Rig, artifact: ArtifactRef) -> str:
    pod = await rig.running(standby=True)
    await rig.done(rig.restore_order(pod, artifact), "restored")
    return pod.events()[-1]


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


async def test_a_kms_is_asked_before_the_worker_is_quiet(rig: Rig, tmp_path: Path) -> None:
    log, command = tmp_path / "kms.log", tmp_path / "kms"
    command.write_text(KMS.format(python=sys.executable, state=rig.state.parent, log=log))
    command.chmod(0o755)
    rig.settings["SNAPBACK_KMS_COMMAND"] = str(command)
    async with rig.agent():
        artifact, folder = await captured(rig)
        assert log.read_text().split() == ["wrap", "unwrap"]
        assert ANSWER.encode() not in (folder / "process" / "answer.json").read_bytes()
        assert await restored(rig, artifact) == f"restored {ANSWER} 1024"


async def test_an_artifact_is_verified_without_a_key(rig: Rig, keys: Path) -> None:
    async with rig.agent():
        artifact, _ = await captured(rig)
    del rig.settings["SNAPBACK_ARTIFACT_KEYS"]
    async with rig.agent():
        await rig.done(rig.verify_order(artifact), "verified")
        await refused(rig, artifact, "KeyUnavailable")


async def test_bytes_that_were_changed_with_all_their_digests_do_not_reach_the_worker(
    keys: Path, node: Rig
) -> None:
    artifact, folder = await captured(node, "--state-bytes", "100")
    part = folder / "process"
    file = part / "weights.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    failure = await refused(node, forged(artifact, folder), "ArtifactCorrupt")
    assert failure.values["file"] == "weights.bin"


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
        assert (await refused(rig, unsigned, "NotTrusted")).next_step
        (elsewhere / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes())
        await refused(rig, other, "NotTrusted")
        (folder / "process" / "answer.json").write_text(json.dumps({"answer": "a lie"}) + " " * 14)
        await refused(rig, forged(signed, folder), "NotTrusted")
