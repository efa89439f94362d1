"""Ask a model under a method: the loop of all experiments that generate answers.

The question may be part of the prompt that a method compresses, or be asked afterwards (`kvjax.extend`). These are two
experiments with different scores. Several questions that are asked afterwards share the compressed cache of their context.
Each question is asked of its own copy of the cache, one question after the other or all in one batch. Or it is a turn of a
conversation, and follows the earlier questions and answers in the same cache.

Shapes are shared on purpose, because compiling costs more than running: all prompts are padded to the same length, and the
last batch is filled up with copies of its first row.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.records import CompileClock, Timer
from kvjax.api.programs import lower_programs
from kvjax.protocol.method import Method

Ids = Sequence[int]
READ_AFTER = 8  # tokens of an answer, as many as the shortest task allows


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shapes that decide a compiled program, together with the method and the model.

    Attributes:
        length: the number of tokens that every context is padded to; with `questions` 0 the context includes the question.
        rows: contexts that are prefilled together.
        new_tokens: most tokens of any answer.
        questions: questions that are asked after each context.
        question_length: the number of tokens that every question is padded to.
        keep: whether questions and answers stay in the cache for the questions that follow.
        chunk: `chunk_size` of `kvjax.prefill_each`.
    """

    length: int
    rows: int
    new_tokens: int
    questions: int = 0
    question_length: int = 0
    keep: bool = False
    chunk: int = 8192

    @property
    def room(self) -> int:
        """The tokens that a cache must hold beside the context."""
        if not self.questions:
            return self.new_tokens
        return (self.questions if self.keep else 1) * (self.question_length + self.new_tokens)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The answers, and their accounting.

    Attributes:
        ids: generated token ids, a closing EOS included: ids[context][question]; a context that includes its question has a
            single answer.
        stats: (real rows, accounting) of every batch of answers; the real rows come first. It is of the step after the first
            `READ_AFTER` tokens of an answer, because answers end at other places under other methods; counters of the whole
            answer. Under a method that drafts tokens, and in a shorter answer, it is of the step after the last token.
        run_seconds: wall-clock seconds without compilation.
        decode_seconds: the part of `run_seconds` in which answers were generated; the rest prefilled contexts and questions.
        compile_seconds: seconds of compilation.
    """

    ids: list[list[list[int]]]
    stats: list[tuple[int, kvjax.Stats]]
    run_seconds: float
    decode_seconds: float
    compile_seconds: float


def pad(rows: Sequence[Ids], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad token ids on the right, to int32 [rows, length]; return them and their lengths, int32 [rows].

    Raises:
        ValueError: a row is longer.
    """
    if (longest := max(map(len, rows))) > length:
        raise ValueError(f"rows must have at most {length} tokens, got {longest}")
    padded = np.zeros((len(rows), length), np.int32)
    for row, tokens in enumerate(rows):
        padded[row, : len(tokens)] = tokens
    return padded, np.asarray([len(tokens) for tokens in rows], np.int32)


def ask(params: Any, config: Any, contexts: Sequence[Ids], method: Method | str, shape: Shape, **options: Any) -> Asked:
    """Run `ask_in_turn` for one method."""
    (asked,) = ask_in_turn(params, config, contexts, [method], shape, **options)
    return asked


