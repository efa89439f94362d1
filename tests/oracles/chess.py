"""CHESS: pages described by mean keys of all layers and KV heads; one page list for the whole model.

Unlike other oracles, this oracle needs the whole model. So ``run`` takes q [L, H, G, T, D], k and v [L, H, T, D] and the
logits [T, V] that follow each token, and its result is a `Trace` of its own.
"""

import dataclasses
import math

import numpy as np

from tests.oracles.plain import attend_to, best, rotate_all

KNOBS = {
    "ratios": (0.6, 0.5, 0.4),
    "page_size": 4,
    "pages_per_chunk": 2,
    "chunks_per_grid": 2,
    "num_sink_pages": 1,
    "window": 2,
    "trigger": "fixed",
    "interval": 2,
}
LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 20, 23, 32, 33, 47)
PRESETS = {"conservative": (0.9, 0.9, 0.9), "moderate": (0.8, 0.7, 0.7), "aggressive": (0.5, 0.2, 0.1)}
PRINTED = {"page_vec_rope": "post", "centred": False, "candidates": "all", "anchor_pages": None}


@dataclasses.dataclass
class Trace:
    """What CHESS did to one row, per decode step, and its vectors at the end."""

    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)  # [L, H, G, D]
    pages_attended: list[set[int]] = dataclasses.field(default_factory=list)  # the open page included
    attended: list[set[int]] = dataclasses.field(default_factory=list)  # token positions
    reconstructed: list[int] = dataclasses.field(default_factory=list)  # steps, the prompt's end not among them
    statistics: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # mean and variance of H, per page
    active: set[int] = dataclasses.field(default_factory=set)  # page list after the last step
    pages: list[np.ndarray] = dataclasses.field(default_factory=list)  # [H * L * D] of each complete page
    chunks: list[np.ndarray] = dataclasses.field(default_factory=list)
    grids: list[np.ndarray] = dataclasses.field(default_factory=list)


def page_vector(k, first, last):
    """Mean of keys ``first`` to ``last`` - 1 of every head and layer of k [L, H, T, D], concatenated."""
    parts = []
    for head in range(k.shape[1]):
        for layer in range(k.shape[0]):
            mean = np.zeros(k.shape[3])
            for token in range(first, last):
                mean += k[layer, head, token]
            parts.append(mean / (last - first))
    return np.concatenate(parts)


def means(vectors, size):
    """Mean of every ``size`` consecutive vectors; the last group has the members present."""
    return [sum(vectors[i : i + size]) / len(vectors[i : i + size]) for i in range(0, len(vectors), size)]


def share(ratio, count):
    """How many of ``count`` candidates a ratio keeps; the small number keeps 0.1 * 10 at 1."""
    return max(1, math.ceil(ratio * count - 1e-6))


