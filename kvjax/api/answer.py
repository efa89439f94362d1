"""Ask questions about a text in one call: `answer` prefills the text once, and asks each question of a copy of the cache."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax import Array

from kvjax import models
from kvjax.accounting.stats import Stats
from kvjax.api.fork import fork
from kvjax.api.generate import check_key, extend, generate, likeliest, sampler_of
from kvjax.api.prefill import prefill
from kvjax.api.text import GrowingText, ScoredToken, stop_strings, until_stop
from kvjax.cache import Cache
from kvjax.decoding.sampling import Sampler
from kvjax.exact.progress import keys_of_draws
from kvjax.protocol.fields import positive_int, shown
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model
from kvjax.registry import make

_PATIENCE = 5.0  # seconds without a word
_MULTIPLE = 32  # questions are padded to a multiple of this many tokens, so that similar questions share a program
_BLOCK = 16  # tokens between two looks for a stop string


@runtime_checkable
class Speaker(Protocol):
    """A model that can be asked in text; ``kvjax.models.load`` returns one."""

    @property
    def params(self) -> Any:
        """The parameters."""
        ...

    @property
    def config(self) -> Model:
        """The model's description."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Has ``decode(ids)``; a method with `Method.tokenizer_knobs` also takes its vocabulary."""
        ...

    def encode(
        self,
        context: str,
        question: str = "",
        *,
        template: bool = True,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Encode a context, and the question with all that follows it, to token ids."""
        ...


class Answers(list[str]):
    """The answers of `answer`, in the order of the questions: a list of texts.

    Attributes:
        tokens: the generated token ids of each answer, a closing EOS or the end of a stop string included.
        stats: the cost of the method at the last step of each answer, with B = 1.
        scored: the same tokens with their log-probabilities (`kvjax.api.text.ScoredToken`); None unless they are asked for.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokens: Sequence[list[int]],
        stats: Sequence[Stats],
        scored: Sequence[list[ScoredToken]] | None = None,
    ) -> None:
        super().__init__(texts)
        self.tokens, self.stats, self.scored = list(tokens), list(stats), None if scored is None else list(scored)

    @property
    def texts(self) -> list[str]:
        """The answers."""
        return list(self)

    def __repr__(self) -> str:
        return f"Answers({self.texts!r})"


