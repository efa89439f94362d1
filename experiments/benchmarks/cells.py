"""Cells of a table, and their examples as token ids. No JAX is imported, so that worker processes start fast."""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from tokenizers import Tokenizer

from experiments.benchmarks.workers import end_with_parent, held_interrupts
from experiments.tasks import Example, encode_prompt, get_task, length_within, make_documents, opening_ids

TRUNCATIONS = ("middle", "head", "tail", "error")  # see `truncate`


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table: the examples of a task at a length.

    Attributes:
        task: task name.
        length: tokens of prompt and answer together; None for a file's examples, which have lengths of their own.
        samples: number of contexts; most contexts of a file.
        seed: seed of generated examples.
        haystack: kind of haystack, or None for the task's own.
        depth: where the needle goes, 0 (start) to 1 (end); None draws the depth.
        questions: number of questions about each context.
        source: FORMAT:PATH of a file's examples, "" for generated examples.
        given: the file's examples.
    """

    task: str
    length: int | None
    samples: int
    seed: int = 0
    haystack: str | None = None
    depth: float | None = None
    questions: int = 1
    source: str = ""
    given: tuple[Example, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def identity(self) -> dict[str, str | int | float | None]:
        """The fields that tell the cell from other cells, whatever their samples; JSON values."""
        names = ("task", "length", "seed", "haystack", "depth", "questions", "source")
        return {name: vars(self)[name] for name in names}

    @property
    def title(self) -> str:
        """A short text for people."""
        file = f"({pathlib.PurePath(self.source).name})" if self.source else ""
        depth = "" if self.depth is None else f"depth {self.depth:.0%}"
        return " ".join(filter(None, [self.task, "" if self.length is None else str(self.length), file, depth]))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How text becomes tokens.

    Attributes:
        tokenizer_file: tokenizer.json of the model.
        around: text before and after a user's content in the chat template; None without a template.
        limit: most tokens of prompt and answer that a model takes; None if there is no limit.
        truncation: how longer contexts are cut, see `truncate`; the question is never cut.
        new_tokens: most tokens of an answer; None takes each example's own `max_new_tokens`.
        around_system: text before and after the system text, up to the user's content, for examples that bring a system text;
            None without a template, or where the template has no system turn.
        again: text between an answer and the next question of a conversation; "" if no conversation is led.
    """

    tokenizer_file: pathlib.Path
    around: tuple[str, str] | None = None
    limit: int | None = None
    truncation: str = "middle"
    new_tokens: int | None = None
    around_system: tuple[str, str] | None = None
    again: str = ""

    def parts(self, example: Example, follows: bool) -> tuple[str, str, int]:
        """Put the chat template around an example.

        Args:
            follows: whether the example follows another question about its context.
        """
        before, after = self.around if self.around and example.chat else ("", "")
        context, question = example.context, example.question
        if example.system and before and self.around_system:
            before = example.system.join(self.around_system)
        else:
            context = example.opening
        if follows and before and self.again:
            question = self.again + question.lstrip("\n")
        return before + context, question + after + example.answer_prefix, len(before)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A cell's examples as token ids; an index means the same example in all tuples.

    Attributes:
        cell: the cell.
        examples: the examples as text.
        heads: token ids before the question: template and context, truncated.
        tails: token ids of the question, the template's end and the answer's opening.
        wholes: token ids of head and tail, encoded as a single text.
        cut: number of tokens that were cut out of each context.
        keys: for each example a text that holds all that decides its score: two digests of 16 hexadecimal digits,
            ``PROMPT-REST``. All differ: the second example with the same digests gets ``#2``.
    """

    cell: Cell
    examples: tuple[Example, ...]
    heads: tuple[tuple[int, ...], ...]
    tails: tuple[tuple[int, ...], ...]
    wholes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    keys: tuple[str, ...]

    def after(self, count: int) -> Self:
        """Leave the first ``count`` examples out."""
        parts = (self.examples, self.heads, self.tails, self.wholes, self.cut, self.keys)
        return type(self)(self.cell, *(part[count:] for part in parts)) if count else self


def examples(name: str, *, depth: float | None = None, questions: int = 1, **options: Any) -> list[Example]:
    """Generate held-out contexts of a task with their questions.

    Context i depends only on the task's name, the length, the seed, i and the depth.

    Args:
        name: the task.
        depth: where the first needle goes, 0 (start) to 1 (end); None draws the depth.
        questions: number of questions about each context.
        options: see `experiments.tasks.make_documents`.

    Returns:
        The examples. Several questions about a context follow each other and share a group.
    """
    every, about = [], {} if depth is None else {"depth": depth}
    for index, document in enumerate(make_documents(name, depth=depth, num_questions=questions, **options)):
        for turn, sample in enumerate(samples := document.samples()[:questions]):
            more = {"turn": turn} if len(samples) > 1 else {}
            group = f"{name}/{index}" if more else ""
            every.append(dataclasses.replace(sample, chat=get_task(name).chat, group=group, labels=about | more))
    return every


def placeholder(cell: Cell) -> Encoded:
    """Stand in for a generated cell while its prompts are made: one example, without a token."""
    example = Example(cell.task, "", "", "", (), 0, "")
    return Encoded(cell, (example,), ((),), ((),), ((),), (0,), ("",))


def encode_cell(reading: Reading, cell: Cell) -> Encoded:
    """Encode the examples of a cell; generate them first if they are not given."""
    file = reading.tokenizer_file
    tokenizer = _tokenizer(file, file.stat().st_mtime_ns)
    every = cell.given or _generated(reading, cell, tokenizer)
    encoded: list[tuple[Any, ...]] = []
    last_of: dict[str, str] = {}  # by group, the key of its last example: a conversation's answers depend on it
    for example, previous in zip(every, ["", *(x.group for x in every)], strict=False):
        head, tail, before = reading.parts(example, bool(previous) and example.group == previous)
        ids, cut = _ids(reading, cell, tokenizer, example, head, tail, before)
        rest = {
            "ids": ids,
            **{name: vars(example)[name] for name in ("answers", "scorer", "classes", "stop")},
            "new_tokens": reading.new_tokens or example.max_new_tokens,
            "labels": dict(example.labels),
            "before": last_of.get(example.group) if example.group else None,
        }
        prompt = _digest(f"{example.task}\0{head}\0{tail}")  # before truncation
        last_of[example.group] = f"{prompt}-{_digest(json.dumps(rest, sort_keys=True))}"
        encoded.append((*map(tuple, ids), cut, last_of[example.group]))
    *parts, keys = zip(*encoded, strict=True) if encoded else [()] * 5
    return Encoded(cell, every, *parts, tuple(numbered(keys)))


def _generated(reading: Reading, cell: Cell, tokenizer: Tokenizer) -> tuple[Example, ...]:
    """Generate the examples of a cell, whose length includes the chat template, as the suites' lengths do."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    options = {name: vars(cell)[name] for name in ("seed", "haystack", "depth", "questions")}
    with length_within(cell.length, count("".join(reading.around or ()))) as length:
        return tuple(examples(cell.task, length=length, count=cell.samples, count_tokens=count, **options))


