"""LongProc (Ye et al. 2025, arXiv:2501.05414): a JSON file for each task and size, beside the prompts' texts.

Read are `html_to_tsv`, `path_traversal`, `tom_tracking` and `countdown`. `pseudo_to_code` compiles and runs C++ programs, and
`travel_planning` computes its references; both are refused. The suite's `prompts.yaml` must stand in the file's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from experiments.benchmarks.base import Example
from experiments.benchmarks.countdown import DEMONSTRATED, demonstration
from experiments.benchmarks.records import Record, check_file, read_json_list, shown
from experiments.tasks import read_text

# Generation lengths of HELMET's add-on, by the size in the file's name.
TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 10_240}
_FIELDS = ("task_topic", "task_description", "tsv_header", "filtering_instruction")


def _html(record: Record, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a page; its path is below the suite's folder, which may be any folder above the file."""
    given = Path(record.text("html_path"))
    tried = [folder / name for folder in path.parents for name in (given, Path(*given.parts[1:]))]
    page = next((file for file in tried if file.is_file()), None)
    if page is None:
        raise record.error(f"expected the page {given} in a folder above {path}, got no such file")
    return {"html_str": read_text(page), **{name: record.text(name) for name in _FIELDS}}, (record.text("gt"),)


def _route(record: Record, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    cities = record.get("question_repr", list, "a list of two cities")
    if len(cities) != 2:
        raise record.error(f"expected a list of two cities in the field 'question_repr', got {shown(cities)}")
    fields = {"city_context": record.text("context_nl"), "src_city": cities[0], "dst_city": cities[1]}
    return fields, (record.text("answer_nl"),)


def _belief(record: Record, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    return {"story": record.text("story"), "question": record.text("question")}, (record.text("solution"),)


def _countdown(record: Record, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    told = {"nums": record.get("nums", list, "a list of four numbers"), "target": record.get("target", int, "a number")}
    if len(told["nums"]) != 4 or any(type(number) is not int or not 0 <= number < 10**6 for number in told["nums"]):
        raise record.error(f"expected a list of four whole numbers in the field 'nums', got {shown(told['nums'])}")
    examples = (
        f"# Example\nNumbers: {list(nums)}\nTarget: {target}\n\n{demonstration(nums, target)}"
        for nums, target in DEMONSTRATED
    )
    try:
        right = demonstration(told["nums"], told["target"])
    except ValueError as error:
        raise record.error(str(error)) from error
    return {**told, "demonstration": "\n\n".join(examples)}, (right, json.dumps(told))


_READ: dict[str, Callable[[Record, Path], tuple[dict[str, Any], tuple[str, ...]]]] = {
    "html_to_tsv": _html, "path_traversal": _route, "tom_tracking": _belief, "countdown": _countdown,
}  # fmt: skip


def read_longproc(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of LongProc, such as `path_traversal/path_traversal_2k.json`.

    The last paragraph of the prompt is the question.

    Args:
        path: the file, in a folder with `prompts.yaml`.
        limit: most records to read.

    Returns:
        An example for each record.

    Raises:
        ValueError: the file or the prompts do not exist, the task is none that is read, or a record lacks LongProc's form;
            the message names the file, the entry, what was found and what was expected.
    """
    name, _, size = path.stem.rpartition("_")
    if name not in _READ or size not in TOKENS:
        raise ValueError(
            f"{path}: expected a file named TASK_SIZE.json with a task of {', '.join(_READ)} and a size of "
            f"{', '.join(TOKENS)}, got {path.name!r}"
        )
    prompts = path.parent / "prompts.yaml"
    check_file(prompts)
    try:
        read = yaml.safe_load(read_text(prompts))
    except yaml.YAMLError as error:
        raise ValueError(f"{prompts}: expected YAML with the text USER_PROMPT, got a damaged file ({error})") from error
    template = read.get("USER_PROMPT") if isinstance(read, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"{prompts}: expected the text USER_PROMPT, got none")
    examples = []
    for record in read_json_list(path, limit):
        fields, answers = _READ[name](record, path)
        try:
            head, gap, last = template.format(**fields).rpartition("\n\n")
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{prompts}: expected the fields {sorted(fields)}, got {error}") from error
        scorer = f"longproc_{name}"
        examples.append(record.fitted(Example(path.stem, head, gap + last, "", answers, TOKENS[size], scorer)))
    return examples
