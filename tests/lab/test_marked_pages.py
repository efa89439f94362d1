"""Parts of pages that are made from result folders: on written records whose tables are known."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

import models
from experiments.benchmarks import Example
from experiments.cli import read_record
from experiments.evaluation import Entry, chance, changes, kendall_tau, mean_scores, plots, solved
from experiments.evaluation import agreement as agreement_of_models
from experiments.evaluation.folder import Folder
from experiments.lab.site import agreement, choice, distance, marks, pages, quality, untouched

ROOT = pathlib.Path(models.__file__).parents[1]
TASKS = ("niah_single_1", "vt")
SAMPLES = 20


def row(method, task, length, question, scores, knobs, share):
    return {
        "name": task, "task": task, "length": length, "method": method, "question": question, "knobs": knobs,
        "samples": SAMPLES, "seed": 0, "haystack": None, "depth": None, "questions": 1, "source": "", "unit": "percent",
        "value": 100 * float(np.mean(scores)), "interval_95": [0.0, 100.0], "attended_tokens": share * length,
        "length_tokens": length, "bytes_read_per_step": share * 1e7, "full_bytes_read_per_step": 1e7,
        "resident_bytes_per_row": share * 2e7, "no_effect": share == 1, "seconds": 1.0, "compile_seconds": 0.0,
    }  # fmt: skip


def write_folder(docs, name, cells, model="smollm2-retrieval"):
    """A result folder; ``cells`` has (method, task, length, question, scores, knobs, share read) of every row."""
    folder = Folder(
        docs / "records" / "results" / name, "eval", {"model": model, "dtype": "bfloat16"}, "methods: []\n", {}
    )
    for method, task, length, question, scores, knobs, share in cells:
        lines = [
            {"key": f"{task}-{length}-{i}", "group": "", "prediction": str(score), "score": float(score)}
            for i, score in enumerate(scores)
        ]
        made = row(method, task, length, question, scores, knobs, share)
        folder.add(
            made, {"method": method, "name": task, "length": length, "question": question, "knobs": knobs}, lines
        )
    folder.keep_examples()


def right(count):
    """Scores of which the first ``count`` are 1."""
    return [1.0] * count + [0.0] * (SAMPLES - count)


def cells(question, length, scores):
    """Cells of both tasks; ``scores`` has (right answers in both tasks, knobs, share read) by the method's label."""
    return [
        (method, task, length, question, right(count), knobs, share)
        for method, (counts, knobs, share) in scores.items()
        for task, count in zip(TASKS, counts)
    ]


MAIN = {
    "full": ((20, 20), {}, 1),
    "snapkv": ((12, 10), {"budget": 1024}, 0.125),
    "snapkv(budget=1/16)": ((9, 9), {"budget": 512}, 0.0625),
    "snapkv(budget=1/64)": ((1, 1), {"budget": 128}, 0.02),  # of the papers' tables, as the next two: in no column
    "snapkv(budget=1/16, kernel=7)": ((1, 1), {"budget": 512, "kernel": 7}, 0.0625),
    "magicpig(num_tables=170)": ((1, 1), {"num_tables": 170}, 0.5),
    "chess": ((2, 2), {"ratios": [0.1, 0.1, 0.1]}, 0.02),
    "chess(ratios=[0.5, 0.5, 0.5])": ((11, 11), {"ratios": [0.5, 0.5, 0.5]}, 0.2),
    "mosaickv": ((16, 16), {"channels": 0.25, "fraction": 0.1}, 0.05),
    "mosaickv(channels=0.5, fraction=0.5)": ((18, 18), {"channels": 0.5, "fraction": 0.5}, 0.3),
}
OWN = {label: values for label, values in MAIN.items() if "(" not in label}


@pytest.fixture
def docs(tmp_path):
    """The documentation without the records of the real model."""
    kept = shutil.ignore_patterns("_build", "results", "fidelity")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=kept)
    shutil.copytree(ROOT / "docs" / "records" / "results" / "toy", tmp_path / "docs" / "records" / "results" / "toy")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path / "docs"


def test_without_records_the_pages_name_the_commands(docs):
    texts = {file.name: text for file, text in pages.marked_pages(docs).items()}
    command = "python -m kvjax eval --config docs/settings/main.yaml --out docs/records/results/main"
    assert f"This part has not been measured yet. `{command}` makes its record." in texts["quality-twin.md"]
    assert "docs/settings/base-tuned.yaml --out" in texts["quality-twin.md"]
    assert "docs/settings/fidelity.yaml --out docs/records/fidelity/base`" in texts["quality-twin.md"]
    assert f"`{command}`" in texts["choosing.md"]
    unmeasured = "This part has not been measured yet. `python -m kvjax eval --config docs/settings/qwen-"
    assert texts["quality.md"].count(unmeasured) == 8
    assert "The built-in retrieval toy" in texts["README.md"] and "has not been measured" not in texts["README.md"]


