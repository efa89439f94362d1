"""The tables of the documentation, made from the records alone; ``python -m experiments.lab.site OUT --tables`` writes them."""

from __future__ import annotations

import json
import pathlib

from experiments.cli import read_record
from experiments.evaluation import report
from experiments.lab.ablations import ablation_tables, records_in
from experiments.lab.fidelity import fidelity_tables
from experiments.lab.site import paper_tables
from experiments.records import table_file
from experiments.speed import kernel_table, offload_tables, peer_tables, speed_tables, tpu_bytes_table

_TABLES = {
    "kernels": kernel_table,
    "offload": offload_tables,
    "offload-h200": offload_tables,
    "peers": peer_tables,
    "speed": speed_tables,
    "speed-four": speed_tables,
    "speed-h200": speed_tables,
    "speed-long-answers": speed_tables,
    "speed-mesh": speed_tables,
    "speed-mesh-h100": speed_tables,
    "speed-qwen3": speed_tables,
    "speed-split": speed_tables,
    "tpu-bytes": tpu_bytes_table,
}


def pages(docs: pathlib.Path) -> dict[pathlib.Path, str]:
    """Write the text of every page of tables, by file: the pages of ``docs/tables``, and the table of every result folder.

    Args:
        docs: folder of the pages, with the folder ``records`` in it.
    """
    made = {}
    for name, tables in _TABLES.items():
        path = docs / "records" / f"{name}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        made[table_file(path)] = tables(record["metrics"], record["notes"])
    folder = docs / "records" / "ablations"
    page = table_file(folder)
    made[page] = ablation_tables(records_in(folder), page.parent)
    for metrics in sorted((docs / "records" / "results").glob("*/metrics.json")):
        made[metrics.parent / "table.md"] = report([metrics.parent])
    made[docs / "tables" / f"{paper_tables.PAGE}.md"] = paper_tables.page(docs)
    for metrics in sorted((docs / "records" / "fidelity").glob("*/metrics.json")):
        made[metrics.parent / "table.md"] = fidelity_tables(read_record(metrics.parent))
    return made
