"""Small arguments of the operations that have no timed shapes, declared as the timed shapes are."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.choose.pqcache.code_select import code_bits
from pallas_kernels.choose.sentencekv.sentence_cut import CLOSES
from pallas_kernels.formats import bit_codes
from pallas_kernels.formats.shapes import Timed, counted, frequencies, full, integers, lists, normal, orthogonal, packed
from pallas_kernels.numerics import merge_partials

# N: parts; P: pages, blocks or vectors; K: entries of a list; M: parts of the channels; C: centroids of a part, or channels.
SIZES = {"H": 2, "S": 16, "D": 32, "T": 3, "N": 33, "P": 4, "K": 5, "M": 2, "C": 4, "R": 8, "E": lambda n: n.D // n.M}
CACHE = {"key": normal("B H S D"), "value": normal("B H S D")}
STORED = CACHE | {"position": counted("B H S"), "cursor": full("B", "S")}
NEWEST = full("B", lambda n: n.S - 1)
ACTIVE = {"active": full("B 1", lambda n: n.S - 1), "cursor": full("B", "S")}
HEADS = normal("B H G D")


def members(result, sizes):
    """Return the members of a result that is no pytree by name, and any other result as it is."""
    return vars(result) if dataclasses.is_dataclass(result) else result


def declared(arrays, **options):
    """Declare arrays and options of an operation."""
    about = {"label": "small", "reads": (), "chained": None, "float32": False, "defined": members}
    return Timed(sizes=SIZES, tiny={}, arrays=arrays, options=lambda n: options, **about)


def sentence_state(d):
    """The state of `sentence_add`: sentence of each slot, mean keys, their number, and sums over the open sentence."""
    sums = normal("B H G D", jnp.float32), normal("B H D", jnp.float32), full("B H", 2)
    return tuple(fill(d) for fill in (full("B H S", 0), normal("B H P D"), full("B H", 1), *sums))


SHAPES = {
    "estimates": declared(
        {"query": normal("B H D", jnp.float32), "slots": lists("B H K", "S"), "count": full("B H", "K")}
        | {"rows": full("B H S D", 0, jnp.uint8)},
        scale=0.1,
    ),
    "kth_select_mask": declared(
        {"score": normal("B H G S", jnp.float32), "lse": normal("B H N G", jnp.float32)}, budget=250, capacity=256
    ),
    "add_norm": declared({"x": normal("T D"), "update": normal("T D"), "scale": normal("D")}, eps=1e-5),
    "bucket_matches": declared(
        {"query": integers("B H G P", 8, jnp.uint16), "ids": integers("B H P S", 8, jnp.uint16), "near": NEWEST},
        first=1,
        num_bits=3,
    ),
    "causal_attention": declared({"query": normal("B H G S D"), **CACHE}),
    "chunk_query": declared(
        {"query": normal("B H G T D"), "real": full("B", 2), "first": full("B", 5), "inv_freq": frequencies}, num_local=8
    ),
    "cluster_estimate": dataclasses.replace(
        declared(
            {"logits": normal("B H G S", jnp.float32), "chosen": full("B H S", True, bool)}
            | {"left_out": lambda d: counted("B H S")(d) < 3, "size": full("B H S", 3), "value_sum": normal("B H S D")}
        ),
        defined=lambda result, n: merge_partials(*(jnp.moveaxis(x, 2, 0) for x in result)),  # in any number of parts
    ),
    "cluster_rank": declared(
        {"query": HEADS, "centroid": normal("B H S D"), "size": full("B H S", 2), "used": full("B", "S")}
        | {"best": full("", 0.3, jnp.float32), "considered": full("", 0.6, jnp.float32)},
        scale=0.1,
        capacity=8,
        room=12,
    ),
    "cluster_tokens": declared(
        {"listed": lists("B H K", "S"), "ends": lambda d: 2 * counted("B H K")(d), "start": counted("B H S")}
        | {"order": counted("B H S"), "near": NEWEST, "count": full("B", "S")},
        first=2,
        most=9,
        newest=3,
    ),
    "evict_alike": declared(
        STORED | {"total": full("B H 2 D", 0), "done": full("B", 0), "newest": NEWEST, "budget": full("", 15)}
    ),
    "evict_token": declared(STORED | {"score": normal("B H S", jnp.float32), "budget": full("", 15)}),
    "newest_repeat": declared({"key": normal("B H S D"), "valid": full("B H S", True, bool)}, threshold=0.5),
    "pack_token": declared(
        CACHE
        | {"stored": counted("B H S"), "place": NEWEST, "packed": full("B", 0), "last": full("B", 0)}
        | {"basis_key": orthogonal("B H 1 D D"), "basis_value": orthogonal("B H 1 D D")}
        | {"store": lambda d: sum((packed(axes, "R")(d) for axes in ("B H S", "B H S", "B H P")), ())},
        granule=4,
    ),
    "rotated_rows": declared(CACHE | {"token": counted("B K"), "inv_freq": frequencies}),
    "sentence_add": declared(
        {"key": normal("B H S D"), "query": HEADS, "cursor": full("B", "S"), "event": full("B", CLOSES)}
        | {"state": sentence_state}
    ),
    "step_query": declared(
        {"query": HEADS, "last": normal("B H G D", jnp.float32), "ready": full("B", True, bool), "hits": full("B", 0)}
        | {"refreshes": full("B", 0), "cursor": full("B", "S"), "position": NEWEST, "budget": full("", 4)}
        | {"theta": full("", 0.9, jnp.float32), "inv_freq": frequencies},
        num_sink=2,
        num_local=4,
    ),
    "store_buckets": declared(
        CACHE
        | ACTIVE
        | {"planes": normal("3 4 D", jnp.float32), "ids": full("B H 1 48", 0, jnp.uint8)}
        | {"norm": normal("B H S")}
    ),
    "store_codes": declared(
        {"key": normal("B H S D"), "position": counted("B H S"), **ACTIVE, "signs": full("D", 1, jnp.float32)}
        | {"ids": full("B H S P", 0, jnp.uint8), "code_rows": full("B H S D", 0, jnp.uint8)}
        | {"counts": full("B H P 256", 0), "waiting": full("B H P 256", 0), "stop": full("B", 8)},
        num_local=4,
        buffer=3,
        scale=0.1,
    ),
    "store_ids": declared(
        {"key": normal("B H S D"), **ACTIVE, "centroids": normal("B H M C E", jnp.float32)}
        | {"ids": lambda d: bit_codes.pack(full("B H S", 0)(d), code_bits(d.M, d.C))}
    ),
    "store_partial": declared(
        {"key": normal("B H S D"), "position": counted("B H S"), "cursor": full("B", "S"), "place": NEWEST}
        | {"matrix": normal("B H D C", jnp.float32), "query": HEADS, "partial": normal("B H C S"), "last": HEADS}
    ),
    "store_token": declared(
        {"key": normal("B H D"), "value": normal("B H D"), "place": NEWEST, "cursor": NEWEST, "query": HEADS}
        | {"cache_key": normal("B H S D"), "cache_value": normal("B H S D"), "cache_position": counted("B H S")}
        | {"inv_freq": frequencies}
    ),
    "token_list": declared(
        {"fresh": lists("B K", "S"), "length": full("B", "S"), "awake": full("B", 0), "budget": full("", 4)},
        num_sink=2,
        num_local=4,
    ),
    "widen_page": declared(
        {"key": normal("B H S D"), "position": counted("B H S"), "cursor": full("B", "S")}
        | {"low": normal("B H P D"), "high": normal("B H P D")},
        page_size=4,
    ),
}