def test_tables_of_the_main_runs(docs):
    write_folder(docs, "main", cells("prefill", 8192, MAIN))
    write_folder(docs, "main-16k", cells("prefill", 16384, OWN))
    write_folder(docs, "main-extend", cells("extend", 8192, {**OWN, "snapkv": ((1, 0), {"budget": 1024}, 0.125)}))
    made = quality.parts(docs) | choice.parts(docs)
    front = made["quality"]()
    assert "SmolLM2-135M-Instruct (4-bit weights) with our retrieval adapter, computed in bfloat16" in front
    assert "means of 2 tasks with 20 samples" in front.replace("\n", " ")
    lines = [line for line in front.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| method | score at 8K | score at 16K | question after, 8K | read per step at 8K |")
    assert lines[2:] == [  # the best first
        "| Full | 100.0 | 100.0 | 100.0 | 10.00 MB | 20.00 MB |",
        "| MosaicKV | 80.0 | 80.0 | 80.0 | 0.50 MB (5.0 %) | 1.00 MB |",
        "| SnapKV | 55.0 | 55.0 | 2.5 | 1.25 MB (12.5 %) | 2.50 MB |",
        "| CHESS | 10.0 | 10.0 | 10.0 | 0.20 MB (2.0 %) | 0.40 MB |",
    ]
    shutil.rmtree(docs / "records" / "results" / "main-16k")
    write_folder(docs, "main-16k", cells("prefill", 16384, {name: OWN[name] for name in ("full", "snapkv")}))
    half = quality.parts(docs)["quality"]()  # without the papers' methods at 16K
    assert "score at 16K" not in half and "read per step at 8K" in half
    budgets = made["main-budgets"]().splitlines()
    assert "| SnapKV | 55.0 (12.5 %) | 45.0 (6.2 %) | 55.0 (12.5 %) |  |" in budgets
    assert "| CHESS | 10.0 (2.0 %) |  | 55.0 (20.0 %) |  |" in budgets
    assert "| MosaicKV | 80.0 (5.0 %) |  |  | 90.0 (30.0 %) |" in budgets
    assert "| SnapKV | 60 | 50 |" in made["main-tasks"]() and "| method | single_1 | vt |" in made["main-tasks"]()
    (asked,) = [line for line in made["main-questions"]().splitlines() if line.startswith("| SnapKV")]
    assert asked.startswith("| SnapKV | 55.0 | -45.0 ±") and "| 2.5 | -97.5 ±" in asked
    rows = json.loads((docs / "records" / "speed.json").read_text())["metrics"]
    at_128k = {"name": "decode", "method": "snapkv", "length": 131072, "batch": 1}
    (step,) = (row["value"] for row in rows if at_128k.items() <= row.items())
    assert "| SnapKV | -45.0 ± " in made["choosing"]() and f"| 12.5 % | 12.5 % | {1e3 * step:.2f} |" in made["choosing"]()
    assert made["papers"]().splitlines()[2].startswith("| [MosaicKV](methods/mosaickv.md) | -20.0 ± ")
    assert pages.marked_pages(docs)[docs.parent / "README.md"].count("\n") <= 150


QWEN = {  # right answers of 20 in niah_single_1, vt, code_recall and code_recall_renamed; knobs; share read
    "full": ((20, 11, 16, 14), {}, 1),
    "snapkv": ((12, 10, 8, 6), {"budget": 2048}, 0.13),
    "snapkv(budget=1/16)": ((9, 0, 4, 4), {"budget": 1024}, 0.065),
    "quest": ((18, 1, 2, 2), {"budget": 2048}, 0.25),
    "chess": ((2, 20, 0, 0), {"ratios": [0.5, 0.2, 0.1]}, 0.02),
    "reversed": ((1, 1, 1, 1), {"budget": 2048}, 0.13),
}


def qwen_cells(question, length, scores):
    names = ("niah_single_1", "vt", "code_recall", "code_recall_renamed")
    return [
        (method, task, length, question, right(count), knobs, share)
        for method, (counts, knobs, share) in scores.items()
        for task, count in zip(names, counts)
    ]


def test_tables_of_the_untouched_model(docs):
    write_folder(docs, "main", cells("prefill", 8192, MAIN))
    write_folder(docs, "qwen-16k", qwen_cells("prefill", 16384, QWEN), "qwen2.5-coder-1.5b")
    own = {name: QWEN[name] for name in ("full", "snapkv", "quest", "chess")}
    longer = {**own, "full": ((20, 12, 16, 14), {}, 1)}  # at 32K vt counts, too
    write_folder(docs, "qwen-32k", qwen_cells("prefill", 32768, longer), "qwen2.5-coder-1.5b")
    write_folder(docs, "qwen-16k-question-after", qwen_cells("extend", 16384, own), "qwen2.5-coder-1.5b")
    more = qwen_cells("prefill", 16384, {**own, "headkv(scores=file.json)": ((16, 0, 0, 0), {"scores": [1]}, 0.13)})
    more = [(*cell[:1], "passkey", *cell[2:]) for cell in more if cell[1] == "niah_single_1"]
    write_folder(docs, "qwen-16k-other-tasks", more, "qwen2.5-coder-1.5b")
    write_folder(docs, "qwen-full", qwen_cells("prefill", 4096, {"full": ((20, 19, 18, 17), {}, 1)}), "qwen2.5-coder-1.5b")
    texts = {file.name: text for file, text in pages.marked_pages(docs).items()}
    assert texts["quality.md"].count("has not been measured") == 2  # the distances from Full have records of their own
    assert "Qwen2.5-Coder" not in texts["quality-twin.md"]
    front = pages.parts(docs)["quality"]()
    told = front.replace("\n", " ")
    assert "Qwen2.5-Coder-1.5B-Instruct (4-bit weights) as it was published, computed in bfloat16" in told
    assert "means of the 1 tasks on which Full has at least 60 (single_1) at 16K, 20 samples of each; of the 2 tasks" in told
    assert "`qwen-32k.yaml` the other columns." in told and "SmolLM2" not in front
    lines = [line for line in front.splitlines() if line.startswith("| ")]
    assert lines[0] == (
        "| method | score at 16K | score at 32K | code recall at 16K | read per step at 16K | resident at 16K |"
    )
    assert lines[2:] == [
        "| Full | 100.0 | 80.0 | 80 / 70 | 10.00 MB | 20.00 MB |",
        "| Quest | 90.0 | 47.5 | 10 / 10 | 2.50 MB (25.0 %) | 5.00 MB |",
        "| SnapKV | 60.0 | 55.0 | 40 / 30 | 1.30 MB (13.0 %) | 2.60 MB |",
        "| CHESS | 10.0 | 55.0 | 0 / 0 | 0.20 MB (2.0 %) | 0.40 MB |",
    ]
    assert "All 20 scores were measured on commit " in told  # of 4 methods: 1 and 2 of code at 16K, 2 at 32K
    assert texts["README.md"].count("\n") <= 150
    page = texts["quality.md"]
    assert "| task | 4K, 20 samples | 16K, 20 samples | 32K, 20 samples |" in page and "| `vt` | 95.0 | 55.0 | 60.0 |" in page
    assert "Means of single_1 at 16K, with 20 samples" in page and "| Quest | 90.0 | -10.0 ± " in page
    assert "| SnapKV | 16,384 | 60.0 | -40.0 ± " in page and "| SnapKV(budget=1/16) | 45.0 | -55.0 ± " in page
    assert "| SnapKV | 45.0 (6.5 %) | 60.0 (13.0 %) | 60.0 (13.0 %) |" in page and "| Quest |  |  | 90.0 (25.0 %) |" in page
    assert "| method | **single_1** | vt | code_recall | code_recall_renamed |" in page
    assert "| `vt` | 55.0 | 50.0 | 5.0 |" in page  # Full, SnapKV, Reversed
    assert "| method | mean of 1 tasks | passkey | mean of 2 |" in page and "| SnapKV | 60.0 | 60 | 60.0 |" in page
    assert "The two means order 4 methods with a tau of 1.00:" in page
    assert "| Quest | -10.0 ± " in texts["choosing.md"]
    assert pages.figures(docs)["results/qwen-16k/solved.png"] == ("results/qwen-16k", "solved")
    assert plots.solved(read_record(docs / "records" / "results" / "qwen-16k")["metrics"]).axes


def test_tables_of_the_base_and_the_order(docs):
    base = {
        "full": ((20, 16), {}, 1),
        "snapkv": ((18, 20), {}, 0.1),
        "quest": ((4, 20), {}, 0.1),
        "h2o": ((10, 0), {}, 0.1),
    }
    tuned = {
        "full": ((20, 20), {}, 1),
        "snapkv": ((2, 20), {}, 0.1),
        "quest": ((19, 20), {}, 0.1),
        "h2o": ((1, 0), {}, 0.1),
    }
    write_folder(docs, "base", cells("prefill", 2048, base), model="smollm2")
    assert "base-tuned.yaml" in agreement.parts(docs)["order"]()
    write_folder(docs, "base-tuned", cells("prefill", 2048, tuned))
    made = agreement.parts(docs)
    assert "| `niah_single_1` | **100.0** |\n| `vt` | 80.0 |" in made["base-cells"]()  # vt does not count
    assert made["base-means"]().splitlines()[0] == "| method | mean | against Full | single_1 at 2K | read |"
    assert "\n| SnapKV | 90.0 | -10.0 ± " in made["base-means"]()
    text = made["order"]()
    # base: snapkv 18, h2o 10, quest 4; tuned: quest 19, snapkv 2, h2o 1
    assert "Kendall's tau of the two orders is -0.33" in text
    assert "Of the 3 pairs of methods, 2 change places, 2 of them beyond" in text
    assert "* SnapKV less Quest: +70.0 ± " in text and "* H2O less Quest: +30.0 ± " in text
    assert "| SnapKV | 90.0 | 10.0 | 1 | 2 |" in text


def test_distances_have_a_row_for_each_method(docs):
    folder = docs / "records" / "fidelity" / distance.RECORDS["fidelity"]
    rows = [
        {"method": method, "stream": stream, "length": length, "value": kl, "agreement": 90.0, "bytes_read_per_step": 1.0,
         "full_bytes_read_per_step": 8.0}
        for method, kl in (("full", 0.0), ("h2o", 0.5), ("quest", 0.25))
        for stream, length in (("prose", 2048), ("prose", 4096))
    ]  # fmt: skip
    settings = {"model": "smollm2", "dtype": "bfloat16", "samples": 4, "tokens": 128}
    folder.mkdir(parents=True)
    record = {"experiment": "fidelity", "settings": settings, "device": {"kind": "H100"}, "metrics": rows}
    (folder / "metrics.json").write_text(json.dumps(record))
    lines = distance.parts(docs)["fidelity"]().splitlines()
    assert lines.index("| Quest | 12.5 % | 0.25 (90 %) | 0.25 (90 %) |") < lines.index(
        "| H2O | 12.5 % | 0.5 (90 %) | 0.5 (90 %) |"
    )


def test_drift_compares_the_ends_of_long_texts(docs):
    """Ends of 128 steps: KL 0.1 and 0.4 at the ends of 512 steps and 0.2 between, so the halves' means are 0.15 and 0.3."""
    folder = docs / "records" / "fidelity" / distance.LONG["qwen-fidelity-1024"]
    by_step = {"kl": [*[0.1] * 128, *[0.2] * 256, *[0.4] * 128], "agrees": [*[1.0] * 384, *[0.5] * 128]}
    rows = [
        {"method": method, "stream": stream, "length": 4096, "value": kl, "agreement": 87.5, "bytes_read_per_step": 1.0,
         "full_bytes_read_per_step": 8.0, "by_step": by_step}
        for method, kl in (("full", 0.0), ("h2o", 0.9), ("quest", 0.225))
        for stream in ("prose", "code")
    ]  # fmt: skip
    settings = {"model": "smollm2", "dtype": "bfloat16", "samples": 4, "tokens": 512}
    folder.mkdir(parents=True)
    record = {"experiment": "fidelity", "settings": settings, "device": {"kind": "H100"}, "metrics": rows}
    (folder / "metrics.json").write_text(json.dumps(record))
    text = distance.parts(docs)["qwen-fidelity-1024"]()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2:4] == [
        "| Quest | 12.5 % | 0.23 (88 %) | 0.1 (100 %) | 0.4 (50 %) | 4.0 | 2.0 |",
        "| H2O | 12.5 % | 0.9 (88 %) | 0.1 (100 %) | 0.4 (50 %) | 4.0 | 2.0 |",
    ]
    assert "Along prose at 4K tokens" in text and "Along files of Python's library at 4K tokens" in text
    assert "| Full" not in text and "up to 512 steps" in text


