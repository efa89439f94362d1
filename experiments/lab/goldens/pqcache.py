"""What the released code of PQCache attends to, and its outputs, on random tokens of one layer.

Run with torch and scikit-learn installed, and with the path of a checkout of HugoZHL/PQCache (0b74e12)::

    python -m experiments.lab.goldens.pqcache PATH

It runs ``PqBasedSearchCompressor`` of ``vq_method/retrieval_based/pq_search.py`` on the CPU. What needs a GPU or processes
is replaced: its cache by `Manager`, which holds all tokens, and its k-means by `Compressor`, which makes the same call of
scikit-learn as its worker, but begins with evenly spaced keys, as kvjax does, where the worker draws keys by chance. float32
stands for its float16, and of tokens with equal scores the first is taken, where PyTorch takes any.

It writes ``pqcache.json``: how the tokens are made (``seed``, ``sizes`` H, G, T, D, the first ``prompt`` of which are the
prompt), ``knobs`` in kvjax's names, and for each later token ``chosen``, the positions that each KV head finds, ascending,
and ``outputs`` [N, H, G, D]. Keys are not rotated.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans

from experiments.lab.goldens import write

SEED, HEADS, GROUP, PROMPT, STEPS, DIM = 20261124, 2, 2, 60, 12, 16
KNOBS = {
    "fraction": 0.3, "recent_share": 0.5, "num_sink": 4, "num_subvectors": 2, "num_centroids": 16, "iterations": 25,
}  # fmt: skip


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """What FlashAttention computes, of [B, T, H, D]; the queries are the last tokens."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    hidden = torch.full((query.shape[2], key.shape[2]), -torch.inf).triu(key.shape[2] - query.shape[2] + 1)
    out = torch.softmax(query @ key.mT / DIM**0.5 + hidden, dim=-1) @ value
    return out.transpose(1, 2)


def first_best(x: torch.Tensor, k: int, dim: int, largest: bool, sorted: bool) -> types.SimpleNamespace:
    """``torch.topk`` in which the lower index wins a tie."""
    return types.SimpleNamespace(indices=x.sort(dim=dim, descending=largest, stable=True).indices[..., :k])


class Manager:
    """The tokens of the layer, and the lists that were asked for."""

    def init(self, key: torch.Tensor, value: torch.Tensor, layer: int, wanted: int) -> None:
        """The prompt's tokens."""
        self.key, self.value, self.chosen = key, value, []
        self.recent = int((PROMPT - KNOBS["num_sink"]) * KNOBS["fraction"] * KNOBS["recent_share"])

    def fetch_and_concat_kv_w_cache(self, indices: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Newest tokens, sinks, listed tokens, which are counted behind the sinks, and room for the step's own."""
        sinks, indices = KNOBS["num_sink"], indices + KNOBS["num_sink"]
        self.chosen.append([sorted(head) for head in indices.tolist()])
        listed = indices[None, ..., None].expand(1, HEADS, -1, DIM)
        return tuple(
            torch.cat([x[:, :, -self.recent :], x[:, :, :sinks], x.gather(2, listed), torch.zeros(1, HEADS, 1, DIM)], dim=2)
            for x in (self.key, self.value)
        )

    def add_new_token(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """The key that leaves the newest tokens."""
        leaving = self.key[:, :, -self.recent]
        self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        return leaving


class Compressor:
    """k-means, as ``compute_kmeans_worker`` calls it."""

    metric = "euc"

    def refresh_pool(self) -> None:
        """Nothing is pooled."""

    def wait_for_km_result(self, number: int) -> None:
        """It is there."""

    def compress(self, x: torch.Tensor, cent_cnt: int, max_iter: int, layer_idx: int) -> tuple:
        """Centroids and ids of groups [N, T, D], with room for later ids."""
        groups, tokens, _ = x.shape
        ids, centroids = torch.zeros(tokens + STEPS, groups, dtype=torch.int64), []
        for group, points in enumerate(x.numpy()):
            first = points[np.arange(cent_cnt) * tokens // cent_cnt]
            made = KMeans(cent_cnt, n_init=1, init=first, tol=0.0001, max_iter=max_iter, random_state=0, algorithm="lloyd")
            made.fit(points)
            centroids.append(made.cluster_centers_)
            ids[:tokens, group] = torch.from_numpy(made.labels_)
        return torch.tensor(np.array(centroids)), ids, 0, None


def released(path: Path) -> dict:
    """The names of the module, whose imports need GPUs."""
    space: dict = {"__name__": "pq_search"}
    for name in ("retrieval_based_compressor.py", "pq_search.py"):
        lines = (path / "vq_method" / "retrieval_based" / name).read_text().split("\n")
        gone = "from kmeans_gpu", "from .", "from flash_attn", "from loguru"
        exec(compile("\n".join(x for x in lines if not x.startswith(gone)), name, "exec"), space)
    return space


def main(path: Path) -> None:
    """Write the file."""
    torch.Tensor.topk = first_best
    torch.float16, torch.cuda.Event = torch.float32, lambda **_: types.SimpleNamespace(wait=lambda: None)
    space, manager = released(path), Manager()
    space |= {"layer_per_rank": 1, "cache_managers": [manager], "global_compressor": Compressor()}
    space["flash_attn_func"] = attention
    made = space["PqBasedSearchCompressor"](
        KNOBS["fraction"], KNOBS["recent_share"], KNOBS["num_subvectors"], (KNOBS["num_centroids"] - 1).bit_length(), True,
        sink_size=KNOBS["num_sink"], layer_idx=0, num_layer_cnt=1, kv_head=HEADS, dim=DIM, cur_device=torch.device("cpu"),
        max_iter=KNOBS["iterations"],
    )  # fmt: skip
    rng, total = np.random.default_rng(SEED), PROMPT + STEPS
    q, k, v = (torch.tensor(rng.normal(size=(1, n, total, DIM)), dtype=torch.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    every = [x.repeat_interleave(GROUP, dim=1) for x in (k, v)]
    made.prefill_attn(q[:, :, :PROMPT], (k[:, :, :PROMPT], v[:, :, :PROMPT]))
    outputs = []
    for at in range(PROMPT, total):
        out = made.decoding_attn(GROUP, q[:, :, at : at + 1], *(x[:, :, at : at + 1] for x in every))
        outputs.append(out.reshape(HEADS, GROUP, DIM).double().numpy().round(6).tolist())
    golden = {
        "seed": SEED, "sizes": [HEADS, GROUP, total, DIM], "prompt": PROMPT, "knobs": KNOBS, "chosen": manager.chosen,
        "outputs": outputs,
    }  # fmt: skip
    write("pqcache", golden)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
