"""Hyper-parameter sweeps: one compiled ``vmap`` over all settings of a method.

Methods with equal static fields differ only in the values of their leaves. The leaves are stacked, and the whole run
(compression and every decode step) is mapped over the stack. The dense prefill does not depend on the method, so it is
computed once. Use a sweep for accuracy curves. Do not measure speed or memory with it: under ``vmap`` every setting
costs as much as the largest ``capacity``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from kvjax.accounting.stats import Stats
from kvjax.api.generate import eos_array
from kvjax.api.measure import measure
from kvjax.api.prefill import Integers, Tokens, longest, pad_tokens
from kvjax.api.shard_map import SAME, spread, total_bytes
from kvjax.api.text import rows_of, texts_of
from kvjax.cache import Cache
from kvjax.cache.quantised import check_kv_dtype
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.checks import as_jax, check_arrays, check_border, check_fits, check_model, check_sizes, check_vocabulary
from kvjax.decoding.decode import Call, Decoded, all_done, decode_once, run_extend, start_decode
from kvjax.decoding.prefill import run_prefill
from kvjax.decoding.sampling import Sampler
from kvjax.exact.verify import advance, drafts_tokens
from kvjax.mesh.sharding import Plan, place_rows, plan_of, readable
from kvjax.protocol.describe import describe, is_known, on_device
from kvjax.protocol.fields import positive_int
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model
from kvjax.registry import resolve_each


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """The result of one setting."""

    method: Method
    tokens: Array  # int32 [B, N]; after a row's end the model's first EOS id, or 0 if the model has none
    num_tokens: Array  # int32 [B]
    eos_token_ids: Array  # int32 [E], the tokens that could end a row
    stats: Stats
    group: int  # settings of the same group ran in one compiled program

    def rows(self) -> list[list[int]]:
        """List the token ids of each row without padding, as `kvjax.Generation.rows`."""
        return rows_of(self.tokens, self.num_tokens)

    def texts(self, tokenizer: Any) -> list[str]:
        """Decode each row, as `kvjax.Generation.texts`."""
        return texts_of(tokenizer, self.rows(), self.eos_token_ids)


@in_32_bits
def sweep(
    params: Any,
    tokens: Tokens,
    methods: Sequence[Method | str],
    *,
    config: Model,
    max_new_tokens: int = 64,
    questions: Tokens | None = None,
    eos_token_ids: Integers | int | None = None,
    lengths: Integers | None = None,
    question_lengths: Integers | None = None,
    chunk_size: int = 8192,
    report: Callable[[str], None] | None = None,
    kv_dtype: str | None = None,
) -> list[SweepResult]:
    """Run every method on the same prompts, greedily. Settings of equal structure share one compiled program.

    Args:
        params: model parameters.
        tokens: prompts, as in `kvjax.prefill`.
        methods: settings. With the same static ``capacity``, different budgets have equal structure, for example
            ``[SnapKV(budget=b, capacity=1024) for b in (128, 256, 512, 1024)]``.
        config: the model's description.
        max_new_tokens: N, tokens generated per row.
        questions: tokens to append after compression (`kvjax.extend`), one row per prompt.
        eos_token_ids: None means the model's ids.
        lengths: int [B], for an array of tokens.
        question_lengths: int [B], for an array of questions.
        chunk_size: as in `kvjax.prefill`.
        report: is called with one line about the groups of settings, and with one line as each group starts.
        kv_dtype: as in `kvjax.prefill`.

    Returns:
        One result per method, in the order of ``methods``.

    Raises:
        ValueError: no methods, an offloaded method, or arguments that `kvjax.prefill` refuses.
        FloatingPointError: the logits of some setting were not finite.
    """
    check_model(config)
    check_arrays(params)
    max_new_tokens, chunk_size = positive_int("max_new_tokens", max_new_tokens), positive_int("chunk_size", chunk_size)
    check_kv_dtype(kv_dtype)
    padded, length = pad_tokens(tokens, lengths, 128)
    settings = resolve_each(methods, longest(length, padded), padded.shape[1])
    asked, ask_length = as_jax(np.zeros((len(padded), 0), np.int32)), None
    if questions is not None:
        asked, ask_length = pad_tokens(questions, question_lengths)
    plan = plan_of(params)
    _check(settings, padded, length, asked, config, max_new_tokens, plan)
    padded, length, asked, ask_length = place_rows(plan, padded, length, asked, ask_length)
    eos = eos_array(eos_token_ids, config)
    say = report or (lambda line: None)
    groups = group_by_structure(settings)
    say(_about(settings, groups))
    results: dict[int, SweepResult] = {}
    for number, members in enumerate(groups):
        group = [settings[i] for i in members]
        # The leaves have an axis of lanes in front, one per method.
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *on_device(group))
        say(f"group {number + 1}/{len(groups)}: {describe(group[0])}" + " ..." * (len(group) > 1))
        ended, count, bad, stats = _run(
            params,
            {"tokens": padded, "length": length, "asked": asked, "ask_length": ask_length},
            {"eos": eos, "stacked": stacked},
            model=config,
            lanes=len(members),
            max_new_tokens=max_new_tokens,
            chunk_size=chunk_size,
            plan=plan,
            kv_dtype=kv_dtype,
        )
        of_group = _results(group, number, eos, *readable(plan, (ended, count, bad, stats)))
        results.update(zip(members, of_group, strict=True))
    return [results[index] for index in range(len(settings))]


def _check(
    settings: Sequence[Method],
    padded: Array,
    length: Array,
    asked: Array,
    config: Model,
    max_new_tokens: int,
    plan: Plan | None,
) -> None:
    """Refuse what a sweep cannot run, before anything is compiled."""
    if plan is not None and plan.parts > 1:
        raise ValueError(
            f"sweep does not run where the mesh's axis 'slots' divides the slots of each row, got the mesh {plan}; run "
            "prefill and generate for each method there, or sweep on a mesh with the axes 'data' and 'model' alone"
        )
    if len(asked) != len(padded):
        raise ValueError(f"questions must have {len(padded)} rows like the prompts, got {len(asked)}")
    check_vocabulary(padded, config)
    check_vocabulary(asked, config)
    for method in settings:
        check_sizes(method, config)
        check_fits(length, max_new_tokens + asked.shape[1], config, method)
        check_border(config, method, length, max_new_tokens + asked.shape[1])
        if method.offload:
            raise ValueError(f"sweep keeps all caches on the device: offload must be False, got {describe(method)}")


def _about(settings: Sequence[Method], groups: Sequence[Sequence[int]]) -> str:
    """Write a line for people: how many settings there are, and which settings share a program."""
    kinds = ", ".join(f"{len(members)} x {type(settings[members[0]]).__name__}" for members in groups)
    plural = "s" * (len(groups) > 1)
    return f"{len(settings)} settings in {len(groups)} group{plural} of equal structure (one compile each): {kinds}"


def _results(
    group: Sequence[Method], number: int, eos: Array, ended: Array, count: Array, bad: Array, stats: Stats
) -> list[SweepResult]:
    """Divide what a group returned by its lanes; refuse logits that were not finite, by bad steps int32 [lanes, B]."""
    if is_known(bad) and (worst := jax.device_get(bad).max(axis=1)).max() >= 0:
        raise FloatingPointError(f"logits are not finite under {describe(group[worst.argmax()])}")
    return [
        SweepResult(
            method=method,
            tokens=ended[lane],
            num_tokens=count[lane],
            eos_token_ids=eos,
            group=number,
            stats=jax.tree.map(lambda x, lane=lane: x[lane], stats),
        )
        for lane, method in enumerate(group)
    ]


def group_by_structure(methods: Sequence[Method]) -> list[list[int]]:
    """Group the indices of methods with equal tree structure (equal static fields), in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for index, method in enumerate(methods):
        groups.setdefault(jax.tree.structure(method), []).append(index)
    return list(groups.values())


