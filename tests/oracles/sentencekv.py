"""SentenceKV: most of the prompt is dropped once, then whole sentences are fetched by mean key and mean query.

A *pool* is the ascending list of positions that a KV head keeps; a slot is an index into it.
"""

import numpy as np

from tests.oracles.plain import Trace, attend, best, dense_prompt, rotate_all, softmax

_ENDS = np.zeros(512, bool)
# Sentences of 1 to 14 tokens. Those that prompts of LENGTHS are cut into have 1, 2, 4 or 8, whose means are exact.
_ENDS[[1, 3, 4, 5, 7, 11, 19, 20, 21, 23, 25, 29, 31, 39]] = True
_ENDS[40:] = [position % 27 in (5, 16, 18) for position in range(40, 512)]
KNOBS = {"budget": 12, "keep_factor": 2.0, "boundary": _ENDS, "obs_window": 4, "kernel": 3, "num_sink": 2, "num_recent": 3}
LENGTHS = (1, 3, 4, 5, 12, 16, 24, 25, 40)


def sentences_of(prompt, total, is_end):
    """Sentence number of every position; the prompt's end closes whatever is open."""
    number, current = [], 0
    for position in range(total):
        number.append(current)
        if is_end[position] or position == prompt - 1:
            current += 1
    return number


def votes(q, k, h, g, prompt, obs_window):
    """What the last ``obs_window`` prompt queries of query head (h, g) attend to, for each token before them."""
    prefix = prompt - obs_window
    total = np.zeros(prefix)
    for t in range(prefix, prompt):
        weight = softmax([float(q[h, g, t] @ k[h, i]) / np.sqrt(q.shape[3]) for i in range(t + 1)])
        for i in range(prefix):
            total[i] += weight[i]
    return total


def keep(vote, prompt, pool, obs_window, kernel):
    """Prompt positions kept of at most ``pool``, ascending, given the votes of the prefix."""
    if prompt <= max(pool, obs_window):
        return list(range(prompt))
    prefix = prompt - obs_window
    pooled = {}
    for i in range(prefix):
        pooled[i] = max(vote[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < prefix)
    return sorted(best(pooled, pool - obs_window)) + list(range(prefix, prompt))


def pools_after_prompt(q, k, prompt, pool, prefilter, obs_window, kernel):
    """The pool of every KV head, [H] lists of positions."""
    heads, group = q.shape[:2]
    if prompt <= obs_window:
        return [list(range(prompt)) for _ in range(heads)]
    each = [[votes(q, k, h, g, prompt, obs_window) for g in range(group)] for h in range(heads)]
    if prefilter == "kv_head":
        used = [sum(each[h]) for h in range(heads)]
    else:
        assert prefilter == "global"
        used = [sum(each[h][g] for h in range(heads) for g in range(group))] * heads
    return [keep(used[h], prompt, pool, obs_window, kernel) for h in range(heads)]


def ranked(pool, key, number, closed, queries):
    """Slots of each closed sentence with a member in the pool, best sentence first.

    The score is mean query . mean key. It is written as one quotient of sums, which is the same number, so that scores
    of whole-number data that are equal stay equal.
    """
    members = {}
    for slot, position in enumerate(pool):
        if number[position] in closed:
            members.setdefault(number[position], []).append(slot)
    score = {}
    for sentence, slots in members.items():
        total_key = np.zeros(key.shape[1])
        for slot in slots:
            total_key += key[pool[slot]]
        total_query = np.zeros(key.shape[1])
        for query in queries:
            total_query += query
        score[sentence] = float(total_query @ total_key) / (len(queries) * len(slots))
    return [members[sentence] for sentence in sorted(score, key=lambda s: (-score[s], s))]


def choose(pool, order, num_sink, recent, room):
    """Slots attended: the first, the last, and ``room`` others taken sentence by sentence, the last one cut."""
    size = len(pool)
    chosen = set(range(min(num_sink, size))) | set(range(max(0, size - recent), size))
    taken = 0
    for slots in order:
        for slot in slots:
            if num_sink <= slot < size - recent and taken < room:
                chosen.add(slot)
                taken += 1
    return chosen


def run(
    q,
    k,
    v,
    prompt,
    inv_freq,
    budget,
    keep_factor=2.0,
    boundary=None,
    prefilter="global",
    obs_window=32,
    kernel=31,
    num_sink=32,
    num_recent=32,
    open_cap=256,
):
    """See the package's docstring; the token id at position t is t."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    number = sentences_of(prompt, total, boundary)
    pools = pools_after_prompt(q, k, prompt, int(np.floor(keep_factor * budget)), prefilter, obs_window, kernel)
    first = prompt  # of the open sentence
    for t in range(prompt, total):
        if boundary[t]:
            first = t + 1
        count = t + 1 - first
        recent = min(max(num_recent, min(count, open_cap)), budget - num_sink)
        closed = {number[i] for i in range(first)}
        output = np.zeros((heads, group, dim))
        attended, kept = [set()] * heads, [set()] * heads
        for h in range(heads):
            pool = pools[h]
            pool.append(t)
            chosen = set(range(len(pool)))
            if count:
                order = ranked(pool, k[h], number, closed, [q[h, g, i] for g in range(group) for i in range(first, t + 1)])
                chosen = choose(pool, order, num_sink, recent, budget - num_sink - recent)
            positions = sorted(pool[slot] for slot in chosen)
            for g in range(group):
                output[h, g], _ = attend(q[h, g, t], k[h, positions], v[h, positions])
            attended[h], kept[h] = set(positions), set(pool)
        trace.add(t, output, attended, kept)
    return trace
