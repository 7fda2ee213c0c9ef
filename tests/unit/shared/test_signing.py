"""Which signatures a node accepts of artifacts, and what it says of the others."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from snapshot_shared.artifact import Signature
from snapshot_shared.errors import NotTrusted
from snapshot_shared.signing import NO_SIGNATURES, Signing, name_of
from tests.unit.tables import each

OURS, THEIRS = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
DIGEST, OTHER = (f"sha256:{digit * 64}" for digit in "12")
TRUSTED = {name_of(OURS.public_key()): OURS.public_key()}
STRICT = Signing(OURS, TRUSTED, required=True)
LENIENT = STRICT._replace(required=False)
STRANGER = Signing(THEIRS)


def signed(by: Signing, digest: str = DIGEST) -> Signature:
    found = by.sign(digest)
    assert found is not None
    return found


def test_an_artifact_that_a_trusted_key_has_signed_is_restored() -> None:
    STRICT.check(signed(STRICT), DIGEST)


def test_a_node_without_keys_signs_nothing_and_restores_everything() -> None:
    assert NO_SIGNATURES.sign(DIGEST) is None
    NO_SIGNATURES.check(None, DIGEST)
    NO_SIGNATURES.check(signed(STRANGER), DIGEST)


@pytest.mark.parametrize("found", [None, signed(STRANGER)])
def test_what_no_trusted_key_has_signed_is_refused_with_both_names_where_one_is_required(
    found: Signature | None,
) -> None:
    LENIENT.check(found, DIGEST)
    with pytest.raises(NotTrusted) as refused:
        STRICT.check(found, DIGEST)
    assert refused.value.values["expected"] == list(TRUSTED)
    assert refused.value.values["found"] == (found.key if found else "")
    for name in (*TRUSTED, found.key if found else "no signature"):
        assert name in str(refused.value)


@each("node", [STRICT, LENIENT])
@each(
    "forged",
    [
        signed(STRICT, OTHER),
        replace(signed(STRICT), signature=bytes(64)),
        replace(signed(STRANGER), key=name_of(OURS.public_key())),
    ],
)
def test_a_signature_in_the_name_of_a_trusted_key_has_to_be_right(
    node: Signing, forged: Signature
) -> None:
    with pytest.raises(NotTrusted, match=DIGEST):
        node.check(forged, DIGEST)
