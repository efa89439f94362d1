"""Lists and caches whose first half is hidden: kernels agree with plain JAX, whatever stands in the hidden entries."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.choose.pariskv.rerank import Regions
from pallas_kernels.formats.quantised import quantise
from pallas_kernels.formats.shapes import full, normal
from pallas_kernels.host import Rows
from tests.pallas_kernels.cases import MOSAIC, NEEDS_GPU, ON_GPU, ON_HOPPER, alike
from tests.pallas_kernels.operations import named, sized, table
from tests.pallas_kernels.test_bodies import operation

N = 4096 if ON_GPU else 64  # slots, of which half are hidden: more than most kernels read at once
LONG = 16 * N if ON_GPU else N  # more than any does


def first_half(x, value, axis=2):
    """Hide the first half of an array: it gets ``value``, or, if that is None, numbers get NaN and codes stay."""
    if value is None and not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    inside = (slice(None),) * axis + (slice(x.shape[axis] // 2),)
    return x.at[inside].set(jnp.nan if value is None else value)


def hide(value, axis=2):
    return lambda tree: jax.tree.map(lambda x: first_half(x, value, axis), tree)


def copied(d):
    """The rows of an offloaded cache, whose copies on the device are of 16 slots."""
    return Rows(host=normal(f"B H S {2 * d.D}")(d), newest=full("B", "S")(d), sinks=4)


def codes(d):
    return quantise(normal("B H S D")(d), "int8")


ANY = hide(None)
LISTED = {"mask": hide(False), "slots": hide(-1)}
HELD = {"position": hide(-1), "key": ANY, "value": ANY}
SCORED = {"position": hide(-1), "key": ANY}
SEEN = {"key_position": hide(-1), "key": ANY}
COPIES = {"key": normal("B H 16 D"), "value": normal("B H 16 D"), "rows": copied}
CODED = {"kind": "int8", "dtype": "bfloat16"}  # the dtype of the kernels of codes
LIST = {"S": 2 * N, "L": N}
FULL = {"S": N, "cursor": full("B", "S"), "budget": full("", lambda n: n.S - 1)}
CASES = [
    ("gather_attention", LIST, LISTED),
    ("kth_select", {"S": LONG, "K": 16}, {"score": hide(-jnp.inf)}),
    ("token_list", {"B": 2, "S": N, "K": 32}, {"awake": hide(-1, 0)}),
    ("bucket_score", {"S": N, "L": 6, "P": 3}, {"position": hide(-1), "norm": ANY}),
    ("cluster_estimate", {"S": N}, {"chosen": hide(False), "value_sum": ANY, "logits": hide(None, 3)}),
    ("cluster_rank", {"S": N}, {"size": hide(0), "centroid": ANY}),
    ("cluster_tokens", {"S": N, "K": 32}, {"ends": hide(0)}),
    ("code_select", {"S": N, "C": 8, "first": N // 2, "K": N // 8}, {}),
    (
        "choice",
        {"S": N, "first": N // 2, "N": N // 4, "stop": full("B", 3 * N // 4), "dtype": "bfloat16"}
        | {"regions": Regions(sinks=16, best=8, tail=8, size=32)},
        {"position": hide(-1), "rows": hide(255)},  # weights that are NaN
    ),
    ("column_mass", {"S": N}, SEEN),
    ("compact", {"S": LONG, "K": 16}, {"mask": hide(False)}),
    ("dense_decode", {"S": N}, HELD),
    ("dense_decode", {"S": N, "T": 4}, HELD),
    ("dense_decode", {"S": N} | CODED, HELD),
    ("dissimilarity", {"S": N}, SCORED),
    ("encode", {"S": N}, {"valid": hide(False), "key": ANY}),
    ("evict_alike", FULL, HELD),
    ("evict_token", FULL, HELD),
    ("evict_token", FULL | {"key": codes, "value": codes}, HELD),
    ("gather_attention", LIST | {"P": 16}, LISTED),
    ("gather_attention", LIST | {"P": 16, "F": 1}, HELD),
    ("gather_attention", LIST | CODED, LISTED),
    ("gather_attention", LIST | {"F": 1, "rotate": True}, LISTED),
    ("gather_attention", LIST | COPIES, LISTED),
    ("low_rank_attention", LIST | {"R": 16}, {"mask": hide(False), "pages": hide(-1)}),
    ("match_select", {"S": N, "L": 20}, {"ids": hide(200, 3)}),
    ("merge_splits", {"N": 32}, {"lse": hide(-jnp.inf, 1), "out": hide(None, 1)}),
    ("newest_repeat", {"S": N}, {"valid": hide(False), "key": ANY}),
    ("page_logits", {"N": N, "held": full("B H N", True, bool)}, {"held": hide(False), "vector": ANY}),
    ("page_score", {"N": N}, {"low": ANY, "high": ANY}),
    ("partial_score", {"S": LONG, "C": 4}, {"position": hide(-1), "key": hide(None, 3)}),
    ("partial_select", {"S": LONG, "C": 4, "K": 16}, {"position": hide(-1), "key": hide(None, 3)}),
    ("sampled_bias", {"S": N, "K": N // 2}, {"own": hide(False, 3)}),
    ("sentence_cut", {"S": N}, {"sentence": hide(-1), "position": hide(-1)}),
    ("sentence_cut", {"S": N}, {"score": ANY}),
    ("token_vote", {"S": N, "start": N // 2}, {}),
    ("vector_score", {"S": N}, {"position": hide(-1), "vector": ANY}),
    ("window_score", {"S": N, "W": 8}, SEEN),
]
QUICK = 1  # of the cases above, interpreted by default; the others by CI


def bodies():
    for index, (name, sizes, hidden) in enumerate(CASES):
        for body, marks in (
            ("interpreted", pytest.mark.slow if index >= QUICK and not ON_GPU else ()),
            ("pallas_triton", NEEDS_GPU),
            (MOSAIC, (NEEDS_GPU, ON_HOPPER)),
        ):
            if body == MOSAIC and MOSAIC not in table(name).implementations:
                continue
            yield pytest.param(name, body, sizes, hidden, marks=marks, id=f"{name} {named(sizes)}"[:60] + f" {body}")


@pytest.mark.parametrize(("name", "body", "sizes", "hidden"), [*bodies()])
def test_what_is_hidden_in_front_never_enters(name, body, sizes, hidden):
    shape = sized(name, **{"dtype": "float32", "D": 128 if ON_GPU else 32, **sizes})
    arrays = shape.draw(jax.random.key(0))
    arrays |= {at: change(arrays[at]) for at, change in hidden.items()}
    got, want = (jax.jit(operation(name, "pallas_triton", way, shape))(arrays) for way in (body, "xla"))
    tolerance = 1e-3 if shape.sizes.dtype == "float32" else 0.02
    alike(got, want, rtol=tolerance, atol=tolerance)