def test_unmarked_text_stays():
    text = "before\n<!-- a: generated -->\nold\n<!-- end of a -->\nafter\n"
    made = marks.with_parts(text, {"a": lambda: "new"})
    assert made == text.replace("old", "new") and marks.with_parts(made, {"a": lambda: "new"}) == made
    assert marks.names_of(text) == ["a"]


# ---- order ------------------------------------------------------------------------------------------------------------


def test_kendall_tau_counts_pairs():
    rng = np.random.default_rng(0)
    for size in (2, 5, 11):
        a, b = rng.permutation(size), rng.permutation(size)
        pairs = [np.sign((a[i] - a[j]) * (b[i] - b[j])) for i, j in itertools.combinations(range(size), 2)]
        assert kendall_tau(a, b) == pytest.approx(np.mean(pairs))
        assert kendall_tau(a, a) == pytest.approx(1) and kendall_tau(a, -a) == pytest.approx(-1)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / np.sqrt(2 * 3))  # a tie in one list, by hand
    assert np.isnan(kendall_tau([1, 1], [1, 2]))
    with pytest.raises(ValueError, match="got 1 and 2"):
        kendall_tau([1], [1, 2])


def entry(method, scores, task="a"):
    keys = [str(i) for i in range(len(scores))]
    made = row(method, task, 512, "prefill", scores, {}, 1)
    return Entry(pathlib.Path(), made, dict(zip(keys, scores)), {}, dict.fromkeys(keys, ""))


