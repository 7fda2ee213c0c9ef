"""Where the question of `ask` goes."""

from __future__ import annotations

import pytest

from snapshotctl.adapters import asking


@pytest.mark.parametrize(
    ("to", "expected"),
    [("8000", "127.0.0.1:8000"), ("worker.sock", "/pod/worker.sock"), ("²", "/pod/²")],
)
def test_only_digits_of_ascii_are_a_port(
    monkeypatch: pytest.MonkeyPatch, to: str, expected: str
) -> None:
    monkeypatch.setenv("POD_SOCKET_DIR", "/pod")
    assert asking._where(to) == expected
