"""RULER's files: `validation.jsonl` of a task, in the old and in the new form of the suite's generator.

New files have the answer prefix in a field of its own. In older dumps the prefix ends the field `input`, often after a chat
template. Context and question are separated at the suite's fixed questions, so that a context can be compressed before its
question is known.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from experiments.benchmarks.base import Example, check_name
from experiments.benchmarks.records import Record, read_examples


@dataclasses.dataclass(frozen=True)
class Family:
    """The form of the files of a kind of task.

    Attributes:
        opening: pattern of the beginning of a prompt without a chat template.
        question: pattern of the question's beginning; the last occurrence counts, because some tasks repeat the question or
            have an example.
        prefix: pattern of the answer prefix at the end of an old dump.
        max_new_tokens: the suite's generation length.
        scorer: the suite's scorer.
    """

    opening: str
    question: str
    prefix: str
    max_new_tokens: int
    scorer: str = "ruler_all"


# Chat templates of the suite begin with these tokens. Tokenizers add them too, and a doubled token would be another prompt.
BEGINNINGS = ("<|begin_of_text|>", "<|startoftext|>", "<BOS_TOKEN>")
# Old copies of the suite write "assgined" in the prefix of vt, so nothing here depends on that word.
FAMILIES: dict[str, Family] = {
    "niah": Family(
        "(?:A|Some) special magic ",
        "What (?:is|are all) the special magic ",
        r"The special magic [^\n]* mentioned in the provided text (?:is|are)",
        128,
    ),
    "vt": Family(
        "Memorize and track the chain",
        "Question: Find all variables that are assigned the value ",
        r"Answer: According to the chain\(s\) of variable assignment in the text above, [^\n]* they are:",
        30,
    ),
    "cwe": Family(
        "Below is a numbered list of words",
        r"Question: What are the \d+ most common words in the above list\?",
        r"Answer: The top \d+ words that appear most often in the list are:",
        120,
    ),
    "fwe": Family(
        "Read the following coded text",
        "Question: Do not provide any explanation",
        "Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa": Family(
        "Answer the question based on the given documents",
        "Answer the question based on the given documents",
        "Answer:",
        32,
        "ruler_part",
    ),
}
TASKS = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)


def task_of(path: Path) -> str:
    """Return the task that a file or its folder is named after.

    Raises:
        ValueError: neither name is a task of the suite.
    """
    name = path.stem if path.stem in TASKS else path.parent.name
    with Record(str(path), {}).named():
        check_name("RULER task", name, TASKS)
    return name


def _split(record: Record, family: Family) -> tuple[str, str, str]:
    """Split a prompt into context, question and answer prefix; joined they are the prompt without begin-of-text token."""
    text = record.text("input")
    for beginning in BEGINNINGS:
        text = text.removeprefix(beginning)
    prefix = record.text("answer_prefix") if record.has("answer_prefix") else ""
    if prefix:
        text = text.removesuffix(prefix)
    elif match := re.search(rf" ?{family.prefix}\s*\Z", text):
        text, prefix = text[: match.start()], match.group()
    elif "answer_prefix" not in record.values:
        raise record.error(
            "expected the suite's answer prefix in a field 'answer_prefix' or at the end of 'input', "
            f"got neither; 'input' ends in {text[-80:]!r}"
        )
    starts = [match.start() for match in re.finditer(rf"\n*{family.question}", text)]
    if not starts or not text[: starts[-1]].strip():
        raise record.error(
            f"expected a context and then the question {family.question!r} in 'input', got {text[-80:]!r} at its end"
        )
    return text[: starts[-1]], text[starts[-1] :], prefix


def read_ruler(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of RULER.

    If the file's prompts are already wrapped in a chat template, its examples have `chat=False`. The file's template stays,
    without the begin-of-text token, because tokenizers add this token.

    Args:
        path: the file; the file or its folder is named after a task. If one of the three folders around it is named by a
            number, as in `4096/niah_single_1/validation.jsonl`, the number becomes the label "length".

    Raises:
        ValueError: the file or the task does not exist, or a line lacks RULER's form; the message names the file, the line,
            what was found and what was expected.
    """
    task = task_of(path)
    family = FAMILIES[task.split("_")[0]]
    # The suite writes 4096/data/niah_single_1/validation.jsonl; other tools leave out "data".
    lengths = [int(folder.name) for folder in path.parents[:3] if folder.name.isdecimal()][:1]

    def example(record: Record) -> Example:
        context, question, prefix = _split(record, family)
        return Example(
            task=task,
            context=context,
            question=question,
            answer_prefix=prefix,
            answers=record.texts("outputs"),
            max_new_tokens=family.max_new_tokens,
            scorer=family.scorer,
            labels={"length": lengths[0]} if lengths else {},
            chat=re.match(rf"\s*{family.opening}", context) is not None,
        )

    return read_examples(path, limit, example)
