"""IFEval (Zhou et al. 2023, arXiv:2311.07911): prompts with instructions that a program can check, as jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.instruction_checks import CHECKS, follows
from experiments.benchmarks.records import Record, read_jsonl, shown

MAX_NEW_TOKENS = 1280  # as in lm-evaluation-harness
_RESPONSE = "One. Two [a] *b*\n\n* c\n\nP.S. d"  # is checked once on reading, so that wrong arguments are found then


def _instructions(record: Record) -> tuple[str, ...]:
    """Return the instructions of a prompt, each as a JSON object with "id" and "kwargs"."""
    names = record.get("instruction_id_list", list, "a list of instructions")
    given = record.get("kwargs", list, "a list of arguments")
    if not names or len(names) != len(given):
        raise record.error(f"expected arguments for each of the instructions, got {len(names)} and {len(given)}")
    made = []
    for name, values in zip(names, given, strict=True):
        if not isinstance(name, str) or name not in CHECKS:
            raise record.error(f"expected an instruction of IFEval, one of {', '.join(CHECKS)}, got {name!r}")
        if not isinstance(values, dict | None):
            raise record.error(f"expected an object with the arguments of {name}, got {shown(values)}")
        known = {key: value for key, value in (values or {}).items() if value is not None}
        if missing := [key for key in CHECKS[name][1] if key not in known]:
            raise record.error(f"expected the arguments {missing} of {name}, got {sorted(known)}")
        made.append(json.dumps({"id": name, "kwargs": known}, sort_keys=True))
        try:
            follows(_RESPONSE, made[-1])
        except Exception as error:  # of any kind: checks take arguments as they are, and no run may end after its answers
            raise record.error(f"expected arguments that {name} can check, got {shown(known)} ({error})") from error
    return tuple(made)


def read_ifeval(path: Path, limit: int | None = None) -> list[Example]:
    """Read IFEval (`input_data.jsonl`).

    Args:
        path: the file. Records have `key, prompt, instruction_id_list, kwargs`.
        limit: most lines to read.

    Returns:
        An example for each line, whose references are its instructions, labelled with their number.

    Raises:
        ValueError: the file does not exist, or a line lacks IFEval's form; the message names the file, the line, what was
            found and what was expected.
    """
    examples = []
    for record in read_jsonl(path, limit):
        answers = _instructions(record)
        labels = {"instructions": len(answers)}
        example = Example("ifeval", "", record.text("prompt"), "", answers, MAX_NEW_TOKENS, "ifeval", labels=labels)
        examples.append(record.fitted(example))
    return examples
