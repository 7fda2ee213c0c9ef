"""Checks a device against every rule."""

from __future__ import annotations

from collections.abc import Callable

from gms.conformance.device_rules import DEVICE_RULES
from gms.conformance.rig import CudaRig, Rig, SimulatedRig, Skipped
from gms.conformance.service_rules import SERVICE_RULES

RULES: tuple[Callable[[Rig], str | None], ...] = (*DEVICE_RULES, *SERVICE_RULES)
"""A rule returns a remark or nothing, and raises Broken or Skipped. Its docstring is its name."""


def open_rig(kind: str, ordinal: int = 0) -> Rig:
    """Open a device of a kind, `simulated` or `cuda`. CudaUnavailable, UnknownDevice."""
    return CudaRig(ordinal) if kind == "cuda" else SimulatedRig()


def check(rig: Rig, write: Callable[[str], object]) -> bool:
    """Check every rule, write a line for each, and return whether none is broken."""
    is_sound = True
    for rule in RULES:
        name = (rule.__doc__ or rule.__name__).strip()
        try:
            remark = rule(rig)
        except Skipped as skipped:
            write(f"skipped  {name} ({skipped})\n")
        except Exception as error:  # noqa: BLE001 - whatever a device does wrong is a finding
            is_sound = False
            write(f"BROKEN   {name} {type(error).__name__}: {error}\n")
        else:
            write(f"holds    {name}{f' ({remark})' if remark else ''}\n")
    return is_sound
