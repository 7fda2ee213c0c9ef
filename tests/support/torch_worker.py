"""A second process with the model: `torch_worker.py attach|STATE DEVICE ANSWER`.

It attaches as a reader, or restores the pool from a state file, gives a model without memory the
tensors of the pool, and writes its answer, and what it found, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.torch_site import path_with_torch

sys.path[:] = path_with_torch()

import snapback_client as client  # noqa: E402 - after the folder of PyTorch
from snapback_client.torch import TorchMemory  # noqa: E402 - as above
from tests.support.torch_model import answer, build_empty  # noqa: E402 - as above


def main(state: str, device: str, found: str) -> None:
    """Write what this process finds."""
    if state == "attach":
        pool = client.connect(device, lock="RO")
    else:
        pool = client.restore(Path(state).read_bytes(), device=device)
    with pool:
        memory = TorchMemory({"weights": pool})
        model = build_empty()
        memory.materialise(model)
        seen = {
            "calls": int(model.calls),
            "tied": model.head.weight is model.embedding.weight,
            "dtypes": sorted({str(each.dtype) for each in model.parameters()}),
            "shared": model.embedding.weight.data_ptr(),
            "imported": memory.imported_bytes(),
            "answer": answer(model).flatten().tolist(),
            "calls_after": int(model.calls),
        }
        Path(found).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