def test_a_change_within_noise_is_not_beyond_noise():
    """Two methods that change places by one example of twenty, and two that change places by most of them."""
    first = [entry("full", right(20)), entry("x", right(11)), entry("y", right(10)), entry("z", right(0))]
    second = [entry("full", right(20)), entry("x", right(10)), entry("y", right(11)), entry("z", right(20))]
    cells = solved(first)
    assert cells == [first[0].cell] and solved(first, 100.1) == []
    assert mean_scores(first, cells) == {"full": 100.0, "x": pytest.approx(55), "y": 50.0, "z": 0.0}
    found = {(change.better, change.worse): change for change in changes(first, second, cells)}
    assert found.keys() == {("x", "y"), ("x", "z"), ("y", "z")}
    assert not found["x", "y"].beyond_noise and found["x", "z"].beyond_noise
    assert found["x", "z"].first.mean == pytest.approx(55) and found["x", "z"].second.mean == pytest.approx(-50)


def test_models_are_compared_on_the_tasks_that_both_solve():
    """At lengths of their own, over tasks that Full solves under both; rows with knobs and unknown names do not count."""
    first = [entry(x, right(n), task) for task in "ab" for x, n in (("full", 20), ("snapkv", 18), ("quest", 4), ("h2o", 2))]
    second = [entry(x, right(n), "a") for x, n in (("full", 18), ("snapkv", 2), ("quest", 17), ("h2o", 1), ("x", 20))]
    second += [entry("full", right(5), "b"), entry("quest(budget=8)", right(20), "a")]
    found = agreement_of_models.agreement(first, second)
    assert (found.tasks, found.methods) == (("a",), ("snapkv", "quest", "h2o"))
    assert found.tau == pytest.approx(1 / 3) and [(x.better, x.worse) for x in found.changes] == [("snapkv", "quest")]
    with pytest.raises(ValueError, match="a score of Full of at least 95 under both models, got none"):
        agreement_of_models.agreement(first, second, 95)


def test_chance_is_the_best_constant_answer():
    asked = [
        Example("vt", "", "", "", answers, 8, scorer="vt", chat=False) for answers in (("A",), ("A", "B"), ("C", "D"))
    ]
    found = chance.chance(asked)
    assert (found.empty, found.answer) == (0.0, "A, B") and found.constant == pytest.approx(200 / 3)


@pytest.mark.parametrize(("there", "lengths"), [(("chess", "quest"), [16384]), (("chess", "pariskv"), [16384, 32768])])
def test_a_length_is_shown_if_most_of_the_papers_methods_have_it(docs, there, lengths):
    asked = {name: ((20, 11, 16, 14), {}, 0.1) for name in ("full", "chess", "pariskv", "mosaickv", "quest")}
    write_folder(docs, "qwen-16k", qwen_cells("prefill", 16384, asked), "qwen2.5-coder-1.5b")
    longer = {name: asked[name] for name in ("full", *there)}
    write_folder(docs, "qwen-32k", qwen_cells("prefill", 32768, longer), "qwen2.5-coder-1.5b")
    assert untouched.runs_of(docs).shown("prefill") == lengths
