"""MosaicKV: tokens rotated into a segment's eigenbasis, the r largest coordinates of each kept, blocks chosen per step.

What is stored of a token is written here as the vector it stands for (its kept coordinates rotated back), so that a step
is ordinary attention over such vectors. Eigenvectors are not unique: `run` takes the bases that were really used and
checks that they are eigenvectors of its own moments. Numbers are only compared where the decision is unique.
"""

import dataclasses
import math

import numpy as np

from tests.oracles.plain import Trace, attend, best, dense_prompt, rotate_all

KNOBS = {"channels": 0.25, "fraction": 0.3, "block_size": 4, "segment": 16, "buffer": 8}
LENGTHS = (1, 7, 8, 9, 16, 23, 24, 40)
STATE = {  # [H, Seg, D, D] of one row, rows are unit eigenvectors
    "basis_key": "store.segments.basis_key", "basis_value": "store.segments.basis_value",
}  # fmt: skip

SHARES = (1 / 8, 1 / 4, 3 / 8)  # what a dynamic strategy chooses from
GROUPS = (1, 2, 4)
BLOCKS = (4, 8, 16)
GRANULE = 4


@dataclasses.dataclass
class MosaicTrace(Trace):
    """A trace that also says when output segments were finalised."""

    finalised: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (first, stop) positions
    plans: list[list[tuple[int, int, int]]] = dataclasses.field(default_factory=list)  # [segment][H] (r, ge, b)


@dataclasses.dataclass
class Plan:
    """How one KV head packs one segment."""

    basis_key: np.ndarray  # [D, D]
    basis_value: np.ndarray
    rank: int
    group: int
    block: int


@dataclasses.dataclass
class Segment:
    """Packed positions [first, stop) of one segment; the plans of its heads."""

    first: int
    stop: int
    plans: list[Plan]