def ask_in_turn(
    params: Any,
    config: Any,
    contexts: Sequence[Ids],
    methods: Sequence[Method | str],
    shape: Shape,
    *,
    questions: Sequence[Sequence[Ids]] = (),
    limits: Sequence[Sequence[int]] = (),
    clock: CompileClock | None = None,
    kv_dtype: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    parts: Sequence[int] = (),
) -> Iterator[Asked]:
    """Generate greedy answers under each of several methods, which prefill the contexts together.

    Args:
        params, config, methods, kv_dtype: as in `kvjax.prefill_each`.
        contexts: token ids, none longer than `shape.length`.
        shape: how the contexts are batched.
        questions: 1 to `shape.questions` questions about each context; empty if the contexts include their questions.
        limits: most tokens of each answer, limits[context][question]; empty means `shape.new_tokens` for all answers. Other
            limits do not compile another program.
        clock: counts compilation; without it compilation counts as running.
        tell: is called with a text that says what is done next: which contexts are read, or asked under which method.
        parts: how many methods each have caches at one time, and share `inputs` of `kvjax.prefill_each`; empty means all.

    Yields:
        Answers and accounting of each method, as soon as the method has answered the last context. Each method gets an equal
        share of the time to prefill the contexts.

    Raises:
        ValueError: a context or a question is longer than the shape allows.
    """
    clock = clock or CompileClock()
    results = [Asked([], [], 0.0, 0.0, 0.0) for _ in methods]
    for start in range(0, len(contexts), shape.rows):
        real = min(shape.rows, len(contexts) - start)
        prompts = f"prompts {start + 1} to {start + real} of {len(contexts)}"
        tell(f"reading {prompts}")
        at = [start + (row if row < real else 0) for row in range(shape.rows)]
        tokens, lengths = pad([contexts[i] for i in at], shape.length)
        sizes: dict[str, Any] = {"lengths": lengths, "max_new_tokens": shape.room, "kv_dtype": kv_dtype}
        sizes |= {"share_storage": True, "chunk_size": shape.chunk, "inputs": [] if len(parts) > 1 else None}
        caches, left = list[kvjax.Cache](), iter(parts or [len(methods)])
        for number, asked in enumerate(results):
            if not caches:
                part = methods[number : number + next(left)]
                with Timer(clock) as reading:
                    caches = kvjax.prefill_each(params, tokens, config=config, methods=part, **sizes)
                    if len(caches) > 1:  # otherwise the time of all caches would count for the first method
                        jax.block_until_ready(caches)
            tell(f"asking {prompts}" + f" under method {number + 1} of {len(methods)}" * (len(methods) > 1))
            with Timer(clock) as answering:
                answers, stats, decoding = _answer(
                    params, caches.pop(0), at, real, shape, questions, limits, clock, bool(caches)
                )
            results[number] = Asked(
                asked.ids + answers,
                asked.stats + stats,
                asked.run_seconds + answering.run + reading.run / len(part),
                asked.decode_seconds + decoding,
                asked.compile_seconds + answering.compile + reading.compile / len(part),
            )
            if start + shape.rows >= len(contexts):
                yield results[number]


def _answer(
    params: Any,
    cache: kvjax.Cache,
    at: Sequence[int],
    real: int,
    shape: Shape,
    questions: Sequence[Sequence[Ids]],
    limits: Sequence[Sequence[int]],
    clock: CompileClock,
    shared: bool,
) -> tuple[list[list[list[int]]], list[tuple[int, kvjax.Stats]], float]:
    """Generate the answers of a batch whose contexts ``at`` are in the cache; the first ``real`` rows are no copies.

    A cache that is ``shared`` has arrays of later caches, so it is copied and not consumed.

    Returns:
        The answers, the accounting of each batch of answers, and the seconds of decoding.
    """
    answers: list[list[list[int]]] = [[] for _ in range(real)]
    stats: list[tuple[int, kvjax.Stats]] = []
    seconds, turns = 0.0, max(shape.questions, 1)
    for turn in range(turns):
        if shape.questions:
            # A copy is asked, because `extend` consumes its cache.
            now = cache if not shared and (shape.keep or turn == turns - 1) else kvjax.fork(cache)
            asked, asked_lengths = pad([_turn(questions[i], turn) for i in at], shape.question_length)
            now = jax.block_until_ready(kvjax.extend(params, now, asked, lengths=asked_lengths))
        else:
            now = jax.block_until_ready(kvjax.fork(cache) if shared else cache)
        most = [_turn(limits[i], turn) if limits else shape.new_tokens for i in at]
        most[real:] = [0] * (len(at) - real)  # the answers of the copies are not used
        first = np.int32(most) if now.method.drafts else np.minimum(most, READ_AFTER, dtype=np.int32)
        with Timer(clock) as decoding:
            out = kvjax.generate(params, now, max_new_tokens=shape.new_tokens, limits=first)
            tokens, counts, measured, ends = jax.device_get((out.tokens, out.num_tokens, out.stats, out.eos_token_ids))
            written = [tokens[row, : counts[row]].tolist() for row in range(len(at))]
            rest = np.int32(
                [0 if set(ids) & set(ends.tolist()) else n - len(ids) for ids, n in zip(written, most, strict=True)]
            )
            if rest.any():
                out = kvjax.generate(params, out.cache, max_new_tokens=shape.new_tokens, limits=rest)
                tokens, counts, last = jax.device_get((out.tokens, out.num_tokens, out.stats))
                measured = dataclasses.replace(measured, counters=last.counters)
                written = [ids + tokens[row, : counts[row]].tolist() for row, ids in enumerate(written)]
        seconds += decoding.run
        if shape.keep:
            cache, shared = out.cache, False
        del now, out  # before the next copy is made: memory need not hold both
        stats.append((real, measured))
        for row in range(real):
            if not shape.questions or turn < len(questions[at[row]]):
                answers[row].append(written[row])
    return answers, stats, seconds


