"""EleutherAI's lm-evaluation-harness over a kvjax method: every task of the harness is scored through the method.

From Python, with the extra ``lm-eval`` installed::

    import lm_eval
    from experiments.lm_eval.model import KvjaxLM

    lm = KvjaxLM("builtin", method="quest", budget=256, batch_size=4)
    metadata = {"tokenizer": lm.tokenizer_directory, "max_seq_lengths": [4096]}  # RULER's tasks make their own prompts
    results = lm_eval.simple_evaluate(model=lm, tasks=["niah_single_1"], limit=10, metadata=metadata)
    lm.last_stats  # tokens attended, bytes read per step, ...

From the command line: ``python -m experiments.lm_eval run --model kvjax --model_args model=DIRECTORY,method=quest,budget=256
--tasks niah_single_1 --metadata '{"max_seq_lengths": [4096]}'``. Arguments that `KvjaxLM` does not name are the
method's knobs.

* ``generate_until`` prefills prompts and generates under the method, in ragged batches.
* ``loglikelihood`` and ``loglikelihood_rolling`` feed the scored tokens one after the other through the method's decode steps
  (`likelihood.py`). Other models of the harness make a single dense pass, in which no method selects, so that all methods get
  the same score. A method that evicts only at the prompt's end evicts nothing from a rolling text, whose prompt is one token.
* Prompts that leave no room for the answer lose their beginning, as in the whole harness; the log says how many were cut.
* Texts for ``loglikelihood_rolling`` are encoded without a begin-of-text token, because such a token already precedes them.

RULER tasks that run offline: niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt, ruler_cwe, ruler_fwe. The other
needle tasks fetch essays and NLTK's sentence splitter; the question tasks fetch SQuAD and HotpotQA. (Every needle task tries
to fetch the sentence splitter when the task is loaded, and continues without it.) ruler_vt needs more than 512 tokens.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
import models
from experiments.answering import LoadedModel, account, load_model, padded_length
from experiments.lm_eval.likelihood import Likelihood, likelihoods
from experiments.records import knobs_of
from experiments.tasks import encode_prompt
from kvjax import registry
from kvjax.decoding.sampling import NUMBERS, Sampler
from kvjax.protocol.method import Method
from models.hub.progress import progress_bar

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the harness is the package 'lm_eval', which is not installed ({error}); install the extra 'lm-eval' "
        "(pip install 'kvjax[lm-eval]')"
    ) from error

NAME = "kvjax"
_log = logging.getLogger(__name__)
_UNSCORED: Likelihood = (-np.inf, False)  # the least likely: an answer that is never chosen
_BLOCK = 32  # tokens that are generated before the text is searched for a stopping text again


class _Tally:
    """A tally of requests, their tokens, their accounting, and the prompts that were cut; all batches have ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stats: list[tuple[int, kvjax.Stats]] = []
        self._tokens = 0
        self._truncated = 0

    def cut(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Count the prompts of more than ``most`` tokens."""
        self._truncated += sum(len(prompt) > most for prompt in prompts)

    def add(self, real: int, stats: kvjax.Stats, tokens: int) -> None:
        """Count a batch, whose first ``real`` rows are requests and later rows copies, and the ``tokens`` of the requests."""
        self._stats.append((real, stats))
        self._tokens += tokens

    def summary(self, room: str) -> dict[str, Any]:
        """Return the counts as JSON values; log a warning if prompts were cut to make room for ``room``."""
        requests = sum(real for real, _ in self._stats)
        if self._truncated:
            _log.warning("%d of %d requests lost their beginning to make room for %s", self._truncated, requests, room)
        counts = {"requests": requests, "tokens": self._tokens, "truncated": self._truncated}
        return counts | (account(self._stats, self._rows) if requests else {})


class KvjaxLM(TemplateLM):
    """A model under a kvjax method, with the interface that the harness expects.

    Args:
        model: a name, a Hugging Face directory or a repository of the hub (see `models.checkpoint_directory`), or a
            `LoadedModel`.
        method: a kvjax method or its name.
        tokenizer: directory of a tokenizer that replaces the model's.
        max_length: most tokens of prompt and answer together; None takes the model's number of positions.
        max_gen_toks: most tokens to generate, for tasks that state no number.
        batch_size: rows that run together.
        dtype: "float32" or "bfloat16"; None takes bfloat16 on a GPU and float32 elsewhere.
        offline: whether to raise an error instead of downloading the model or the tokenizer.
        sampling_seed: seed for tasks that sample.
        enable_thinking: passed to the chat template; None leaves it out.
        think_end_token: the text that ends a model's thinking; it is cut off with the thinking.
        device, max_batch_size: arguments of the harness's command line; they are ignored, because JAX chooses the device.
        **knobs: the method's hyper-parameters, if the method is given by name.

    Raises:
        ValueError: an unknown method or knob, or a setting out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike | LoadedModel = "builtin",
        method: Method | str = "full",
        *,
        tokenizer: str | os.PathLike | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        dtype: str | None = None,
        offline: bool = False,
        sampling_seed: int = 0,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **knobs: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a whole number of rows, at least 1, got {batch_size!r}")
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype, offline=offline)
        directory = model.directory
        if tokenizer is not None:
            directory = models.checkpoint_directory(tokenizer, offline=offline)
        self.model = model
        self.tokenizer = model.tokenizer if tokenizer is None else models.load_tokenizer(directory, model.config)
        self.method = _make_method(method, self.tokenizer, model.config.vocab_size, knobs)
        limit = model.config.max_position_embeddings
        if max_length is not None and (max_length < 2 or (max_length > limit and not self.method.extrapolates)):
            raise ValueError(f"max_length must lie between 2 and the model's {limit} positions, got {max_length}")
        self.max_length = limit if max_length is None else max_length
        self.max_gen_toks = max_gen_toks
        self.batch_size = int(batch_size)
        self.tokenizer_directory = str(directory)
        self.chat = models.ChatTemplate.from_directory(directory)
        self.last_stats: dict[str, Any] = {}
        self._bos = models.special_tokens(directory).get("bos_token")
        self._thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._think_end = think_end_token
        self._key = jax.random.key(sampling_seed)

    @property
    def eot_token_id(self) -> int:
        """The model's first end-of-text token."""
        if not self.model.config.eos_token_ids:
            raise ValueError(f"the config of {self.model.name} names no end-of-text token")
        return self.model.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the begin-of-text token, or else the end-of-text token."""
        token = None if self._bos is None else self.tokenizer.token_to_id(self._bos)
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        """A name that tells tokenizers and chat templates apart in the harness's cache of requests."""
        chat = "" if self.chat is None else f"-{self.chat.identity}"
        return self.tokenizer_directory.replace(os.sep, "__") + chat

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template, for the harness's records; a name chooses a template of the checkpoint."""
        if isinstance(chat_template, str):
            self.chat = models.ChatTemplate.from_directory(self.tokenizer_directory, chat_template)
        return self.chat.template if chat_template and self.chat is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the prompt of a conversation; without ``add_generation_prompt``, its last message stays open."""
        if self.chat is None:
            raise ValueError(f"{self.tokenizer_directory} has no chat template; run without apply_chat_template")
        turns = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return self.chat.render(chat_history, **turns, **self._thinking)

    def get_model_info(self) -> dict[str, Any]:
        """Return values that the harness adds to its results."""
        return {
            "model_name": self.model.name,
            "model_dtype": self.model.config.dtype,
            "method": type(self.method).__name__,
            "knobs": knobs_of(self.method),
            "max_length": self.max_length,
            "chat_template_id": None if self.chat is None else self.chat.identity,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; by default as `experiments.tasks.encode_prompt` does."""
        if add_special_tokens is None:
            return encode_prompt(self.tokenizer, string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate continuations under the method; each ends before its first stopping text."""
        tally = _Tally(self.batch_size)
        texts: list[str] = []
        order = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: (-len(args[0]), args[0]),
            group_by="gen_kwargs",
            group_fn=lambda args: args[1],
        )
        with progress_bar(total=len(requests), disable=disable_tqdm, desc=f"{NAME}: generating") as bar:
            for batch in order.get_batched(n=self.batch_size):
                answers = self._generate([prompt for prompt, _ in batch], batch[0][1], tally)
                for (prompt, wanted), text in zip(batch, answers, strict=True):
                    self.cache_hook.add_partial("generate_until", (prompt, wanted), text)
                texts += answers
                bar.update(len(batch))
        self.last_stats = tally.summary(f"the answer in max_length={self.max_length}")
        return order.get_original(texts)

    def _generate(self, texts: list[str], wanted: Mapping[str, Any], tally: _Tally) -> list[str]:
        """Generate the continuations of a batch of prompts, without the texts that ended them."""
        options = dict(normalize_gen_kwargs(dict(wanted), self.max_gen_toks))
        stop = [text for text in options.pop("until") if text]
        limit, sampler = options.pop("max_gen_toks"), _sampler(options)
        if not 1 <= limit < self.max_length:
            raise ValueError(f"max_gen_toks must be at least 1 and below max_length={self.max_length}, got {limit}")
        real = len(texts)
        prompts = [self.tok_encode(text) or [self.prefix_token_id] for text in texts]
        tally.cut(prompts, self.max_length - limit)
        prompts = [prompt[limit - self.max_length :] for prompt in prompts]
        prompts += prompts[:1] * (self.batch_size - real)  # equal shapes share a compiled program
        params, config, sampler = self.model.params, self.model.config, sampler.read(prompts)
        cache = kvjax.prefill(
            params,
            prompts,
            config=config,
            method=self.method,
            max_new_tokens=limit,
            pad_multiple=padded_length(max(map(len, prompts))),
        )
        ends = (*config.eos_token_ids, *self._special(stop))
        ids: list[list[int]] = [[] for _ in prompts]
        answers = [""] * len(prompts)
        done, stats = np.zeros(len(prompts), bool), None
        while not done[:real].all():
            self._key, key = jax.random.split(self._key)
            steps = min(_BLOCK if stop else limit, limit - len(max(ids, key=len)))
            drawn = {"sampler": sampler, "key": None if sampler.temperature is None else key}
            out = kvjax.generate(params, cache, max_new_tokens=steps, eos_token_ids=ends, **drawn)
            cache, sampler = out.cache, out.sampler
            tokens, counts, measured = jax.device_get((out.tokens, out.num_tokens, out.stats))
            stats = measured if stats is None else jax.tree.map(lambda a, b: np.where(done, a, b), stats, measured)
            for row in np.flatnonzero(~done):
                ids[row] += tokens[row, : counts[row]].tolist()
                answers[row] = self.tokenizer.decode([token for token in ids[row] if token not in ends])
                full = len(ids[row]) >= limit or ids[row][-1] in ends
                # A stopping text ends the answer, not the thinking before it.
                answer = answers[row].partition(self._think_end)[2] if self._think_end else answers[row]
                done[row] = full or any(text in answer for text in stop)
        tally.add(real, stats, sum(map(len, ids[:real])))
        return [postprocess_generated_text(text, stop, self._think_end) for text in answers[:real]]

    def _special(self, stop: Sequence[str]) -> list[int]:
        """Find the stopping texts that are special tokens, which decoded text does not contain."""
        special = self.tokenizer.get_added_tokens_decoder()
        return [token for token, added in special.items() if added.special and added.content in stop]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Compute the log-probabilities of texts, in windows of ``max_length`` tokens; every token is predicted once."""
        windows, counts = [], []
        for request in requests:
            pairs = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            windows += disjoint
            counts.append(len(disjoint))
        values = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Compute the log-probability and greediness of each continuation; equal contexts are prefilled a single time.

        A request that cannot be scored is logged by name and gets minus infinity.
        """
        tally = _Tally(self.batch_size)
        grouped: dict[tuple[int, ...], list[int]] = {}
        for at, (args, context, text) in enumerate(requests):
            keep = self.max_length + 1 - len(text)  # the last token is scored and not fed
            if problem := self._unscorable(context, text):
                name = f"request {at + 1} of {len(requests)}" + ("" if args is None else f", {str(args)[:200]},")
                _log.warning("%s cannot be scored and gets minus infinity: %s", name, problem)
                continue
            tally.cut([context], keep)
            grouped.setdefault(tuple(context[-keep:]), []).append(at)
        contexts = sorted(grouped, key=len, reverse=True)
        results = [_UNSCORED] * len(requests)
        scorable = sum(map(len, grouped.values()))
        with progress_bar(total=scorable, disable=disable_tqdm, desc=f"{NAME}: scoring") as bar:
            for start in range(0, len(contexts), self.batch_size):
                batch = contexts[start : start + self.batch_size]
                self._score(batch, [grouped[context] for context in batch], requests, results, tally)
                bar.update(sum(len(grouped[context]) for context in batch))
        self.last_stats = tally.summary(f"what is scored in max_length={self.max_length}")
        for (args, _, _), result in zip(requests, results, strict=True):
            if args is not None:
                self.cache_hook.add_partial("loglikelihood", args, result)
        return results

    def _unscorable(self, context: list[int], text: list[int]) -> str:
        """Say why a continuation cannot be scored; nothing if it can."""
        if not 1 <= len(text) <= self.max_length:
            return f"a text to score must have 1 to max_length={self.max_length} tokens, got {len(text)}"
        if not context:
            return "a context must have at least 1 token, got 0"
        rows = self.model.config.vocab_size
        if (most := max(*context, *text)) >= rows:
            return f"a token must be below the vocabulary's {rows} tokens, got {most} ({self.tokenizer.id_to_token(most)!r})"
        return ""

    def _score(
        self,
        contexts: list[tuple[int, ...]],
        members: list[list[int]],
        requests: Sequence[tuple[Any, list[int], list[int]]],
        results: list[Likelihood],
        tally: _Tally,
    ) -> None:
        """Score a batch of contexts with all their texts.

        For each context ``members`` has the indices of its requests, whose likelihoods ``results`` receives.
        """
        texts = [[requests[at][2] for at in row] for row in members]
        fill = self.batch_size - len(contexts)  # equal shapes share a compiled program
        longest = max(len(text) for row in texts for text in row)
        room = padded_length(longest, 8)
        if not self.method.extrapolates:
            room = max(longest, min(room, self.model.config.max_position_embeddings - len(contexts[0])))
        rows, stats = likelihoods(
            self.model.params,
            self.model.config,
            [list(context) for context in [*contexts, *contexts[:1] * fill]],
            [*texts, *[texts[0][:1]] * fill],
            self.method,
            length=padded_length(len(contexts[0])),
            room=room,
        )
        for row, scored in zip(members, rows[: len(contexts)], strict=True):
            for at, result in zip(row, scored, strict=True):
                results[at] = result
        for turn, measured in enumerate(stats):
            here = np.flatnonzero([turn < len(row) for row in members])
            picked = jax.tree.map(lambda leaf, here=here: leaf[here], measured)
            tally.add(len(here), picked, sum(len(texts[row][turn]) for row in here))


def _make_method(method: Method | str, tokenizer: Any, vocab_size: int, knobs: Mapping[str, Any]) -> Method:
    """Make the method; knobs that are texts, from a command line, are parsed like the knobs of ``--set``."""
    if not isinstance(method, str):
        if knobs:
            raise ValueError(f"knobs belong to a method given by name, got {method!r} and {', '.join(knobs)}")
        return registry.resolve(method)
    texts = [f"{name}={value}" for name, value in knobs.items() if isinstance(value, str)]
    return registry.make(method, tokenizer, vocab_size, **{**knobs, **registry.parse_knobs(method, texts)})


def _sampler(options: Mapping[str, Any]) -> Sampler:
    """Make the sampler of the harness's options, whose names are those of transformers."""
    names = {name: name for name in NUMBERS} | {"no_repeat_ngram_size": "no_repeat_ngram"}
    unknown = options.keys() - {"do_sample", "num_beams", *names}
    if unknown or options.get("num_beams", 1) != 1:
        got = ", ".join(sorted(unknown)) or f"num_beams={options['num_beams']}"
        raise ValueError(f"generation takes do_sample, {', '.join(names)}, got {got}")
    values = {names[name]: value for name, value in options.items() if name in names}
    if not options.get("do_sample") or float(values.get("temperature", 0)) == 0:
        values = {name: value for name, value in values.items() if name not in ("temperature", "top_k", "top_p", "min_p")}
    return Sampler(**values)


def register() -> None:
    """Make the name "kvjax" known to the harness in this process."""
    if NAME not in model_registry:
        model_registry.register(NAME, target="experiments.lm_eval.model:KvjaxLM")