@functools.partial(jax.jit, static_argnames=("model", "lanes", "max_new_tokens", "chunk_size", "plan", "kv_dtype"))
def _run(
    params: Any, rows: dict[str, Any], same: dict[str, Any], *, model: Model, plan: Plan | None, **static: Any
) -> tuple[Array, Array, Array, Stats]:
    """Run `_lanes` on the devices of ``plan``, with arrays by ``rows`` and the ``same`` ones, or on one device."""
    if plan is None:
        return _lanes(params, **rows, **same, model=model, measured=measure, **static)

    def one(params: Any, asked: Array | None, **args: Any) -> tuple:
        asked = jnp.zeros((len(args["tokens"]), 0), jnp.int32) if asked is None else asked
        return _lanes(params, asked=asked, **args, model=plan.part(model), measured=measured, **static)

    def measured(cache: Cache) -> Stats:
        return dataclasses.replace(measure(cache), resident_bytes=total_bytes(cache, model, plan))

    rows = rows | {"asked": rows["asked"] if rows["asked"].shape[1] else None}
    args = {name: (plan.row, x) for name, x in rows.items()} | {name: (SAME, x) for name, x in same.items()}
    return spread(plan, one, params, PartitionSpec(None, *plan.row), **args)


def _lanes(
    params: Any,
    tokens: Array,
    length: Array,
    asked: Array,
    ask_length: Array | None,
    eos: Array,
    stacked: Method,
    *,
    model: Model,
    measured: Callable[[Cache], Stats],
    lanes: int,
    max_new_tokens: int,
    chunk_size: int,
    kv_dtype: str | None,
) -> tuple[Array, Array, Array, Stats]:
    """Return tokens int32 [lanes, B, N], token counts and bad steps int32 [lanes, B], and the statistics of each lane."""

    def read(method: Method, lane: Array) -> Decoded:
        cache = run_prefill(
            params,
            tokens,
            length,
            method,
            model=model,
            chunk_size=chunk_size,
            max_new_tokens=max_new_tokens + asked.shape[1],
            kv_dtype=kv_dtype,
        )
        if asked.shape[1] and ask_length is not None:
            cache = run_extend(params, cache, asked, ask_length)
        return start_decode(cache, None, lane < 0, max_new_tokens)

    # The second argument gives the number of lanes, also to a method without leaves (Full).
    start = jax.vmap(read)(stacked, jnp.zeros((lanes, tokens.shape[0]), jnp.int32))
    once, counts = functools.partial(decode_once, Call(params, Sampler(), eos)), True
    if drafts_tokens(start.cache):  # a lane that has run all its steps may end before the others
        limits = jnp.full(length.shape, max_new_tokens, jnp.int32)
        once, counts = functools.partial(advance, Call(params, Sampler(), eos, limits)), False
    # The loop is outside of `vmap`: inside, every step would copy the caches of the finished lanes.
    end = lax.while_loop(
        lambda now: ~all_done(now) & ((now.step < max_new_tokens).all() if counts else True), jax.vmap(once), start
    )
    return end.tokens, end.num_tokens, end.bad_step, jax.vmap(measured)(end.cache)
