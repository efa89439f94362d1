"""Patterns of prompts, in float64 loops: which keys each query of a prompt attends to."""

import numpy as np

from tests.oracles import adaptive_prompt
from tests.oracles.plain import attend, best, softmax


def seen_keys(q, k, pattern, window, num_sink, num_recent, block, chunk, stride):
    """The keys of each query of one head: a list of sets, for rotated q and k [T, D] of a whole prompt.

    Args:
        q: the head's queries.
        k: the keys.
        pattern: (kind, columns, diagonals, blocks, share, tau, min_budget, factor), as `kvjax.wrappers.Pattern`.
        window: last queries of a chunk, which vote.
        num_sink: first keys that are columns for certain.
        num_recent: shortest distances that are diagonals for certain.
        block: tokens of a block.
        chunk: tokens read at once.
        stride: tokens of an antidiagonal's piece.
    """
    kind, num_columns, num_diagonals, num_blocks, share, tau, min_budget, factor = pattern
    if kind == "xattention":
        blocks = adaptive_prompt.xattention_blocks(q, k, share, block, stride)
        return [{i for i in range(t + 1) if i // block in blocks[t // block]} for t in range(len(q))]
    seen = []
    for start in range(0, len(q), chunk):
        stop = min(start + chunk, len(q))
        if kind == "block_sparse":
            seen += [_of_blocks(q[:stop], k, t, num_blocks, block, start) for t in range(start, stop)]
            continue
        if kind == "blasst":
            blocks = adaptive_prompt.blasst_blocks(q[:stop], k[:stop], max(0.0, np.log(stop / factor)), start)
            seen += [{i for i in range(t + 1) if i // 192 in blocks[(t - start) // 64]} for t in range(start, stop)]
            continue
        if kind == "flexprefill" and adaptive_prompt.estimate_error(q[:stop], k, window, block, start) < tau:
            blocks = adaptive_prompt.flexprefill_blocks(q[:stop], k, share, -(-min_budget // block), block, start)
            seen += [{i for i in range(t + 1) if i // block in blocks[t // block]} for t in range(start, stop)]
            continue
        if kind == "a_shape":
            columns, diagonals = set(range(num_columns)), set(range(num_diagonals))
        else:
            columns, diagonals = _voted(q, k, start, stop, pattern, window, num_sink, num_recent)
        seen += [_of_lists(t, columns, diagonals, block) for t in range(start, stop)]
    return seen


def _voted(q, k, start, stop, pattern, window, num_sink, num_recent):
    """Columns and diagonals by the attention of the last queries before ``stop``."""
    chosen = []
    for votes, certain, most in zip(_votes(q, k, start, stop, window), (num_sink, num_recent), pattern[1:3], strict=True):
        first = set(range(min(certain, stop)))
        number = pattern[6] if pattern[0] == "flexprefill" else most
        found = best({**votes, **dict.fromkeys(first, np.inf)}, max(number, certain))
        if pattern[0] == "flexprefill":
            found |= adaptive_prompt.fewest(votes, first, pattern[4])
        chosen.append(found)
    return chosen


def _votes(q, k, start, stop, window):
    """The attention of the last queries before ``stop``, by key and by distance: two dicts."""
    by_key, by_distance = dict.fromkeys(range(stop), 0.0), dict.fromkeys(range(stop), 0.0)
    for t in range(max(start, stop - window), stop):
        weight = softmax([float(q[t] @ k[i]) / np.sqrt(q.shape[1]) for i in range(t + 1)])
        for i, share in enumerate(weight):
            by_key[i] += share
            by_distance[t - i] += share
    return by_key, by_distance


def _of_lists(t, columns, diagonals, block):
    """What query t sees: columns before its block, its block, and blocks through which a diagonal passes."""
    mine = t // block
    passed = {(query - d) // block for query in range(mine * block, (mine + 1) * block) for d in diagonals} | {mine}
    return {i for i in range(t + 1) if i // block in passed or (i in columns and i // block < mine)}


def _of_blocks(q, k, t, count, block, start):
    """What query t sees: its block, and the blocks whose mean key is best for the mean query of its block."""
    mine = t // block
    begin = max(mine * block, start)
    query = np.mean(q[begin : (mine + 1) * block], axis=0)
    score = {j: float(query @ np.mean(k[j * block : (j + 1) * block], axis=0)) for j in range(mine)}
    return {i for i in range(t + 1) if i // block in best({**score, mine: np.inf}, count)}


def prompt(q, k, v, heads, **rules):
    """Output [H, G, T, D] of a whole prompt: rotated q [H, G, T, D], k, v [H, T, D]; ``heads`` has a pattern for each."""
    out, patterns = np.zeros(q.shape), list(heads) * (q.shape[0] * q.shape[1] // len(heads))
    for h, g in np.ndindex(*q.shape[:2]):
        seen = seen_keys(q[h, g], k[h], patterns[h * q.shape[1] + g], **rules)
        for t, keys in enumerate(seen):
            at = sorted(keys)
            out[h, g, t], _ = attend(q[h, g, t], [k[h, i] for i in at], [v[h, i] for i in at])
    return out