def _ids(
    reading: Reading, cell: Cell, tokenizer: Tokenizer, example: Example, head: str, tail: str, before: int
) -> tuple[list[list[int]], int]:
    """Encode head, tail, and both as a single text; cut the context to the limit, and say how many tokens were cut out."""

    def ids(text: str) -> list[int]:  # a template brings its own special tokens
        return tokenizer.encode(text, add_special_tokens=False).ids if before else encode_prompt(tokenizer, text)

    first, whole = ids(head), ids(head + tail)
    last = tokenizer.encode(tail, add_special_tokens=False).ids
    if reading.limit is None:
        return [first, last, whole], 0
    # Tokens may merge where head and tail meet. The prompt is encoded whole or in two parts: the longer form counts.
    size = max(len(whole), len(first) + len(last))
    excess = size + (reading.new_tokens or example.max_new_tokens) - reading.limit
    if excess <= 0:
        return [first, last, whole], 0
    opening = _opening(tokenizer, head, first, before)
    kept = len(first) - opening - excess
    if kept < 1:
        raise ValueError(
            f"{cell.title}: question and answer must fit {reading.limit} tokens, got {reading.limit - kept} without the "
            f"context, {opening} of them for what precedes it: begin-of-text, template, system message"
        )
    first = first[:opening] + truncate(first[opening:], kept, reading.truncation)
    return [first, last, first + last], excess