class _Progress:
    """Says on standard error what a call does, if it takes longer than `_PATIENCE`, and then no more often than that."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PATIENCE

    @contextlib.contextmanager
    def of(self, job: str) -> Iterator[None]:
        """Say what is done while the block runs."""
        timer = threading.Timer(max(self._due - time.monotonic(), 0), self._say, [job])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _say(self, job: str) -> None:
        self._due = time.monotonic() + _PATIENCE
        if sys.stderr is not None:
            sys.stderr.write(f"kvjax.answer: {job}\n")


def answer(
    model: Speaker | str | os.PathLike[str],
    context: str,
    questions: str | Sequence[str],
    *,
    method: Method | str = "full",
    max_new_tokens: int = 64,
    template: bool = True,
    system: str | None = None,
    variables: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    sampler: Sampler | None = None,
    key: Array | None = None,
    stop: str | Sequence[str] = (),
    chunk_size: int = 8192,
    kv_dtype: str | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Answers:
    """Answer questions about a text: the method compresses or indexes the text once, without any question.

    The chat template goes around context and question, if the model has one. The context is prefilled; each question is
    appended to a copy of its cache (`kvjax.fork`, `kvjax.extend`), the last one to the cache itself, and answered
    (`kvjax.generate`): memory holds at most two caches. A blank line stands between context and question, unless the
    context ends or the question begins with white space. A call of more than 5 seconds says on standard error what it does.

    Args:
        model: what ``kvjax.models.load`` returns; or a name, a directory or a GGUF file, which is loaded for this call alone.
        context: the text that the questions are about.
        questions: a question, or several.
        method: a method or its name; a budget may be a `kvjax.share` of the context.
        max_new_tokens: the most tokens of an answer.
        template: False asks without the chat template: the model continues context and question.
        system: the system message; None means the template's own.
        variables: other variables of the template, such as {"enable_thinking": False}.
        temperature, top_k, top_p, sampler, key: as in `kvjax.generate`; the key is split among the questions, and penalties
            count the tokens of context and question.
        stop: strings, before the first of which an answer ends, as in `kvjax.stream`.
        chunk_size, kv_dtype: as in `kvjax.prefill`.
        logprobs, top_logprobs: as in `kvjax.generate`; they are in `Answers.scored`.

    Returns:
        One text per question, without tokens that end an answer.

    Raises:
        ValueError: no question, an empty text, or what `kvjax.prefill` refuses, such as more tokens than the model takes.
        FileNotFoundError: the model does not exist.

    Example: ``kvjax.answer("builtin", text, ["Who?", "When?"], method=SnapKV(budget=kvjax.share(1/8)))``
    """
    asked = _asked(context, questions)
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    check_key(key, by_row=False)
    drawn = sampler_of(key, sampler, temperature=temperature, top_k=top_k, top_p=top_p)
    speaker: Speaker = models.load(model) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(speaker, Speaker):
        raise ValueError(f"model must be what kvjax.models.load returns, or a name of a model, got {shown(model)}")
    config, tokenizer = speaker.config, speaker.tokenizer
    likeliest(logprobs, top_logprobs, config)
    stops = stop_strings(stop, tokenizer)
    if isinstance(method, str):
        method = make(method, tokenizer, config.vocab_size)
    about = {"template": template, "system": system, "variables": variables}
    head, tails, sizes = _encoded(speaker, context, asked, max_new_tokens, about)
    progress, compiles = _Progress(), "; the first call of its size compiles"
    with progress.of(f"reads {len(head):,} tokens under {type(method).__name__}{compiles}"):
        room, given = tails.shape[1] + max_new_tokens, {"chunk_size": chunk_size, "kv_dtype": kv_dtype}
        whole = prefill(speaker.params, [head], config=config, method=method, max_new_tokens=room, **given)
        jax.block_until_ready(whole.logits)
    keys = [None] * len(asked) if key is None else jax.random.split(key, len(asked))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "logprobs": logprobs, "top_logprobs": top_logprobs}
    made: list[Any] = []
    for number, (tail, size, mine) in enumerate(zip(tails, sizes, keys, strict=True), 1):
        with progress.of(f"answers question {number} of {len(asked)} in at most {max_new_tokens:,} tokens{compiles}"):
            cache = whole if number == len(asked) else fork(whole)  # which `extend` consumes
            cache = extend(speaker.params, cache, tail[None], lengths=[size])
            read = drawn.read([[*head, *tail[:size]]]) if drawn.remembers else drawn
            made.append(_answered(speaker, cache, read, mine, stops=stops, **options))
            del cache  # before the next copy is made: memory need not hold both
    texts, tokens, stats, scored = ([one[part] for one in made] for part in range(4))
    return Answers(texts, tokens, stats, scored if logprobs else None)


def _asked(context: str, questions: str | Sequence[str]) -> list[str]:
    """List the questions; refuse a context or questions that are no texts, with a ValueError."""
    asked = list(questions) if isinstance(questions, Iterable) and not isinstance(questions, str) else [questions]
    for name, texts in (("context", [context]), ("questions", asked)):
        if not texts or not all(isinstance(text, str) and text for text in texts):
            expected = "a text" if name == "context" else "a text, or a list of at least one text"
            raise ValueError(f"{name} must be {expected}, got {shown(context if name == 'context' else questions)}")
    return asked


def _encoded(
    speaker: Speaker, context: str, asked: Sequence[str], max_new_tokens: int, about: Mapping[str, Any]
) -> tuple[list[int], np.ndarray, list[int]]:
    """Encode the context, and the questions padded to one length: token ids, int32 [Q, T], and the questions' lengths."""
    apart = "" if context[-1].isspace() else "\n\n"
    pairs = [speaker.encode(context, apart * (not question[0].isspace()) + question, **about) for question in asked]
    head, sizes = pairs[0][0], [len(tail) for _, tail in pairs]
    room = speaker.config.max_position_embeddings - len(head) - max_new_tokens  # padding must not be what does not fit
    tails = np.zeros((len(pairs), max(*sizes, 1, min(-(-max(*sizes, 1) // _MULTIPLE) * _MULTIPLE, room))), np.int32)
    for row, (_, tail) in zip(tails, pairs, strict=True):
        row[: len(tail)] = tail
    return head, tails, sizes


def _answered(
    speaker: Speaker,
    cache: Cache,
    sampler: Sampler,
    key: Array | None,
    *,
    stops: Sequence[str],
    max_new_tokens: int,
    logprobs: bool,
    top_logprobs: int,
) -> tuple[str, list[int], Stats, list[ScoredToken]]:
    """Generate an answer; with stop strings piece by piece, with the tokens of one call."""
    ends, growing = speaker.config.eos_token_ids, GrowingText(speaker.tokenizer, stops)
    block = min(_BLOCK, max_new_tokens) if stops else max_new_tokens
    text, ids, scored = "", [], []
    while True:
        steps = min(block, max_new_tokens - len(ids))
        options: dict[str, Any] = {"max_new_tokens": steps, "logprobs": logprobs, "top_logprobs": top_logprobs}
        out = generate(speaker.params, cache, sampler=sampler, key=key, **options)
        (new,) = out.rows()
        ids += new
        scored += out.scored_rows()[0] if logprobs else ()
        last = len(ids) >= max_new_tokens or ids[-1] in ends
        text += growing.add([token for token in new if token not in ends], last)
        if last or growing.ended:
            size = until_stop(speaker.tokenizer, ids, stops)
            return text, ids[:size], out.stats, scored[:size]
        cache, sampler, key = out.cache, out.sampler, None if key is None else keys_of_draws(key, steps)[1]
