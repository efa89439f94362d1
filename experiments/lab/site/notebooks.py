"""Runs the notebooks and keeps their outputs in their files, so that readers see them without running anything."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "notebooks"
_SECONDS = 600  # of one cell


def run_notebooks(paths: Sequence[pathlib.Path] | None = None) -> list[pathlib.Path]:
    """Run notebooks from top to bottom, and write their outputs into their files; return the files.

    Args:
        paths: the notebooks; None takes all of the repository.

    Raises:
        ModuleNotFoundError: the package 'nbclient' is not installed.
        nbclient.exceptions.CellExecutionError: a cell failed; its file stays as it was.
    """
    import nbclient
    import nbformat

    paths = sorted(FOLDER.glob("*.ipynb")) if paths is None else list(paths)
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        nbclient.NotebookClient(notebook, kernel_name="python3", timeout=_SECONDS, resources=resources).execute()
        path.write_text(kept(json.loads(nbformat.writes(notebook))), encoding="utf-8")
    return paths


def kept(notebook: dict[str, Any]) -> str:
    """Write a notebook as its file is kept: sorted keys, no times, no messages, and a digest of what was run.

    Args:
        notebook: the notebook as JSON values; it is changed.
    """
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["metadata"].pop("execution", None)
            cell["outputs"] = [out for out in cell["outputs"] if out.get("name") != "stderr"]
    notebook["metadata"] = {
        "kernelspec": notebook["metadata"]["kernelspec"],
        "kvjax": {"outputs_of": digest(notebook)},
        "language_info": {"name": "python"},
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def digest(notebook: dict[str, Any]) -> str:
    """Compute a digest of the code of a notebook's cells: outputs with another digest are of other code."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]
