"""Where modules of earlier versions are now. An import by an old name raises an error that says the new name."""

from __future__ import annotations

import sys
import types

from pallas_kernels import Moved

PLACES = types.MappingProxyType(
    {
        "kvjax.adaptive_prompt": "kvjax.attention.estimates",
        "kvjax.checkpoint": "kvjax.api.checkpoint",
        "kvjax.checks": "kvjax.decoding.checks",
        "kvjax.compose": "kvjax.wrappers.compose",
        "kvjax.eigen": "kvjax.methods.eigen",
        "kvjax.generate": "kvjax.api.generate",
        "kvjax.head_scores": "kvjax.methods.head_scores",
        "kvjax.layer_budgets": "kvjax.wrappers.layer_budgets",
        "kvjax.memory": "kvjax.accounting.memory",
        "kvjax.methods.chess.calibration": "kvjax.api.calibrate_chess",
        "kvjax.moments": "kvjax.attention.moments",
        "kvjax.new_folder": "kvjax.api.new_folder",
        "kvjax.offload": "kvjax.cache.offload",
        "kvjax.outside": "kvjax.plugins",
        "kvjax.parallel": "kvjax.api.shard_map",
        "kvjax.parts": "kvjax.cache.divided",
        "kvjax.passes": "kvjax.decoding.passes",
        "kvjax.patterns": "kvjax.attention.patterns",
        "kvjax.periodic": "kvjax.wrappers.periodic",
        "kvjax.plan": "kvjax.mesh.sharding",
        "kvjax.processes": "kvjax.mesh.processes",
        "kvjax.product_codes": "kvjax.methods.pqcache.product_codes",
        "kvjax.programs": "kvjax.api.programs",
        "kvjax.prompts": "kvjax.api.prefill",
        "kvjax.quantised": "kvjax.cache.quantised",
        "kvjax.reading": "kvjax.decoding.prefill",
        "kvjax.sampling": "kvjax.decoding.sampling",
        "kvjax.sparse_prefill": "kvjax.wrappers.sparse_prefill",
        "kvjax.sparse_prompt": "kvjax.attention.sparse",
        "kvjax.spherical": "kvjax.methods.retroinfer.kmeans",
        "kvjax.stats": "kvjax.accounting.stats",
        "kvjax.step": "kvjax.decoding.decode",
        "kvjax.stretched": "kvjax.methods.stretched",
        "kvjax.sweep": "kvjax.api.sweep",
        "kvjax.thin": "kvjax.cache.packed_keys",
        "kvjax.twilight": "kvjax.wrappers.twilight",
        "kvjax.window": "kvjax.decoding.sliding_window",
        "kvjax.timing": "experiments.records",
    }
)

sys.meta_path.append(Moved("kvjax", lambda: PLACES))