def largest(energy, rank, group):
    """Channels of the rank/group best groups of adjacent channels; lower channels win."""
    score = {}
    for first in range(0, len(energy), group):
        score[first] = sum(float(energy[c]) for c in range(first, first + group))
    return sorted(first + i for first in best(score, rank // group) for i in range(group))


def prune(y, rank, group):
    """Rotated vector [D] with everything but the kept coordinates zero."""
    kept = np.zeros(len(y))
    for c in largest(y * y, rank, group):
        kept[c] = y[c]
    return kept


def lost(x, kept):
    """Share of a vector's energy that was not kept; nothing is lost of a zero vector."""
    whole = float(x @ x)
    return 0.0 if whole == 0 else 1 - float(kept @ kept) / whole


def moment(x):
    """Uncentred second moment of tokens [n, D]."""
    total = np.zeros((x.shape[1], x.shape[1]))
    for token in x:
        total += np.outer(token, token)
    return total


def eigenbasis(x):
    """Rows are unit eigenvectors of the tokens' moment, largest eigenvalue first."""
    return np.linalg.eigh(moment(x))[1].T[::-1]


def is_eigenbasis(basis, x):
    """Whether ``basis`` could be the answer of `eigenbasis`, up to float32 arithmetic."""
    dim = len(basis)
    if not np.allclose(basis @ basis.T, np.eye(dim), atol=1e-4, rtol=0):
        return False
    turned = basis @ moment(x) @ basis.T
    values, trace = np.diag(turned), float(np.trace(turned))
    aside = np.abs(turned - np.diag(values)).max()
    return bool(aside <= 1e-3 * trace and (np.diff(values) <= 1e-4 * trace).all())


def bits(rank, group, dim):
    """Bits of a packed vector of 16-bit numbers with its bitmap."""
    return 16 * rank + dim // group


class Row:
    """One row of a batch under MosaicKV: k, v [H, T, D] rotated; ``knobs`` as in `run`."""

    def __init__(self, k, v, prompt, knobs, basis_key=None, basis_value=None):
        self.k, self.v, self.knobs = k, v, knobs
        self.heads, _, self.dim = k.shape
        self.given = None if basis_key is None else [np.asarray(x, np.float64) for x in (basis_key, basis_value)]
        self.dynamic = knobs["strategy"] == "dynamic"
        self.key = [{} for _ in range(self.heads)]  # position -> what the packed key stands for
        self.value = [{} for _ in range(self.heads)]
        self.blocks = [{} for _ in range(self.heads)]  # first position -> (positions, packed mean key)
        self.segments: list[Segment] = []
        self.finalised: list[tuple[int, int]] = []
        packed = prompt - prompt % knobs["buffer"]
        self.buffer = list(range(packed, prompt))
        losses = []
        for first in range(0, packed, knobs["segment"]):
            stop = min(first + knobs["segment"], packed)
            index = len(self.segments)
            self.segments.append(Segment(first, stop, self.make_plans(first, stop, index)))
            losses += self.pack(index, range(first, stop))
        self.num_prompt = len(self.segments)
        self.limit = knobs["lifetime"] * (sum(losses) / len(losses) if losses else 0.0)
        eye = np.eye(self.dim)  # no rotation before any segment was seen
        last = self.segments[-1].plans if losses else [self.static_plan(eye, eye) for _ in range(self.heads)]
        self.segments.append(Segment(packed, packed, last))  # the open output segment
        self.loss = 0.0

    # ---- strategies

    def static_plan(self, basis_key, basis_value):
        knobs = self.knobs
        rank = round(knobs["channels"] * self.dim)
        return Plan(basis_key, basis_value, rank, 1, knobs["block_size"])

    def bases(self, first, stop, index):
        """Key and value bases of every head [(R_k, R_v)] for a segment; ``index`` is the prompt segment's or None."""
        tokens = [(self.k[h, first:stop], self.v[h, first:stop]) for h in range(self.heads)]
        if self.given is None:
            return [(eigenbasis(keys), eigenbasis(values)) for keys, values in tokens]
        # An output segment may lie anywhere behind the prompt's; its own moments say which one it is.
        places = [index] if index is not None else range(self.num_prompt, self.given[0].shape[1])
        for place in places:
            found = [(self.given[0][h, place], self.given[1][h, place]) for h in range(self.heads)]
            if all(is_eigenbasis(r, x) for pair, both in zip(found, tokens) for r, x in zip(pair, both)):
                return found
        raise AssertionError(f"no basis at {list(places)} has eigenvectors of the moments of tokens {first}..{stop - 1}")

    def make_plans(self, first, stop, index=None):
        """Plans of all heads for the segment of packed tokens [first, stop)."""
        plans = []
        for h, (basis_key, basis_value) in enumerate(self.bases(first, stop, index)):
            keys, values = self.k[h, first:stop], self.v[h, first:stop]
            if self.dynamic:
                plans.append(self.search(basis_key, basis_value, keys, values))
            else:
                plans.append(self.static_plan(basis_key, basis_value))
        return plans

    def search(self, basis_key, basis_value, keys, values):
        """The cheapest plan whose mean loss is allowed; the largest block whose variance is."""
        block = BLOCKS[0]
        for size in BLOCKS:
            apart = sum(
                float(((keys[i : i + size] - keys[i : i + size].mean(axis=0)) ** 2).sum()) for i in range(0, len(keys), size)
            )
            if apart <= self.knobs["max_variance"] * float((keys**2).sum()):
                block = size
        options = []
        for share in SHARES:
            for group in GROUPS:
                rank = round(share * self.dim)
                if rank % group == 0 and rank >= group:
                    options.append((bits(rank, group, self.dim), self.dim // group, rank, group))
        for _, _, rank, group in sorted(options):
            plan = Plan(basis_key, basis_value, rank, group, block)
            losses = [self.token_loss(plan, key, value) for key, value in zip(keys, values)]
            if sum(losses) / len(losses) <= self.knobs["max_loss"]:
                return plan
        return Plan(basis_key, basis_value, round(SHARES[-1] * self.dim), 1, block)

    # ---- storage

    def packed(self, plan, key, value):
        """Kept coordinates of one token's key and value, both [D] and rotated."""
        return tuple(
            prune(basis @ x, plan.rank, plan.group) for basis, x in ((plan.basis_key, key), (plan.basis_value, value))
        )

    def token_loss(self, plan, key, value):
        kept_key, kept_value = self.packed(plan, key, value)
        return 0.5 * lost(key, kept_key) + 0.5 * lost(value, kept_value)

    def pack(self, index, positions):
        """Store tokens of a segment; returns each one's loss, mean over the KV heads."""
        losses = np.zeros(len(positions))
        for h, plan in enumerate(self.segments[index].plans):
            for at, t in enumerate(positions):
                key, value = self.packed(plan, self.k[h, t], self.v[h, t])
                losses[at] += self.token_loss(plan, self.k[h, t], self.v[h, t]) / self.heads
                self.key[h][t] = plan.basis_key.T @ key
                self.value[h][t] = plan.basis_value.T @ value
            for first in range(0, len(positions), plan.block):
                members = list(positions[first : first + plan.block])
                mean = plan.basis_key @ self.k[h, members].mean(axis=0)
                kept = prune(mean, plan.rank, plan.group)
                self.blocks[h][members[0]] = (members, plan.basis_key.T @ kept)
        return losses.tolist()

    def flush(self):
        """Pack full buffers into the open segment, and finalise it if it has lost enough."""
        while len(self.buffer) >= self.knobs["buffer"]:
            done, self.buffer = self.buffer[: self.knobs["buffer"]], self.buffer[self.knobs["buffer"] :]
            now = self.segments[-1]
            self.loss += sum(self.pack(len(self.segments) - 1, done))
            now.stop = done[-1] + 1
            full = now.stop - now.first >= self.knobs["segment"]
            if self.dynamic and (self.loss > self.limit or full):
                self.finalise()

    def finalise(self):
        """The open segment gets its own plans and is packed anew from the raw tokens; another one opens."""
        now = self.segments[-1]
        now.plans = self.make_plans(now.first, now.stop)
        for h in range(self.heads):
            self.blocks[h] = {first: block for first, block in self.blocks[h].items() if first < now.first}
        self.pack(len(self.segments) - 1, range(now.first, now.stop))
        self.finalised.append((now.first, now.stop))
        self.segments.append(Segment(now.stop, now.stop, now.plans))
        self.loss = 0.0

    # ---- a step

    def units(self, h):
        """What is selected, in order: (positions, packed mean of their block)."""
        found = []
        for _, (members, mean) in sorted(self.blocks[h].items()):
            size = GRANULE if self.dynamic else len(members)
            for i in range(0, len(members), size):
                found.append((members[i : i + size], mean))
        return found

    def choose(self, query, h):
        """Packed positions that rotated queries [G, D] of head ``h`` attend to together."""
        units = self.units(h)
        if not units:
            return []
        score = {i: max(float(one @ mean) for one in query) for i, (_, mean) in enumerate(units)}
        count = max(1, math.ceil(self.knobs["fraction"] * len(units) - 1e-6))
        return sorted(t for i in best(score, count) for t in units[i][0])

    def attend(self, query, h, packed, exact):
        """Rotated queries [G, D] over packed and exact positions of head ``h``: [G, D]."""
        keys = [self.key[h][t] for t in packed] + [self.k[h, t] for t in exact]
        values = [self.value[h][t] for t in packed] + [self.v[h, t] for t in exact]
        return np.stack([attend(one, keys, values)[0] for one in query])

    def decode(self, query, t):
        """Token ``t`` with rotated queries [H, G, D]: output [H, G, D], attended positions of each head."""
        self.buffer.append(t)
        out, attended = np.zeros(query.shape), [set(self.buffer) for _ in range(self.heads)]
        for h in range(self.heads):
            chosen = self.choose(query[h], h)
            out[h] = self.attend(query[h], h, chosen, self.buffer)
            attended[h] |= set(chosen)
        self.flush()
        return out, attended

    def extend(self, query, first):
        """Several tokens from ``first`` on, rotated queries [H, G, T, D]: dense over all that is stored, causal."""
        out = np.zeros(query.shape)
        for i in range(query.shape[2]):
            self.buffer.append(first + i)
            for h in range(self.heads):
                out[h, :, i] = self.attend(query[h, :, i], h, sorted(self.key[h]), self.buffer)
        self.flush()
        return out


def run(
    q,
    k,
    v,
    prompt,
    inv_freq,
    channels=0.25,
    fraction=0.1,
    block_size=8,
    segment=65536,
    buffer=32,
    strategy="static",
    max_loss=0.1,
    max_variance=0.5,
    lifetime=8192,
    basis_key=None,
    basis_value=None,
):
    """See the package's docstring; the bases, if given, are named in ``STATE``."""
    given = dict(locals())
    knobs = {name: given[name] for name in given if name not in ("q", "k", "v", "prompt", "inv_freq", *STATE)}
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    row = Row(k, v, prompt, knobs, basis_key, basis_value)
    trace = MosaicTrace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, k.shape[1]):
        out, attended = row.decode(q[:, :, t], t)
        trace.add(t, out, attended)
    trace.finalised = row.finalised
    trace.plans = [[(p.rank, p.group, p.block) for p in s.plans] for s in row.segments]
    return trace
