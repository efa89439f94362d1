"""What every oracle needs: rotation, softmax and attention for a single query, in float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Trace:
    """What a method did to one row; positions are token positions."""

    prompt: np.ndarray  # float64 [H, G, n, D], attention output of the prompt
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)  # [H, G, D] of each decode step
    attended: list[list[set[int]]] = dataclasses.field(default_factory=list)  # [step][H]
    kept: list[list[set[int]]] = dataclasses.field(default_factory=list)  # [step][H], stored after the step

    def add(self, t: int, out: np.ndarray, attended: list[set[int]], kept: list[set[int]] | None = None) -> None:
        """Note of token t its output [H, G, D], what each KV head attended to, and what it stores then; None: everything."""
        if t < self.prompt.shape[2]:
            self.prompt[:, :, t] = out
            return
        self.outputs.append(out)
        self.attended.append(attended)
        self.kept.append([set(range(t + 1)) for _ in attended] if kept is None else kept)


def rotate(x: np.ndarray, position: float, inv_freq: np.ndarray) -> np.ndarray:
    """RoPE of one vector [D], pair (i, i + D/2)."""
    half = len(x) // 2
    out = np.zeros(len(x))
    for i in range(half):
        cos, sin = np.cos(position * float(inv_freq[i])), np.sin(position * float(inv_freq[i]))
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def rotate_all(x: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """RoPE of [..., T, D] at positions 0, 1, ... T-1."""
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for index in np.ndindex(*x.shape[:-1]):
        out[index] = rotate(x[index], index[-1], inv_freq)
    return out


def softmax(logits: list[float] | np.ndarray) -> np.ndarray:
    """Softmax of a vector."""
    weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weight / weight.sum()


def attend(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One query over some tokens, scale 1/sqrt(D): output [D] and the probabilities."""
    weight = softmax([float(query @ key) / np.sqrt(len(query)) for key in keys])
    out = np.zeros(len(values[0]))
    for probability, value in zip(weight, values, strict=True):
        out += probability * value
    return out, weight


def attend_to(q: np.ndarray, k: np.ndarray, v: np.ndarray, at: int, chosen: list[list[int]]) -> np.ndarray:
    """Token ``at`` of rotated q [H, G, T, D] over the ``chosen`` positions of each KV head: [H, G, D]."""
    heads, group, _, dim = q.shape
    out = np.zeros((heads, group, dim))
    for h in range(heads):
        for g in range(group):
            out[h, g], _ = attend(q[h, g, at], [k[h, i] for i in chosen[h]], [v[h, i] for i in chosen[h]])
    return out


def dense_prompt(q: np.ndarray, k: np.ndarray, v: np.ndarray, prompt: int) -> np.ndarray:
    """Causal attention of the rotated prompt: [H, G, n, D]."""
    steps = [attend_to(q, k, v, t, [list(range(t + 1))] * q.shape[0]) for t in range(prompt)]
    return np.stack(steps, axis=2)


def best(score: dict[int, float], count: int) -> set[int]:
    """The ``count`` highest scores; among equals the smaller index wins."""
    return set(sorted(score, key=lambda i: (-score[i], i))[:count])


def keep_all(q: np.ndarray, k: np.ndarray, v: np.ndarray, prompt: int, choose, keys: np.ndarray | None = None) -> Trace:
    """A run of rotated q and k, and of v, where everything is kept.

    Token t attends to the positions ``choose(t)``, a set for each KV head, and ``keys`` are those it sees there; None: k.
    """
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, k.shape[1]):
        chosen = choose(t)
        trace.add(t, attend_to(q, k if keys is None else keys, v, t, [sorted(positions) for positions in chosen]), chosen)
    return trace


def keep_once(q: np.ndarray, k: np.ndarray, v: np.ndarray, prompt: int, kept: list[set[int]]) -> Trace:
    """A run of rotated q and k, and of v, where KV head h keeps the prompt's ``kept[h]`` and every later token."""
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, k.shape[1]):
        kept = [positions | {t} for positions in kept]
        trace.add(t, attend_to(q, k, v, t, [sorted(positions) for positions in kept]), kept, kept)
    return trace


def keep_again(q: np.ndarray, k: np.ndarray, v: np.ndarray, prompt: int, interval: int, kept: list[set[int]], keep) -> Trace:
    """A run of rotated q and k, and of v, where every ``interval`` tokens after the prompt are followed by an eviction.

    KV head h keeps the prompt's ``kept[h]``. Later the heads keep what ``keep(tokens, t)`` says, a list of sets, of their
    ``tokens``, a sorted list for each, all of which end with the newest token t.
    """
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, k.shape[1]):
        attended = [positions | {t} for positions in kept]
        out = attend_to(q, k, v, t, [sorted(positions) for positions in attended])
        evicts = (t + 1 - prompt) % interval == 0
        kept = keep([sorted(positions) for positions in attended], t) if evicts else attended
        trace.add(t, out, attended, kept)
    return trace
