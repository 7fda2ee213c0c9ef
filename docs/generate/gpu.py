"""docs/gpu.md: what an acceptance on a GPU has found, from docs/gpu.json (`make accept`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = "gpu.md"
FOUND = Path(__file__).parents[1] / "gpu.json"
GIB, MIB = 2**30, 2**20
Found = dict[str, Any]

_HEAD = """\
# On a GPU

*Made from `docs/gpu.json`, the report of [an acceptance](how-to/accept-on-a-gpu.md), by
`make docs`.*
"""
_CAPTURES = """\
## Captures

The product captures engines on one machine, in a local cluster (`snapshotctl up --device cuda
--driver criu`), ends them and restores them. A restored engine has to give the same answers: the
tokens that a model generates, and the result of its replayed CUDA graph. *llama* is a LLaMA of
random weights that knows nothing of Snapback, *memory* a process with memory of its own;
*shared-llama* and *pool* have their weights in a pool of Snapback.

A cold start imports PyTorch, makes random weights on the GPU and captures a graph. It loads and
compiles nothing, as a real one does, and the first one on a machine reads PyTorch from the disk.
Captures and restores are as their traces say, cold starts with the time of the command.
"""
_CONTROLS = "## Checkpoints of processes by the driver\n"
_STATUSES = """\
0 is success, 3 that the process does not use CUDA, 801 that it is not supported. A process whose
third number is 801 is lost. Pools of Snapback are unmapped before a capture.
"""
_KINDS = {
    "none": "no CUDA",
    "started": "CUDA initialised",
    "allocated": "memory of its own (`cuMemAlloc`)",
    "exportable": "memory that it may export",
    "reserved": "256 GiB of reserved addresses",
    "let-go": "addresses of memory that it had imported: a pool that sleeps",
    "imported": "imported memory, mapped",
}


def page() -> str:
    """Write the page."""
    report = json.loads(FOUND.read_text())
    found = {step["step"]: step["found"] for step in report["steps"]}
    steps = [(f"`{s['step']}`", s["result"], s["reason"].split(":")[0]) for s in report["steps"]]
    parts = (
        *(_HEAD, _machine(report["date"], found["facts"], report.get("note", ""))),
        *(_CAPTURES, _captures(found["captures"])),
        *(_CONTROLS, _controls(found["controls"]), _STATUSES),
        *("## Memory\n", _bandwidth(found["bandwidth"]), _memory(found)),
        *("## Steps\n", _table(("step", "result", ""), steps)),
    )
    return "\n".join(parts)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _machine(date: str, facts: Found, note: str) -> str:
    device = facts["devices"][0]
    driver, memory = facts["nvidia_smi"].split(", ")[1], device["capacity"] / GIB
    return (
        f"On {date[:10]}, on one {device['product']} ({memory:.1f} GiB) with the NVIDIA driver "
        f"{driver},\nLinux {facts['kernel']}, {facts['processors']} processors, Python "
        f"{facts['python']}, PyTorch {facts['torch']} and cuda-bindings\n{facts['cuda_bindings']}. "
        f"One run. {note}".rstrip()
        + "\n"
    )


def _captures(rows: Found) -> str:
    head = ("engine, driver", "artifact, GiB", "cold start, s", "capture, s", "restore, s")
    names = ("cold_start_s", "capture_s", "restore_s")
    return _table(
        head,
        (
            (case, f"{row['bytes'] / GIB:.2f}", *(f"{row[name]:.1f}" for name in names))
            for case, row in rows.items()
        ),
    )


def _controls(rows: Found) -> str:
    head = (
        "a process that has",
        "lock, checkpoint, restore, unlock",
        "mappings of `/dev/nvidia-uvm`",
        "files of NVIDIA open at the checkpoint",
    )
    return _table(
        head,
        (
            (
                _KINDS[kind],
                ", ".join(map(str, row["status"].values())),
                row["unified_mappings"],
                row.get("left_open", "-"),
            )
            for kind, row in rows.items()
        ),
    )


def _bandwidth(found: Found) -> str:
    names = ("save", "disk_write", "load", "disk_read")
    rows = [
        (case, *(row[name] for name in names))
        for case, row in found.items()
        if case.endswith(" requests")
    ]
    pcie = found["pcie_gb_s"]
    return (
        f"A save and a load of {found['bytes'] / GIB:.0f} GiB beside what the disk does alone, in "
        f"GB/s. PCIe alone copies\n{pcie['to_device']} GB/s to the device and {pcie['to_host']} "
        "from it.\n\n" + _table(("", "save", "disk, writing", "load", "disk, reading"), rows)
    )


def _memory(found: Found) -> str:
    torch, taken = found["pytorch"], found["footprint"]
    after = found["full_device"]["after_kill_s"]
    return (
        f"A pool with a model of {torch['parameter_bytes'] / GIB:.0f} GiB sleeps in "
        f"{torch['sleep_ms']} ms and wakes in {torch['wake_ms']} ms; its captured\ngraph answers "
        f"the same. An idle GPU memory service takes {taken['idle_server'] / MIB:.1f} MiB of the "
        f"device, a sleeping\nclient {taken['sleeping_client'] / MIB:.0f} MiB, as any process "
        "with a context does. After a foreign process that had filled\nthe device was killed, "
        f"there was room again within {after} s.\n"
    )
