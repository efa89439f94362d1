"""Mathematics: GSM8K (arXiv:2110.14168), MATH-500 (arXiv:2103.03874, arXiv:2305.20050) and AIME, as their files on the hub.

The suites have no prompt for chat models. The problem is followed by Qwen2.5-Math's instruction to reason step by step and to
put the answer in a box. GSM8K is scored by the last number, so an answer without a box counts, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.math_answers import last_number
from experiments.benchmarks.records import Record, read_json_list, read_jsonl

INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
GSM8K_TOKENS, MATH500_TOKENS, AIME_TOKENS = 1024, 4096, 16_384


def _records(path: Path, limit: int | None) -> list[Record]:
    return (read_json_list if path.suffix == ".json" else read_jsonl)(path, limit)


def _field(record: Record, *names: str) -> str:
    """Return the name of the first of the fields that the record has, in any case."""
    known = {str(name).lower(): str(name) for name in record.values}
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        raise record.error(f"expected a field {' or '.join(map(repr, names))}, got the fields {sorted(known)}")
    return found


def _example(task: str, problem: str, answer: str, tokens: int, scorer: str, **labels: str | int) -> Example:
    return Example(task, problem, INSTRUCTION, "", (answer,), tokens, scorer, labels=labels)


def read_gsm8k(path: Path, limit: int | None = None) -> list[Example]:
    """Read GSM8K (`test.jsonl`), whose records have `question` and `answer`, which ends in ``#### NUMBER``.

    Args:
        path: `.jsonl`, or `.json` with a list.
        limit: most records to read.

    Returns:
        An example for each record; the reference is the number.

    Raises:
        ValueError: the file does not exist, or a record lacks GSM8K's form; the message names the file and the line.
    """
    examples = []
    for record in _records(path, limit):
        solution, mark, answer = record.text("answer").rpartition("#### ")
        if not mark or not last_number(answer):
            raise record.error(f"expected '#### NUMBER' at the end of the field 'answer', got {(solution + answer)[-40:]!r}")
        examples.append(
            record.fitted(_example("gsm8k", record.text("question"), last_number(answer), GSM8K_TOKENS, "gsm8k"))
        )
    return examples


def read_math500(path: Path, limit: int | None = None) -> list[Example]:
    """Read MATH-500 (`test.jsonl`), whose records have `problem, answer, subject, level`.

    Args:
        path: `.jsonl`, or `.json` with a list.
        limit: most records to read.

    Returns:
        An example for each record, labelled with its subject and its level, 1 to 5.

    Raises:
        ValueError: the file does not exist, or a record lacks MATH-500's form; the message names the file and the line.
    """
    examples = []
    for record in _records(path, limit):
        labels = {"subject": record.text("subject"), "level": record.get("level", int, "a whole number")}
        (answer,) = record.texts("answer")[:1]
        example = _example("math500", record.text("problem"), answer, MATH500_TOKENS, "math_formula", **labels)
        examples.append(record.fitted(example))
    return examples


def read_aime(path: Path, limit: int | None = None) -> list[Example]:
    """Read a year of AIME, whose records have `problem` (or `question`) and `answer`, in any case.

    Args:
        path: `.jsonl`, or `.json` with a list.
        limit: most records to read.

    Returns:
        An example for each record; the task is named after the file.

    Raises:
        ValueError: the file does not exist, or a record lacks AIME's form; the message names the file and the line.
    """
    examples = []
    for record in _records(path, limit):
        problem, answer = _field(record, "problem", "question"), _field(record, "answer")
        made = _example(f"aime/{path.stem}", record.text(problem), record.texts(answer)[0], AIME_TOKENS, "math_formula")
        examples.append(record.fitted(made))
    return examples


MATH_READERS: dict[str, Callable[[Path, int | None], list[Example]]] = {
    "gsm8k": read_gsm8k, "math500": read_math500, "aime": read_aime,
}  # fmt: skip
