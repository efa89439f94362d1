"""Readers of the suites' files; suites.json has their prompts, generation lengths and scorers.

* RULER: `validation.jsonl` of a task, in the old and in the new form of the suite's generator. New files have the answer
  prefix in a field of its own. In older dumps the prefix ends the field `input`, often after a chat template. Context and
  question are separated at the suite's fixed questions, so that a context can be compressed before its question is known.
* LongBench v1 and LongBench-E (Bai et al. 2023, arXiv:2308.14508): a jsonl file for each dataset. Few-shot prompts and code
  get no chat template, as in its predictor. The whole template belongs to the user's turn, so the answer prefix is empty.
* LongBench v2 (Bai et al. 2024, arXiv:2412.15204): 503 four-way questions in `data.json` or as jsonl.
* InfiniteBench (Zhang et al. 2024, arXiv:2402.13718): a jsonl file for each task. Templates are the suite's
  `yarn_mistral_templates` for base models, which other projects use too. The cue at the end of each template is the answer
  prefix, so that it follows the assistant tag of a chat template.
* SCBench (Li et al. 2024, arXiv:2412.10319): a jsonl file for each task, with several questions about each context. Every
  question has its first-turn form, so that a context is prefilled once and each question can be asked of a copy of the
  cache.
"""

import collections
import dataclasses
import importlib.resources
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.records import Record, named_after, object_of, read_records
from experiments.benchmarks.scorers import fitted
from experiments.tasks import GROUPS, Example, check_name

