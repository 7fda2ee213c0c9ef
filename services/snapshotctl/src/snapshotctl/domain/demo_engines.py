"""The engines of the demo: where their manifests are, what each is asked, what it answers."""

from __future__ import annotations

from typing import NamedTuple

from snapshotctl.domain.exits import WrongArguments

MIN_SIZE_MIB = 16
MAX_SIZE_MIB = 1024 * 1024


class Engine(NamedTuple):
    """A worker of the examples. Manifests are named from there, files from the checkout."""

    checkpoint: str
    restore: str
    said: tuple[str, ...]
    """What it is sent before the capture, once it serves."""
    asked: tuple[str, ...]
    """What it is asked after the capture and after the restore, which changes nothing."""
    shown: str
    """What is shown of an answer, as a format of its fields."""
    takes_files: bool = False
    """Whether what it is asked are files, over HTTP; else lines of text."""
    installed: str = ""
    """A file that is there once `make engines` has installed it; empty where it needs nothing."""
    size_mib: int = 512
    """Of its weights, unless it is sized otherwise."""
    is_sized: bool = False
    """Whether its weights have the size that SIZE_MIB says."""

    @property
    def needed(self) -> list[str]:
        """The files of the checkout that it needs, beside those of the examples."""
        return [*(self.asked if self.takes_files else ()), *filter(None, [self.installed])]


ENGINES = {
    "numpy": Engine(
        checkpoint="checkpoint.yaml",
        restore="restore.yaml",
        said=(
            "My name is Ada and I like amber.",
            "The harbour opens at seven.",
            "Remember the number 4711.",
            "Ships turn left at the lighthouse.",
            "My favourite river is the Tyne.",
            "Lamps are lit from west to east.",
            "The cat is called Turing.",
            "Bring the maps tomorrow.",
        ),
        asked=(
            "What is my name?",
            "When does the harbour open?",
            "Which number did I give you?",
            "What is the cat called?",
        ),
        shown="{answer} (memory {memory}, turns {turns})",
        is_sized=True,
    ),
    "onnx": Engine(
        checkpoint="onnx/checkpoint.yaml",
        restore="onnx/restore.yaml",
        said=("README.md",),
        asked=(
            ".editorconfig",
            ".gitignore",
            "LICENSE",
            "Makefile",
            "README.md",
            "deploy/compose/grafana/datasource.yaml",
            "deploy/crds/snapshots.nvidia.com.yaml",
            "deploy/examples/onnx_worker.py",
            "deploy/helm/snapback/values.schema.json",
            "deploy/images/build.sh",
            "deploy/images/service.Dockerfile",
            "docs/concepts.md",
            "docs/images/page-busy.png",
            "pyproject.toml",
            "requirements.in",
            "services/page/src/snapshot_page/page.html",
            "services/snapshot-agent/init/init.c",
            "tests/support/fake_cuda/fake.h",
            "tests/support/tools/coredns/go.mod",
            "tests/support/tools/coredns/go.sum",
        ),
        shown="{label} (score {score})",
        takes_files=True,
        installed=".engines/.installed",
        size_mib=3,
    ),
}
"""By the value of `--engine`."""


def engine_of(name: str, *, is_started_here: bool = True) -> Engine:
    """Return the engine of a name. WrongArguments names those that there are."""
    if name not in ENGINES:
        raise WrongArguments(f"--engine {name} is not one of {', '.join(ENGINES)}")
    found = ENGINES[name]
    if found.installed and not is_started_here:
        raise WrongArguments(
            f"--engine {name} is not for --on: workers of a cluster that runs may lack it"
        )
    return found


def check_size(engine: Engine, size_mib: int | None) -> int:
    """Return the size of the weights, in MiB. WrongArguments when the engine cannot have it."""
    if size_mib is None:
        return engine.size_mib
    if not engine.is_sized:
        raise WrongArguments(
            f"--size-mib {size_mib}: the weights of this engine have the size of its model, so "
            "leave --size-mib and SIZE_MIB out"
        )
    if not MIN_SIZE_MIB <= size_mib <= MAX_SIZE_MIB:
        raise WrongArguments(
            f"--size-mib {size_mib} is not between {MIN_SIZE_MIB} and {MAX_SIZE_MIB}"
        )
    return size_mib
