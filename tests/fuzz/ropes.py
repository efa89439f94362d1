"""Rules of RoPE at their borders: frequencies as in float64 loops, and texts that grow up to a border and across it."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import kvjax
from kvjax import rope
from kvjax.decoding.checks import check_border
from kvjax.methods import Full, StreamingLLM
from kvjax.protocol.typing import Rope
from kvjax.testing.model import TinyModel
from models import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from tests.fuzz.verdicts import judge
from tests.oracles import rope as plain

_ROWS, _TOKENS, _LONGEST, _MORE = 4, 5, 24, 8
_TOLERANCE = 1e-4
_CROSSES = ("original_max_position_embeddings",)
_factors = functools.partial(st.lists, st.floats(1, 9))


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Check frequencies, refusals, or a text that grows under a tiny model, whose programs few rules share."""
    data.draw(st.sampled_from((_frequencies, _refusals, _growth)))(data.draw)
    yield


def _rule(draw: Any, dim: int) -> tuple[dict[str, Any], Any]:
    """A rule as an oracle takes it, and as a model has it; of a base of its own."""
    kind = draw(st.sampled_from(("linear", "dynamic", "yarn", "longrope")))
    rule: dict[str, Any] = {"factor": draw(st.floats(1, 40))}
    if kind != "linear":
        rule["original_max_position_embeddings"] = draw(st.integers(2, 5000))
    if kind == "yarn":
        slow = draw(st.floats(0.5, 4))
        rule |= {"beta_slow": slow, "beta_fast": slow * draw(st.floats(1, 40)), "truncate": draw(st.booleans())}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            rule[name] = draw(st.none() | st.floats(0.5, 2))
    if kind == "longrope":
        rule |= {f"{name}_factor": tuple(draw(_factors(min_size=dim // 2, max_size=dim // 2))) for name in ("short", "long")}
        rule["attention_factor"] = draw(st.none() | st.floats(0.5, 2))
    cls: dict[str, Any] = {
        "linear": LinearScaling, "dynamic": DynamicScaling, "yarn": YarnScaling, "longrope": LongRopeScaling,
    }  # fmt: skip
    return {"rope_type": kind, **rule}, cls[kind](**rule)


def _frequencies(draw: Any) -> None:
    """Queries and keys are turned as the oracle says, in rows below, at and beyond the border of a rule."""
    dim, theta = draw(st.sampled_from((4, 16))), draw(st.sampled_from((1e2, 1e4, 5e5)))
    named, rule = _rule(draw, dim)
    old = named.get("original_max_position_embeddings", 64)
    length = np.array([draw(st.integers(1, old)), old, old + 1, draw(st.integers(old + 1, 4 * old))], np.int32)
    position = np.stack([draw(st.lists(st.integers(0, n - 1), min_size=_TOKENS, max_size=_TOKENS)) for n in length.tolist()])
    one = np.zeros((_ROWS, 1, _TOKENS, dim), np.float32)
    one[..., : dim // 2] = 1

    def turned() -> np.ndarray:
        key, at = jnp.asarray(one), jnp.asarray(position, jnp.int32)
        query, key = rope.prepare(key[:, :, None], key, at, jnp.asarray(length), Rope(theta, rule))
        np.testing.assert_array_equal(query[:, :, 0], key)
        out = np.asarray(rope.rotate(key, at[:, None], rope.inverse_frequencies(dim, theta, rule)), np.float64)[:, 0]
        return out[..., : dim // 2] + 1j * out[..., dim // 2 :]

    def right(got: np.ndarray) -> str | None:
        for row, n in enumerate(length.tolist()):
            angle = position[row][:, None] * plain.frequencies(named, dim, theta, n)
            want = plain.attention_factor(named) * np.exp(1j * angle)
            # Angles in float32 are exact to about 1e-7 of themselves.
            worst = np.abs(got[row] - want).max()
            if worst > 5e-6 + 1e-6 * position[row].max():
                return f"off by {worst:.1e} in a text of {n} tokens"
        return None

    judge(f"{named} of base {theta:g}, {dim} channels, lengths {length.tolist()}", turned, right=right)


def _refusals(draw: Any) -> None:
    """Rows are refused just where one of them crosses a border at which stored keys would have to be turned."""
    named, rule = _rule(draw, 8)
    border = named.get("original_max_position_embeddings", 64)
    rows = draw(st.integers(1, 4))
    length = np.array([max(border + draw(st.integers(-4, 2)), 1) for _ in range(rows)], np.int32)
    more = np.array([draw(st.integers(0, 5)) for _ in range(rows)], np.int32)
    renumbers = draw(st.booleans())
    model = TinyModel(head_dim=8, max_position_embeddings=1 << 20, rope_scaling=rule)
    crosses = any(n <= border < n + wanted for n, wanted in zip(length.tolist(), more.tolist(), strict=True))
    changes = named["rope_type"] == "longrope" and named["short_factor"] != named["long_factor"]
    refused = crosses and changes and not renumbers
    method: Any = StreamingLLM(budget=64) if renumbers else Full()
    judge(
        f"{named}: {length.tolist()} tokens and {more.tolist()} more under {type(method).__name__}",
        lambda: check_border(model, method, length, more),
        right=None if refused else lambda _: None,
        named=_CROSSES if refused else (),
    )


_RULES = {  # few, because each is compiled
    **{f"{name}{old}": rule for old in (8, 16) for name, rule in {
        "llama3": RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=old),
        "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=old),
        "dynamic": DynamicScaling(factor=2.0, original_max_position_embeddings=old),
        "longrope": LongRopeScaling(
            short_factor=(1.0,) * 4, long_factor=(2.0, 3.0, 4.0, 5.0), factor=4.0, original_max_position_embeddings=old
        ),
    }.items()},
    "none": None, "linear": LinearScaling(factor=4.0),
}  # fmt: skip


@functools.cache
def _model(name: str) -> tuple[TinyModel, Any]:
    model = TinyModel(num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, rope_scaling=_RULES[name])
    return model, model.random_params(0)


def _growth(draw: Any) -> None:
    """A text that grows has the logits of the text read at once, on one side of a border; across longrope's it is refused.

    Under dynamic NTK a stored key stays as it was turned, as in transformers, so that beyond the border logits differ.
    """
    name, how = draw(st.sampled_from([*_RULES])), draw(st.sampled_from((_extended, _stepped, _generated)))
    model, params = _model(name)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    text = rng.integers(0, model.vocab_size, (2, _LONGEST + _MORE)).astype(np.int32)
    length = np.array([draw(st.integers(1, _LONGEST)) for _ in text])
    more = np.array([draw(st.integers(0, _MORE)) for _ in text])
    border = getattr(_RULES[name], "original_max_position_embeddings", 0)
    crosses = any(n <= border < n + wanted for n, wanted in zip(length.tolist(), more.tolist(), strict=True))
    refused, apart = crosses and name.startswith("longrope"), name.startswith("dynamic") and (length + more > border).any()

    def read(length: np.ndarray, tokens: np.ndarray) -> kvjax.Cache:
        return kvjax.prefill(params, tokens, lengths=length, config=model, max_new_tokens=2 * _MORE, pad_multiple=1)

    def right(grown: tuple[kvjax.Cache, np.ndarray]) -> str | None:
        cache, tokens = grown
        want = np.asarray(read(length + more, tokens).logits)
        off = np.abs(np.asarray(cache.logits) - want).max() / np.abs(want).max()
        return None if off < (np.inf if apart else _TOLERANCE) else f"logits differ by {off:.1e}"

    judge(
        f"{name}: {length.tolist()} tokens and {more.tolist()} more, {how.__name__[1:]}",
        lambda: how(params, read(length, text), text, length, more),
        right=None if refused else right,
        named=_CROSSES if refused else (),
    )


def _extended(params: Any, cache: Any, text: np.ndarray, length: np.ndarray, more: np.ndarray) -> tuple[Any, np.ndarray]:
    asked = np.stack([row[n : n + _MORE] for row, n in zip(text, length, strict=True)])
    return kvjax.extend(params, cache, asked, lengths=more), text


def _stepped(params: Any, cache: Any, text: np.ndarray, length: np.ndarray, more: np.ndarray) -> tuple[Any, np.ndarray]:
    for step in range(int(more.max())):
        fed = np.stack([row[n + step] for row, n in zip(text, length, strict=True)])
        cache = kvjax.decode_step(params, cache, fed, active=more > step)
    return cache, text


def _generated(params: Any, cache: Any, text: np.ndarray, length: np.ndarray, more: np.ndarray) -> tuple[Any, np.ndarray]:
    out = kvjax.generate(params, cache, max_new_tokens=_MORE, limits=more, eos_token_ids=())
    text = text.copy()
    for row, n, wanted, drawn in zip(text, length, more, np.asarray(out.tokens), strict=True):
        row[n : n + wanted] = drawn[:wanted]
    return out.cache, text
