"""Decode attention over index lists as one Pallas Triton kernel and a merge: no gathered copy of the cache.

Grid (B, H, splits). Each program takes every so many-th block of one list and writes a float32 partial with its log-sum-exp
(FlashDecoding's split-K), and `merge_splits` joins the partials. So a list that is filled only at its front keeps all
programs busy, and a program ends with its last block that has an unmasked entry. The kernel does all work on lists: it
converts page numbers to slots, and reads nothing for masked entries. Keys and values are read row by row, so they may be in
host memory; a row that has a copy on the device is read there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.assembly import kept
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.quantised import check_codes, nibbles, unpacked
from pallas_kernels._triton.rotate import rotated
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import Config, partial_shapes
from pallas_kernels.attend.gather_attention import code_kernel, entries
from pallas_kernels.attend.merge_splits import pallas_triton as merge_kernel
from pallas_kernels.formats.quantised import Quantised, group_of, mixed_problem, vectors
from pallas_kernels.host import copy_row, has_copy, sinks_of
from pallas_kernels.numerics import merge_with, product_precision

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200, whose shared memory holds no more at once
MOST_SPLITS = 64  # every partial adds to the work of the merge


def default_config(lists: int, listed: int, rotating: bool = False) -> Config:
    """Choose a config for B*H ``lists`` of ``listed`` slots: all programs run at once, none idles; more warps to rotate."""
    blocks = pl.cdiv(max(listed, 1), Config.block)
    steps = pl.cdiv(blocks, min(max(PROGRAMS // lists, 1), MOST_SPLITS, blocks))
    return Config(splits=pl.cdiv(blocks, steps), num_warps=8 if rotating else Config.num_warps)


def fitted(config: Config, query: jax.Array) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    group, dim = query.shape[-2:]
    filled, size = pl.next_power_of_2(group), query.dtype.itemsize

    def needed(block):
        # Rows are known one step before they are read, which takes a stage of the pipeline; else as in dense_decode.
        tiles = 2 * (config.num_stages - 2) + 1
        return size * (tiles * block * dim + filled * dim + filled * block)

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _grouped(x):
    """Tell whether keys or values are codes of which each group has a scale."""
    return isinstance(x, Quantised) and x.grouped


def _kernel(*refs, names, structure, scale, block, splits, page_size, sinks, interpret):
    # Operands: a tree of refs in the order of `names`, in the shapes of the public function; keys and values may be codes
    # with scales. Results: out [B*H, N, G, D], lse [B*H, N, G] and, if they are wanted, logits [B, H, G, K].
    refs, (out_ref, lse_ref, *logits_ref) = refs[: structure.num_leaves], refs[structure.num_leaves :]
    ref = dict(zip(names, jax.tree.unflatten(structure, refs), strict=True))
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group, dim = ref["query"].shape[1:]
    # The group is filled up to a power of two by repeating its last head.
    repeated = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    # Rotation pairs channel i with channel i + D/2, so keys are then read as two halves, whose products are added.
    rotating = "place" in ref
    halves = [pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)] if rotating else [pl.ds(0, dim)]
    queries = [ref["query"][b, h, repeated, part] for part in halves]
    inv_freq = ref["inv_freq"][:] if rotating else None
    precision = product_precision(queries[0].dtype)

    def read(name, row, asked, part):
        """Read channels ``part`` of the keys or values at slots ``row`` [block]; codes are cast, and scaled if `_grouped`."""
        numbers = unscaled(name, row, asked, part)
        if not _grouped(ref[name]):
            return numbers
        group = group_of(part.start + jnp.arange(part.size, dtype=jnp.int32), dim)
        scale = entries.load_rows(ref[name].scale, (b, h), row, asked, group).astype(jnp.float32)
        return (numbers.astype(jnp.float32) * scale).astype(numbers.dtype)

    def unscaled(name, row, asked, part):
        near, packed = vectors(ref[name]), isinstance(ref[name], Quantised) and ref[name].packed

        def load(x, row, asked, behind=0):
            if not packed:
                channel = behind + part.start + jnp.arange(part.size, dtype=jnp.int32)
                return entries.load_rows(x, (b, h), row, asked, channel)
            byte, shift = nibbles(part.start, part.size, dim)
            return unpacked(entries.load_rows(x, (b, h), row, asked, behind + byte), shift, jnp.int8)

        if "host" not in ref or near.shape[2] == ref["host"].shape[2]:
            return load(near, row, asked).astype(queries[0].dtype)
        # A row is loaded from the device or from the host.
        at, copied = copy_row(row, sinks, near.shape[2]), has_copy(row, ref["newest"][b], sinks, near.shape[2])
        # On the host a row is the key and the value side by side, or the value alone.
        behind = ref["host"].shape[3] - near.shape[3] if name == "value" else 0
        here = load(near, at, asked & copied)
        away = load(ref["host"], row, asked & ~copied, behind)
        return jnp.where(copied[:, None], here, away).astype(queries[0].dtype)

    def add(step, sums):
        # Keys and values of the block are loaded together, before anything waits for them.
        entry = (step * splits + split) * block + jnp.arange(block, dtype=jnp.int32)
        row, item, asked, listed = entries.listed_rows(ref, b, h, entry, page_size)
        keys = [read("key", row, asked, part) for part in halves]
        values = read("value", row, asked, pl.ds(0, dim))
        if rotating:
            place = entries.of_list(ref["place"], b, h, item).astype(jnp.float32)
            keys = rotated(*keys, place[:, None] * inv_freq[None, :])
        logits = sum(plt.dot(q, k, trans_b=True, precision=precision) for q, k in zip(queries, keys, strict=True)) * scale
        if isinstance(ref["key"], Quantised) and not _grouped(ref["key"]):
            logits = logits * ref["key"].scale[b, h, row].astype(jnp.float32)[None, :]
        if "bias" in ref:
            logits = logits + entries.bias_of(ref["bias"], b, h, repeated, item)
        # This removes the NaN of a hidden key. The NaN of a hidden value must go before it meets its weight of 0. Rows that
        # were not asked for are 0 already. Slots with positions are loaded before it is known which hold a token.
        logits = jnp.where(listed[None, :], logits, -jnp.inf)
        if "position" in ref:
            values = kept(values, listed, interpret)
        online_softmax.store_logits(logits_ref, (b, h), repeated, entry, logits, entry < ref["slots"].shape[2])
        value_scale = None
        if isinstance(ref["value"], Quantised) and not _grouped(ref["value"]):
            value_scale = jnp.where(listed, ref["value"].scale[b, h, row].astype(jnp.float32), 0)
        return online_softmax.add_block(sums, logits, values, precision, value_scale)

    # Logits are written for every block.
    steps = entries.steps(ref, b, h, split, block, splits, page_size, every=bool(logits_ref))
    sums = jax.lax.fori_loop(0, steps, add, online_softmax.nothing(queries[0].shape[0], dim))
    out, lse = online_softmax.result(sums)
    # Repeated query heads write equal values to the same address.
    out_ref[b * heads + h, split, repeated, :] = out.astype(out_ref.dtype)
    lse_ref[b * heads + h, split, repeated] = lse


def gather_attention(
    query, key, value, slots, mask, *, scale, config: Config | None = None, interpret=False, page_size=1, rows=None,
    partials=None, logits=False, **optional,
):  # fmt: skip
    """Attend to the listed slots only; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, dim = query.shape
    lists, listed = batch * heads, slots.shape[2] * page_size
    if not listed or not value.shape[2]:
        nothing = jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
        nothing = nothing if partials is None else merge_with(*nothing, *partials)
        return (*nothing, *([jnp.full((*query.shape[:3], listed), -jnp.inf, jnp.float32)] if logits else []))
    if config is None:
        config = fitted(default_config(lists, listed, optional.get("place") is not None), query)
    turned = None
    if code_kernel.takes(query, key, value, optional.get("place"), rows):
        operands = code_kernel.operands(query, key, value)
        body = functools.partial(code_kernel.kernel, kinds=(key.kind, value.kind))
    else:
        query, key, value, turned = mixed_problem(query, key, value, optional.get("place") is None)
        partials = None if partials is None else (turned(partials[0]), partials[1])
        operands = {"query": query, "key": key, "value": value}
        body = functools.partial(_kernel, sinks=sinks_of(rows))
    operands |= {"slots": slots, "mask": mask}
    operands |= {name: x for name, x in optional.items() if x is not None}
    if rows is not None:
        operands |= {"host": rows.host, "newest": rows.newest}
    leaves, structure = jax.tree.flatten(tuple(operands.values()))
    # One split without partials writes the result itself, and there is no merge.
    whole = config.splits == 1 and partials is None
    out, lse, *products = triton_call(
        functools.partial(
            body,
            names=tuple(operands),
            structure=structure,
            scale=scale,
            block=config.block,
            splits=config.splits,
            page_size=page_size,
            interpret=interpret,
        ),
        grid=(batch, heads, config.splits),
        out_shape=(
            *partial_shapes(lists, config.splits, group, dim, query.dtype if whole else jnp.float32),
            *([jax.ShapeDtypeStruct((*query.shape[:3], listed), jnp.float32)] if logits else []),
        ),
        name="gather_attention",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*leaves)
    if not whole:
        parts = () if partials is None else (x.reshape(lists, *x.shape[2:]) for x in partials)
        out, lse = merge_kernel.merge_splits(out, lse, *parts, dtype=query.dtype, interpret=interpret)
    out = out.reshape(query.shape)
    return out if turned is None else turned(out), lse.reshape(query.shape[:3]), *products


def check(query, key, value, slots, mask, *, place=None, rows=None, **_):
    """Raise ``NotImplementedError`` for dtypes, head dims and groups that the kernel does not take."""
    check_dtypes(query, key, value)
    dim, least = query.shape[-1], 16 if place is None else 32
    check_head_dim(dim, least)
    check_codes(key, value, rows=rows, packed=True)
    if place is not None and isinstance(key, Quantised) and key.mixed:
        raise NotImplementedError(f"got {key.name} codes of keys to rotate, expected codes that are not mixed")
    fitted(Config(), query)