_SUITES = json.loads((importlib.resources.files("experiments.benchmarks") / "suites.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Form:
    """A task's template in three parts, its generation length, its scorer, and whether a chat template wraps it."""

    max_new_tokens: int
    scorer: str
    context: str = "{context}"
    question: str = "\n\n{input}"
    answer_prefix: str = ""
    chat: bool = True
    stop: tuple[str, ...] = ()

    def example(self, task: str, values: dict[str, Any], answers: tuple[str, ...], **more: Any) -> Example:
        """Fill the template."""
        texts = (text.format(**values) for text in (self.context, self.question, self.answer_prefix))
        return Example(task, *texts, answers, self.max_new_tokens, self.scorer, chat=self.chat, stop=self.stop, **more)


FORMS: dict[str, dict[str, Form]] = {
    suite: {task: Form(**form | {"stop": tuple(form.get("stop", ()))}) for task, form in said["tasks"].items()}
    for suite, said in _SUITES.items()
    if "tasks" in said
}


def _examples(path: Path, limit: int | None, make: Callable[[Record], Example]) -> list[Example]:
    """Make an example of each line of a file, with references as its scorer expects them."""
    return [fitted(record, make(record)) for record in read_records(path, limit)]


# RULER

FAMILIES: dict[str, dict[str, Any]] = _SUITES["ruler"]["families"]
# Chat templates of the suite begin with these tokens. Tokenizers add them too, and a doubled token would be another prompt.
_BEGINNINGS = ("<|begin_of_text|>", "<|startoftext|>", "<BOS_TOKEN>")


def _split(record: Record, family: dict[str, Any]) -> tuple[str, str, str]:
    """Split a prompt into context, question and answer prefix; joined they are the prompt without begin-of-text token."""
    text = record.text("input")
    for beginning in _BEGINNINGS:
        text = text.removeprefix(beginning)
    prefix = record.text("answer_prefix") if record.has("answer_prefix") else ""
    if prefix:
        text = text.removesuffix(prefix)
    elif match := re.search(rf" ?{family['prefix']}\s*\Z", text):
        text, prefix = text[: match.start()], match.group()
    elif "answer_prefix" not in record.values:
        raise record.error(
            "expected the suite's answer prefix in a field 'answer_prefix' or at the end of 'input', "
            f"got neither; 'input' ends in {text[-80:]!r}"
        )
    # The last occurrence counts, because some tasks repeat the question or have an example.
    starts = [match.start() for match in re.finditer(rf"\n*{family['question']}", text)]
    if not starts or not text[: starts[-1]].strip():
        raise record.error(
            f"expected a context and then the question {family['question']!r} in 'input', got {text[-80:]!r} at its end"
        )
    return text[: starts[-1]], text[starts[-1] :], prefix


def read_ruler(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of RULER.

    If the file's prompts are already wrapped in a chat template, its examples have `chat=False`. The file's template stays,
    without the begin-of-text token, because tokenizers add this token.

    Args:
        path: the file; the file or its folder is named after a task. If one of the three folders around it is named by a
            number, as in `4096/niah_single_1/validation.jsonl`, the number becomes the label "length".
        limit: most lines to read.
    """
    tasks = GROUPS["ruler"]
    task = named_after(path, "RULER", tasks, path.stem if path.stem in tasks else path.parent.name)
    family = FAMILIES[task.split("_")[0]]
    # The suite writes 4096/data/niah_single_1/validation.jsonl; other tools leave out "data".
    lengths = [int(folder.name) for folder in path.parents[:3] if folder.name.isdecimal()][:1]

    def example(record: Record) -> Example:
        parts = _split(record, family)
        chat = re.match(rf"\s*{family['opening']}", parts[0]) is not None
        labels = {"length": lengths[0]} if lengths else {}
        answers, tokens, scorer = record.texts("outputs"), family["max_new_tokens"], family["scorer"]
        return Example(task, *parts, answers, tokens, scorer, labels=labels, chat=chat)

    return _examples(path, limit, example)


# LongBench


def length_bucket(length: float) -> str:
    """Return LongBench-E's bucket of a record's `length` (in words, or in characters of Chinese)."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def read_longbench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of LongBench or LongBench-E; the names of LongBench-E's files and tasks end in `_e`.

    Args:
        path: the file. Records have `input, context, answers, length, dataset, all_classes`; without
            `dataset` the file's name is the dataset.
        limit: most lines to read.
    """

    def example(record: Record) -> Example:
        dataset = (record.text("dataset") if record.has("dataset") else path.stem).removesuffix("_e")
        with record.named():
            check_name("LongBench dataset", dataset, FORMS["longbench"])
        return FORMS["longbench"][dataset].example(
            dataset + "_e" * path.stem.endswith("_e"),
            {name: record.text(name) for name in ("context", "input")},
            record.texts("answers"),
            labels={"length": length_bucket(record.get("length", (int, float), "a number"))},
            classes=record.texts("all_classes") if dataset in ("trec", "lsht") else (),
        )

    return _examples(path, limit, example)


def read_longbench2(path: Path, limit: int | None = None) -> list[Example]:
    """Read LongBench v2.

    Args:
        path: `.json` (a list) or `.jsonl`. Records have `question, choice_A ... choice_D, answer, context,
            difficulty, length, domain`.
        limit: most records to read.
    """

    def example(record: Record) -> Example:
        answer = record.text("answer")
        if answer not in ("A", "B", "C", "D"):
            raise record.error(f"expected A, B, C or D in the field 'answer', got {answer!r}")
        fields = {"context": "context", "question": "question"} | {letter: f"choice_{letter}" for letter in "ABCD"}
        values = {place: record.text(field).strip() for place, field in fields.items()}
        labels = {name: record.text(name) for name in ("difficulty", "length", "domain")}
        return FORMS["longbench2"]["longbench2"].example("longbench2", values, (answer,), labels=labels)

    return [fitted(record, example(record)) for record in read_records(path, limit, (".json", ".jsonl"))]


# InfiniteBench

_CHOICES = ("longbook_choice_eng", "code_debug", "scbench_choice_eng")
_KV_CUE = "\nThe value associated with the specified key is: "  # the field `input` of kv_retrieval ends with it


def _options(record: Record) -> dict[str, str]:
    """Return the four options under their names in the templates; ValueError if there are not four options."""
    options = record.texts("options")
    if len(options) != 4:
        raise record.error(f"expected 4 texts in the field 'options', got {len(options)}")
    return {f"OPTION_{letter}": text for letter, text in zip("ABCD", options, strict=True)}


def _answers(task: str, record: Record, decimals: bool) -> tuple[str, ...]:
    """Return the references; of a choice the right option's text and its letter."""
    if task == "math_calc":  # the file nests the list of values in a list
        nested = record.get("answer", list, "a list")
        inner = nested[0] if nested and isinstance(nested[0], list) else nested
        return Record(record.where, {"answer": inner}).texts("answer")
    answers = record.texts("answer", decimals=decimals)  # 7 accepts 7.5, 7.0 does not
    if task not in _CHOICES or (len(answers) == 2 and answers[1] in ("A", "B", "C", "D")):
        return answers
    options = record.texts("options")
    if len(answers) != 1 or answers[0] not in options:
        raise record.error(f"expected one of the options {options} in the field 'answer', got {answers}")
    return answers[0], "ABCD"[options.index(answers[0])]


def _phrase(record: Record, pattern: str, what: str) -> str:
    match = re.search(pattern, record.text("input"))
    if match is None:
        raise record.error(f"expected {what} in the field 'input', got {record.text('input')[:80]!r}")
    return match.group()


def read_infinitebench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of InfiniteBench.

    Args:
        path: the file, named after its task (`passkey.jsonl`). Records are `id, context, input, answer, options`.
        limit: most lines to read.
    """
    task = named_after(path, "InfiniteBench", FORMS["infinitebench"])
    form = FORMS["infinitebench"][task]

    def example(record: Record) -> Example:
        values = {"context": record.text("context"), "input": record.text("input")}
        if task in _CHOICES:
            values |= _options(record)
        elif task == "code_run":
            call = _phrase(record, r"func_[0-9]+\(-?[0-9]+\)", "a call like func_1(2)")
            values |= {"func": call.split("(")[0], "func_call": call}
        elif task == "math_find":
            wanted = _phrase(record, r"The .+ of", "'The ... of'").lower().removesuffix(" of")
            values["prefix"] = f"What is {wanted} in the following list?"
        made = form.example(task, values, _answers(task, record, task == "math_find"))
        if task == "kv_retrieval" and made.question.endswith(_KV_CUE):
            made = dataclasses.replace(made, question=made.question.removesuffix(_KV_CUE), answer_prefix=_KV_CUE)
        return made

    return _examples(path, limit, example)


# SCBench

# In these files a turn's field `task` names the turn's task. The generation lengths differ from the lengths in other files.
MIXED: dict[str, dict[str, int]] = {
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}


def _turns(record: Record) -> list[Record]:
    """Return the questions of a line; each question has its own position for messages."""
    turns = record.get("multi_turns", list, "a list of questions")
    if not turns:
        raise record.error("expected at least one question in 'multi_turns', got none")
    return [object_of(f"{record.where}, turn {number}", turn) for number, turn in enumerate(turns, 1)]


def _prompts(file_task: str, turns: Sequence[Record], context: str) -> tuple[str, list[str]]:
    """Format the context that all questions share, and the questions."""
    form = FORMS["scbench"].get(file_task, Form(0, ""))  # mixed files have only the input
    context = form.context.format(context=context)
    more = [_options(turn) if file_task in _CHOICES else {} for turn in turns]
    questions = [form.question.format(input=turn.text("input"), **texts) for turn, texts in zip(turns, more, strict=True)]
    if file_task == "scbench_mf":  # the number is named before the context and before every later question
        wanted = [_phrase(turn, r"The .+ is", "'The ... is'").lower().removesuffix(" is") for turn in turns]
        context = f"What is {wanted[0]}?\n\n{context}"
        later = zip(wanted[1:], questions[1:], strict=True)
        questions = [questions[0], *(f"\n\nWhat is {number}?{text}" for number, text in later)]
    return context, questions


def _task_of_turn(file_task: str, turn: Record) -> tuple[str, Form]:
    """Return the name in tables and the form of a question."""
    if file_task not in MIXED:
        return file_task, FORMS["scbench"][file_task]
    task, lengths = turn.text("task"), MIXED[file_task]
    if task not in lengths:
        raise turn.error(f"expected one of {tuple(lengths)} in the field 'task', got {task!r}")
    return f"{file_task}.{task}", dataclasses.replace(FORMS["scbench"][task], max_new_tokens=lengths[task])


def read_scbench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of SCBench.

    Args:
        path: the file, named after its task (`scbench_kv.jsonl`). Records have `id, context, multi_turns`; repoqa's records
            also have `repo`. Turns have `input, answer`, and also `options` (choice) or `task` (mixed files).
        limit: most lines to read; each line is a context with its questions.
    """
    file_task = named_after(path, "SCBench", (*FORMS["scbench"], *MIXED))
    functions: dict[str, dict[str, None]] = collections.defaultdict(dict)  # repository -> functions in the whole file
    asked: list[tuple[Record, Example, str]] = []
    times: collections.Counter[str] = collections.Counter()
    for record in read_records(path, limit):
        turns = _turns(record)
        context, questions = _prompts(file_task, turns, record.text("context"))
        name = f"{file_task}/{record.texts('id')[0]}"
        times[name] += 1
        # Two lines of one id are two contexts: in one group, the second line's questions would be asked about the first.
        group = name if times[name] == 1 else f"{name}#{times[name]}"
        for number, (turn, question) in enumerate(zip(turns, questions, strict=True)):
            task, form = _task_of_turn(file_task, turn)
            answers = _answers(file_task, turn, form.scorer == "infinitebench_math_find")
            about = {"group": group, "labels": {"turn": number}}
            example = Example(task, context, question, "", answers, form.max_new_tokens, form.scorer, **about)
            repository = record.text("repo") if form.scorer == "scbench_repoqa" else ""
            if repository:
                functions[repository][example.answers[0]] = None
            asked.append((turn, example, repository))
    return [
        fitted(turn, dataclasses.replace(example, classes=tuple(functions[repository])) if repository else example)
        for turn, example, repository in asked
    ]
