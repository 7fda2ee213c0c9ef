"""Exit codes: what is documented is what happens."""

from snapshot_shared import errors
from snapshotctl.domain import exits
from snapshotctl.domain.exits import Exit, exit_of
from tests.unit.tables import each


@each(
    ("error", "code"),
    [
        (errors.NotFound("x"), Exit.NOT_FOUND),
        (errors.InvalidManifest("x"), Exit.REFUSED),
        (errors.InvalidName("x"), Exit.REFUSED),
        (errors.AlreadyExists("x"), Exit.REFUSED),
        (errors.Forbidden("x"), Exit.REFUSED),
        (errors.Conflict("x"), Exit.REFUSED),
        (errors.RequestExpired("x"), Exit.REFUSED),
        (errors.BusUnavailable("x"), Exit.UNREACHABLE),
        (errors.DeadlineExceeded("x"), Exit.TIMEOUT),
        (errors.SourceExited("x"), Exit.FAILED),
        (errors.Internal("x"), Exit.FAILED),
        (exits.WrongArguments("x"), Exit.USAGE),
        (exits.NeverTrue("x"), Exit.FAILED),
        (exits.DemoFailed("x"), Exit.FAILED),
        (errors.RemoteFailure(errors.NotFound("x").to_failure()), Exit.NOT_FOUND),
    ],
)
def test_the_reason_of_an_error_gives_the_exit_code(
    error: errors.SnapbackError, code: Exit
) -> None:
    assert exit_of(error.to_failure()) is code


def test_every_reason_in_the_table_exists() -> None:
    known = {found.reason for found in _all(errors.SnapbackError)}
    assert set(exits.REASONS) <= known


def test_every_code_is_explained() -> None:
    text = exits.help_text()
    assert all(f"{code.value}  " in text for code in Exit)
    assert set(exits.MEANINGS) == set(Exit)


def _all(kind: type[errors.SnapbackError]) -> list[type[errors.SnapbackError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _all(child))]
