"""The engines of the demo: where their manifests are, what each is asked, what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from snapshotctl.domain.exits import WrongArguments

MIN_SIZE_MIB = 16
MAX_SIZE_MIB = 1024 * 1024
SIZE_VARIABLE = "SIZE_MIB"
PORT_VARIABLE = "HTTP_PORT"
SHORT = "short"
WARM_UPS = ("full", SHORT)
"""How long a worker warms up: as its manifest says, or as short as it can."""


class Engine(NamedTuple):
    """A worker of the examples. Manifests are named from there, files from the checkout."""

    checkpoint: str
    restore: str
    what: str
    """What happens in its cold start, in a few words."""
    asked: tuple[str, ...]
    """What it is asked after the capture and after the restore, which changes nothing."""
    said: tuple[str, ...] = ()
    """What it is to learn before the capture, once it has answered the first question."""
    shown: str = "{answer}"
    """What is shown of an answer, as a format of its fields."""
    asks: Literal["lines", "files", "completions"] = "lines"
    """How it is asked: lines of JSON, or files over HTTP, at a socket of its pod; or prompts of
    OpenAI's API at the port HTTP_PORT."""
    installed: str = ""
    """A file that is there once `make engines` has installed it; empty where it needs nothing."""
    installed_by: str = "make engines"
    drivers: tuple[str, ...] = ()
    """The only ones by which it can be captured; any if empty."""
    size_mib: int = 512
    """Of its weights, unless it is sized otherwise."""
    memory_mib: int = 0
    """What it needs besides, at a time."""
    is_sized: bool = False
    """Whether its weights have the size that SIZE_MIB says."""
    short: Mapping[str, str] = {}
    """The variables that make its warm-up short, where it has a long one."""

    @property
    def needed(self) -> list[str]:
        """The files of the checkout that it needs, beside those of the examples."""
        return [*(self.asked if self.asks == "files" else ()), *filter(None, [self.installed])]


ENGINES = {
    "text": Engine(
        checkpoint="text/checkpoint.yaml",
        restore="text/restore.yaml",
        what="a language model is trained",
        asked=("A cold worker", "When a node is lost,", "My name is"),
        said=("My name is Ada.",),
        is_sized=True,
        short={"PASSES": "1"},
    ),
    "onnx": Engine(
        checkpoint="onnx/checkpoint.yaml",
        restore="onnx/restore.yaml",
        what="onnxruntime loads a trained model",
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
        asks="files",
        installed=".engines/.installed",
        size_mib=3,
    ),
    "vllm": Engine(
        checkpoint="vllm/checkpoint.yaml",
        restore="vllm/restore.yaml",
        what="vLLM starts on CPUs",
        asked=("A cold worker", "When a node is lost,", "My name is"),
        shown="{token_ids}",
        asks="completions",
        installed=".engines-vllm/model/config.json",
        installed_by="make engines ENGINE=vllm",
        drivers=("criu",),
        size_mib=6,
        memory_mib=6 * 1024,
    ),
}
"""By the value of `--engine`."""


def engine_of(name: str, driver: str, *, is_started_here: bool = True) -> Engine:
    """Return the engine of a name for a driver. WrongArguments names those that there are."""
    if name not in ENGINES:
        raise WrongArguments(f"--engine {name} is not one of {', '.join(ENGINES)}")
    found = ENGINES[name]
    if found.installed and not is_started_here:
        raise WrongArguments(
            f"--engine {name} is not for --on: workers of a cluster that runs may lack it"
        )
    if found.drivers and driver not in found.drivers:
        raise WrongArguments(
            f"--engine {name} is not captured by {driver}: add --driver {found.drivers[0]}"
        )
    return found


def variables(engine: Engine, size_mib: int, warm_up: str) -> dict[str, str]:
    """Return the variables that size a worker and its warm-up. WrongArguments."""
    if warm_up not in WARM_UPS:
        raise WrongArguments(f"--warm-up {warm_up} is not one of {', '.join(WARM_UPS)}")
    sized = {SIZE_VARIABLE: str(size_mib)} if engine.is_sized else {}
    return {**sized, **(engine.short if warm_up == SHORT else {})}


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
