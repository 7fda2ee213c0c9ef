"""Identity hashes are those of the reference; its own test names the first 12 digits of one.

`data/identity.json` was written by Go's encoding/json over the reference's struct.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_api.identity import canonical_json, identity_hash
from snapshot_api.manifests import parse_identity
from snapshot_api.v1alpha1.checkpoint import IdentitySpec
from tests.support.objects import checkpoint_document
from tests.unit.tables import each

VECTORS: list[dict[str, Any]] = msgspec.json.decode(
    (Path(__file__).with_name("data") / "identity.json").read_bytes()
)
LLAMA = IdentitySpec(model="meta-llama/Llama-2-7b-hf", backend_framework="vllm")


@each("vector", VECTORS)
def test_an_identity_is_hashed_as_go_writes_it(vector: dict[str, Any]) -> None:
    identity = msgspec.convert(vector["identity"], IdentitySpec)
    assert canonical_json(identity).decode() == vector["hashed"]
    assert identity_hash(identity) == vector["hash"]


def test_the_hash_of_the_reference_test_is_met() -> None:
    assert identity_hash(LLAMA)[:12] == "96429b272576"


def test_what_is_unset_and_what_is_zero_are_one_identity() -> None:
    zeros = msgspec.structs.replace(
        LLAMA, tensor_parallel_size=0, pipeline_parallel_size=0, max_model_len=0
    )
    assert identity_hash(zeros) == identity_hash(LLAMA)


@pytest.mark.parametrize("field", ["tensorParallelSize", "pipelineParallelSize", "maxModelLen"])
def test_a_manifest_may_say_zero_for_a_size_as_the_reference_does(field: str) -> None:
    identity = {"model": LLAMA.model, "backendFramework": LLAMA.backend_framework, field: 0}
    document = {**checkpoint_document(), "spec": {"identity": identity}}
    assert identity_hash(parse_identity(document)) == identity_hash(LLAMA)


@each(
    "change",
    [
        {"model": "meta-llama/Llama-2-7b"},
        {"backend_framework": "trtllm"},
        {"dynamo_version": "1"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"dtype": "float16"},
        {"max_model_len": 1},
        {"extra_parameters": {"": ""}},
    ],
)
def test_every_field_makes_another_identity(change: dict[str, Any]) -> None:
    assert identity_hash(msgspec.structs.replace(LLAMA, **change)) != identity_hash(LLAMA)
