"""The list of families: in the documentation, and by ``kvjax ls families``."""

from __future__ import annotations

import json

from experiments.cli.main import main
from models.files.hf.config import MODEL_TYPES
from models.files.tables import family_table
from models.files.tables.families import FAMILIES, MISSING


def test_every_type_has_a_row_and_every_part_of_a_family_is_named():
    rows = {row.model_type: row for row in family_table.rows()}
    assert tuple(rows) == MODEL_TYPES
    assert not rows["llama"].parts and all(rows[kind].parts for kind in FAMILIES)
    assert len({row.parts for row in rows.values()}) >= len(rows) - 3, "parts tell families apart"


def test_ls_families_lists_what_loads_and_what_does_not(capsys):
    assert main(["ls", "families"]) == 0
    text = capsys.readouterr().out
    for row in family_table.rows():
        assert f"{row.model_type}  [{row.models}]" in text
    for kind, part in MISSING.items():
        assert f"{kind} is refused: this decoder does not have {part}" in text
    assert main(["ls", "families", "--json"]) == 0
    assert [entry["model_type"] for entry in json.loads(capsys.readouterr().out)] == list(MODEL_TYPES)