def cascade(score_grids, score_chunks, score_pages, ratios, pages_per_chunk, chunks_per_grid, candidates=None):
    """Pages that survive: the best grids, the best chunks of these, the best pages of those; None: all are candidates."""
    rho_grid, rho_chunk, rho_page = ratios
    candidates = set(range(len(score_pages))) if candidates is None else candidates
    chunks_with = {p // pages_per_chunk for p in candidates}
    grids_with = {c // chunks_per_grid for c in chunks_with}
    grids = {g: score_grids[g] for g in grids_with}
    grids = best(grids, share(rho_grid, len(grids)))
    chunks = {c: score_chunks[c] for c in chunks_with if c // chunks_per_grid in grids}
    chunks = best(chunks, share(rho_chunk, len(chunks)))
    pages = {p: score_pages[p] for p in candidates if p // pages_per_chunk in chunks}
    return best(pages, share(rho_page, len(pages)))


def select(
    k,
    length,
    ratios,
    page_size,
    pages_per_chunk,
    chunks_per_grid,
    num_sink_pages,
    window,
    anchor_pages=2,
    centred=True,
    hierarchy=True,
    candidates="history",
):
    """Complete pages of the first ``length`` tokens that a reconstruction makes active."""
    complete, total = length // page_size, -(-length // page_size)
    if complete < 2 or total <= num_sink_pages + window + 1:
        return set(range(complete))
    # An incomplete newest page speaks for the anchor, but cannot be selected.
    everything = [page_vector(k, p * page_size, min((p + 1) * page_size, length)) for p in range(total)]
    newest = everything[max(total - (window if anchor_pages is None else anchor_pages), 0) :]
    anchor = sum(newest) / len(newest)
    pages = everything[:complete]
    if centred:
        anchor = anchor - sum(pages) / len(pages)
    always = set(range(num_sink_pages)) | set(range(total - window, total))
    ranked = set(range(complete)) - (always if candidates == "history" else set())
    by_page = [float(anchor @ vector) for vector in pages]
    if hierarchy:
        chunks = means(pages, pages_per_chunk)
        grids = means(chunks, chunks_per_grid)
        by_grid, by_chunk = ([float(anchor @ vector) for vector in level] for level in (grids, chunks))
        chosen = cascade(by_grid, by_chunk, by_page, ratios, pages_per_chunk, chunks_per_grid, ranked)
    else:
        chosen = best({p: by_page[p] for p in ranked}, share(math.prod(ratios), len(ranked)))
    chosen |= always
    return {p for p in chosen if p < complete}


def entropy(logits):
    """Entropy of softmax(logits) in nats."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max()
    weight = np.exp(shifted)
    probability = weight / weight.sum()
    return float(-np.sum(probability * (shifted - math.log(weight.sum()))))


def run(
    q,
    k,
    v,
    logits,
    prompt,
    inv_freq,
    ratios=PRESETS["aggressive"],
    page_size=32,
    pages_per_chunk=8,
    chunks_per_grid=8,
    num_sink_pages=1,
    window=8,
    trigger="and",
    interval=6,
    tau_entropy=None,
    tau_varentropy=None,
    page_vec_rope="pre",
    anchor_pages=2,
    centred=True,
    hierarchy=True,
    candidates="history",
):
    """See the module's docstring; tokens from ``prompt`` on are decoded one by one."""
    ratios = PRESETS[ratios] if isinstance(ratios, str) else ratios
    described = np.asarray(k, np.float64)
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    described = k if page_vec_rope == "post" else described
    tree = (ratios, page_size, pages_per_chunk, chunks_per_grid, num_sink_pages, window)
    tree = (*tree, anchor_pages, centred, hierarchy, candidates)
    layers, heads, total = k.shape[:3]
    trace = Trace()
    active = select(described, prompt, *tree)
    entropies: list[float] = []
    since = 0  # pages completed since the last reconstruction
    for t in range(prompt, total):
        page = t // page_size
        pages = active | {page}
        positions = [i for i in range(t + 1) if i // page_size in pages]
        trace.outputs.append(np.stack([attend_to(q[i], k[i], v[i], t, [positions] * heads) for i in range(layers)]))
        trace.pages_attended.append(pages)
        trace.attended.append(set(positions))
        entropies.append(entropy(logits[t]))
        if (t + 1) % page_size:
            continue
        mean = sum(entropies) / len(entropies)
        variance = sum((h - mean) ** 2 for h in entropies) / len(entropies)
        trace.statistics.append((mean, variance))
        entropies, since = [], since + 1
        if trigger == "fixed":
            fires = since >= interval
        elif trigger == "never":
            fires = False
        else:
            signs = (mean > tau_entropy, variance > tau_varentropy)
            fires = all(signs) if trigger == "and" else any(signs)
        if fires:
            active, since = select(described, t + 1, *tree), 0
            trace.reconstructed.append(t - prompt)
        else:
            active = active | {page}
    trace.active = active
    trace.pages = [page_vector(described, p, p + page_size) for p in range(0, total + 1 - page_size, page_size)]
    if hierarchy:
        trace.chunks = means(trace.pages, pages_per_chunk)
        trace.grids = means(trace.chunks, chunks_per_grid)
    return trace