def truncate(ids: list[int], limit: int, mode: str) -> list[int]:
    """Shorten a prompt to at most `limit` tokens.

    Args:
        ids: token ids of the prompt.
        limit: most tokens that stay, at least 1.
        mode: "middle" drops the middle and keeps the first and the last `limit // 2` tokens, as LongBench and
            InfiniteBench do (so an odd limit keeps one token less); "head" keeps the beginning, "tail" the end;
            "error" refuses.

    Returns:
        A new list, with all of `ids` if they fit.

    Raises:
        ValueError: the mode is unknown, the limit is below 1, or the prompt is too long under "error".
    """
    if mode not in TRUNCATIONS:
        raise ValueError(f"unknown truncation mode {mode!r}, expected one of {TRUNCATIONS}")
    if limit < 1:
        raise ValueError(f"the limit must be at least 1 token, got {limit}")
    if len(ids) <= limit:
        return list(ids)
    if mode == "error":
        raise ValueError(f"the prompt has {len(ids)} tokens, expected at most {limit}; other modes are {TRUNCATIONS[:-1]}")
    if mode == "middle":
        half = limit // 2
        return [*ids[:half], *ids[len(ids) - half :]]
    return list(ids[:limit] if mode == "head" else ids[-limit:])


def _digest(text: str) -> str:
    # A lone surrogate, which JSON can hold, is no text in UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def numbered(keys: Iterable[str]) -> list[str]:
    """Append ``#2`` to the second occurrence of a key, ``#3`` to the third, and so on; the first stays as it is."""
    seen: collections.Counter[str] = collections.Counter()
    texts = []
    for key in keys:
        seen[key] += 1
        texts.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    return texts


def digest(keys: Sequence[str]) -> str:
    """Compute a digest of the keys of a cell."""
    return _digest("\n".join(keys))


@functools.lru_cache(1)  # a large vocabulary takes a third of a second to read
def _tokenizer(file: pathlib.Path, changed: int) -> Tokenizer:
    return Tokenizer.from_buffer(file.read_bytes())  # its path may be no Unicode text


def _opening(tokenizer: Tokenizer, head: str, ids: list[int], before: int) -> int:
    """Count the first tokens of a prompt that no truncation cuts: begin-of-text, and what a template puts before the context.

    Args:
        tokenizer: the model's.
        head: the prompt up to the question.
        ids: token ids of ``head``.
        before: characters that a template puts before the context; 0 without a template.
    """
    if not before:
        opening = opening_ids(tokenizer)
        return len(opening) if ids[: len(opening)] == opening else 0
    offsets = tokenizer.encode(head, add_special_tokens=False).offsets
    return next((at for at, (_, end) in enumerate(offsets) if end > before), len(offsets))


class CellStore:
    """A store of encoded cells: worker processes encode cells ahead of their use, and the store keeps them.

    Args:
        reading: how text becomes tokens.
        cells: the cells in the order in which they are first used.
        workers: number of processes; 0 encodes in this process.
    """

    def __init__(self, reading: Reading, cells: Sequence[Cell], workers: int) -> None:
        self._reading, self._cells, self._workers = reading, list(dict.fromkeys(cells)), workers
        self._made: dict[Cell, Encoded] = {}

    def __getitem__(self, cell: Cell) -> Encoded:
        """Return a cell as soon as it is encoded; one that the store was not given is encoded in this process."""
        while cell not in self._made:
            encoded = next(self._coming, None) or encode_cell(self._reading, cell)
            self._made[encoded.cell] = encoded
        return self._made[cell]

    def begin(self) -> None:
        """Let the workers begin, and do not wait for them; else they begin when a cell is asked for."""
        iter(self._coming)

    @functools.cached_property
    def _coming(self) -> Iterator[Encoded]:
        cells, reading = self._cells, self._reading
        if self._workers == 0 or len(cells) < 2:
            return (encode_cell(reading, cell) for cell in cells)
        spawn = multiprocessing.get_context("spawn")
        count = min(self._workers, len(cells))
        pool = concurrent.futures.ProcessPoolExecutor(count, mp_context=spawn, initializer=end_with_parent)
        with held_interrupts():
            encoded = pool.map(encode_cell, [reading] * len(cells), cells)
        pool.shutdown(wait=False)  # behind the last cell
        return encoded