def _turn(values: Sequence[Any], turn: int) -> Any:
    """Return the value of a turn; the last value if there are fewer values."""
    return values[min(turn, len(values) - 1)]


def programs(
    params: Any, config: Any, methods: Sequence[Method], shape: Shape, kv_dtype: str | None = None, parts: Sequence[int] = ()
) -> Iterator[jax.stages.Lowered]:
    """Lower the programs that `ask_in_turn` runs, one after the other; see `kvjax.api.programs.lower_programs`.

    Those of the last part come first, since one program of all layers compiles longest; but the first part's first program
    precedes them, since to lower it finds the shapes of ``inputs``.
    With an offloaded method no program is lowered: its arrays in host memory cannot be described before they exist.
    """
    inputs: list[Any] | None = [] if len(parts) > 1 else None
    each = []
    for part in () if any(method.offload for method in methods) else parts or [len(methods)]:
        now, methods = methods[:part], methods[part:]
        each.append(lower_programs(
            params, config=config, methods=now, inputs=inputs, rows=shape.rows, length=shape.length, room=shape.room,
            max_new_tokens=shape.new_tokens, num_eos=len(config.eos_token_ids), with_limits=True,
            question_length=shape.question_length if shape.questions else 0, chunk_size=shape.chunk, kv_dtype=kv_dtype,
            share_storage=True,
        ))  # fmt: skip
    for first in each[:1]:
        yield next(first)
    for part in each[-1:] + each[:-1]:
        yield from part


def account(stats: Sequence[tuple[int, kvjax.Stats]], rows: int) -> dict[str, Any]:
    """Average the accounting over the real rows of all batches; JSON values."""

    def mean(read: Any, digits: int = 1) -> float:
        return round(float(np.mean(np.concatenate([np.asarray(read(s))[:real] for real, s in stats]))), digits)

    return {
        "attended_tokens": mean(lambda s: s.attended),
        "length_tokens": mean(lambda s: s.length),
        "bytes_read_per_step": mean(lambda s: s.bytes_read, 0),
        "full_bytes_read_per_step": mean(lambda s: s.full_bytes_read, 0),
        "resident_bytes_per_row": round(stats[0][1].resident_bytes / rows),
        "counters": {name: mean(lambda s, name=name: s.counters[name], 4) for name in sorted(stats[0][1].counters)},
    }


def reads_all(accounting: Mapping[str, Any]) -> bool:
    """Tell whether a method with this accounting, from `account`, reads all that Full reads, and so was not tested at all.

    Such a method attends to every token and reads as many bytes as Full. A method that stores fewer bytes of each token
    reads fewer bytes.
    """
    read, full = (accounting[name] for name in ("bytes_read_per_step", "full_bytes_read_per_step"))
    return accounting["attended_tokens"] >= accounting["length_tokens"] and read >= (1 - 1e-4) * full
