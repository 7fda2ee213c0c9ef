"""Options that count for all commands may stand anywhere."""

import pytest

from snapshotctl.domain.arguments import hoisted


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["get", "pods", "-o", "json"], ["-o", "json", "get", "pods"]),
        (["get", "-ojson", "pods"], ["-ojson", "get", "pods"]),
        (["trace", "x", "--output=yaml"], ["--output=yaml", "trace", "x"]),
        (
            ["get", "pods", "--server", "a", "--cluster", "b"],
            ["--server", "a", "--cluster", "b", "get", "pods"],
        ),
        (["--server", "a", "get"], ["--server", "a", "get"]),
        (["get", "--", "-o", "json"], ["get", "--", "-o", "json"]),
        (["get", "pods", "-o"], ["-o", "get", "pods"]),
        (["up", "--name", "x"], ["up", "--name", "x"]),
        (["bundle", "-o", "x.tar.gz"], ["bundle", "-o", "x.tar.gz"]),
        (["bundle", "-o", "json"], ["-o", "json", "bundle"]),
        (["-o", "json", "bundle", "-o", "x.tgz"], ["-o", "json", "bundle", "-o", "x.tgz"]),
        (["bundle", "-o"], ["-o", "bundle"]),
        ([], []),
    ],
)
def test_common_options_move_in_front_of_the_command(words: list[str], expected: list[str]) -> None:
    assert hoisted(words) == expected
