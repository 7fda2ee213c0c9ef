"""The nkeys of a local cluster in their files."""

from pathlib import Path

import pytest

from snapshot_shared.errors import InvalidInput
from snapshot_shared.nkey import public_key
from snapshot_shared.permissions import User
from snapshotctl.adapters.nkeys import admit
from snapshotctl.domain.cluster import NatsServer


def test_a_seed_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    seed = tmp_path / "state" / "keys" / "viewer.nk"
    made = public_key(seed)
    assert (made[0], len(made)) == ("U", 56)
    seed.chmod(0o644)
    assert public_key(seed) == made
    assert (seed.stat().st_mode & 0o777, seed.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", ["", "junk", "SU", "SU" + "a" * 56, "SA" + "A" * 56, "\0"])
def test_what_is_no_seed_of_a_user_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    seed = tmp_path / "operator.nk"
    seed.write_text(content)
    with pytest.raises(InvalidInput, match=r"operator\.nk"):
        public_key(seed)
    assert seed.read_text() == content


def test_a_configuration_holds_public_halves_of_seeds_that_stay_the_same(tmp_path: Path) -> None:
    server = NatsServer("x", "0.0.0.0:4222", tmp_path / "store", monitor="127.0.0.1:8222")
    seeds = {User("operator"): tmp_path / "operator" / "seed.nk"}
    configuration = tmp_path / "nats-server" / "nats.conf"
    admit(configuration, server, seeds)
    written = configuration.read_text()
    assert public_key(seeds[User("operator")]) in written
    assert seeds[User("operator")].read_text().strip() not in written
    assert 'listen: "0.0.0.0:4222"\nhttp: "127.0.0.1:8222"\n' in written
    admit(configuration, server, seeds)
    assert configuration.read_text() == written
