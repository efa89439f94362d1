"""Ablation of ParisKV: the rotation of keys before hashing, and the number of retrieved keys."""

from __future__ import annotations

from experiments.lab.ablations.arms import Lab, Methods, Table, table
from experiments.lab.readings import read_as
from experiments.lab.readings.pariskv import PlainKeys


def hashing(lab: Lab) -> list[Table]:
    """Compare ParisKV with and without the rotation of keys before hashing, at several k."""
    paper = lab.method("pariskv").budget
    arms: Methods = {}
    for rotate, name in ((False, "plain keys"), (True, "rotated keys")):
        for part in (1, 3, 10):
            budget = max(paper // part, 1)
            method = lab.method("pariskv", budget=budget, capacity=paper)
            method = method if rotate else read_as(PlainKeys, method)
            arms[f"{name}, k {budget}"] = ({"rotate": rotate, "part": part}, method)
    text = (
        "Keys hashed as they are, or after a randomized Hadamard rotation. Normalising keys has no row: codes and weights "
        "of a slice do not depend on the key's length, which re-ranking multiplies back."
    )
    tasks = lab.pick("kv_retrieval", "niah_multikey_3", "niah_multivalue")
    return [table(lab, "ParisKV: rotation before hashing", text, tasks, arms)]
