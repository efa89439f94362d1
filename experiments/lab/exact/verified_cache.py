"""A cache of `kvjax.Verified` from the caches of Full and of its draft."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from kvjax.cache import Cache
from kvjax.decoding.layers import layer_methods
from kvjax.exact.verified import Verified, no_passes
from kvjax.exact.verified_layer import Pair, VerifiedLayer
from kvjax.protocol.typing import method_layers


def verified_cache(method: Verified, full: Cache, draft: Cache) -> Cache:
    """Make the cache of ``method`` from the caches of Full and of its draft, which have read the same prompts together.

    It equals the cache that `kvjax.prefill` makes, and has the arrays of the given caches.

    Args:
        method: whose draft has a dense prompt.
        full: Full's cache, or the draft's own if it has Full's storage in all layers.
        draft: the draft's cache; its arrays, or their shapes.
    """
    runs = method_layers(full.model)  # a layer that runs no method has nothing to draft
    shares = [
        at not in runs or cast("VerifiedLayer", layer).shares for at, layer in enumerate(layer_methods(method, full.model))
    ]
    each = zip(shares, full.layers, draft.layers, strict=True)
    layers: list[Any] = [guess if alike else Pair(full=exact, draft=guess) for alike, exact, guess in each]
    shared = no_passes(draft.shared, full.batch, method.depth)
    drafting = dataclasses.replace(method, draft=draft.method)
    return dataclasses.replace(full, method=drafting, layers=tuple(layers), shared=shared)
