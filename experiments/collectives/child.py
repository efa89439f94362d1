"""A process that measures cells: it reads them as lines of JSON, and answers each with a line of JSON.

`experiments.collectives.worker` starts it as ``python -m experiments.collectives.child MESH``. So a variant that kills its
process makes a row of the record, and does not end the run.
"""

from __future__ import annotations

import json
import os
import sys

import jax

from experiments.answering import make_mesh, mesh_axes, mesh_text
from experiments.collectives.measure import Cell, measure
from pallas_kernels.axes import MODEL


def main(text: str) -> None:
    """Answer until the input ends; ``text`` describes the mesh, or is empty for all devices."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    devices = jax.devices()
    text = text or f"{MODEL}={len(devices)}"
    hello = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    try:
        mesh = make_mesh(text)
        if mesh is None or mesh.shape[MODEL] < 2 or mesh.shape[MODEL] & (mesh.shape[MODEL] - 1):
            count = 0 if mesh is None else mesh.shape[MODEL]
            raise ValueError(f"the axis {MODEL!r} must have a power of two of devices, at least 2, got {count}")
    except ValueError as problem:
        print(json.dumps({"refused": str(problem)}), file=answers, flush=True)
        return
    print(json.dumps({"device": hello, "mesh": mesh_text(mesh_axes(text))}), file=answers, flush=True)
    for line in sys.stdin:
        cell = Cell(**json.loads(line))
        try:
            row = {**measure(cell, mesh), "error": None}
        except Exception as problem:  # the other cells are still wanted
            row = {"value": None, "unit": "s", "passed": False, "error": f"{type(problem).__name__}: {problem}"[:2000]}
        print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
