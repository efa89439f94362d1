"""The tables of the documentation, made from the records alone: ``python -m experiments.site.record_tables`` writes them.

``tables/compare.md`` is not among them: the program that made its record is gone, and the page stays as it was written.
"""

from __future__ import annotations

import json
import pathlib

from experiments.ablations import report as ablations
from experiments.ablations.plans import ABLATIONS
from experiments.evaluation import tables as evaluation
from experiments.kernels import __main__ as kernels
from experiments.records.record import write_bytes
from experiments.records.tables import table_file
from experiments.speed import offload, report

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_MARKDOWN = {
    "kernels": kernels.markdown,
    "offload": offload.markdown,
    "offload-h200": offload.markdown,
    "speed": report.markdown,
    "speed-qwen3": report.markdown,
    "speed-split": report.markdown,
}


def pages(docs: pathlib.Path = DOCS) -> dict[pathlib.Path, str]:
    """The text of every page of tables by its file: those of ``docs/tables`` and the table of every result folder.

    Args:
        docs: folder of the pages, with the folder ``records`` in it.
    """
    made = {}
    for name, markdown in _MARKDOWN.items():
        path = docs / "records" / f"{name}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        made[table_file(path)] = markdown(record["metrics"], record["notes"])
    folder = docs / "records" / "ablations"
    page = table_file(folder)
    made[page] = ablations.markdown([folder / f"{name}.json" for name in ABLATIONS], page.parent)
    for metrics in sorted((docs / "records" / "results").glob("*/metrics.json")):
        made[metrics.parent / "table.md"] = evaluation.report([metrics.parent])
    return made


if __name__ == "__main__":
    for file, text in pages().items():
        write_bytes(file, text.encode())
