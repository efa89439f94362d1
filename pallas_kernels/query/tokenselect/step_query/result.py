"""The result of `step_query`."""

from typing import NamedTuple

import jax


class StepQuery(NamedTuple):
    """A decode step's queries, and whether it selects."""

    mean: jax.Array  # float32 [B, H, G, D], the query that scores
    rotated: jax.Array  # [B, H, G, D] in the dtype of the query, the query that attends
    last: jax.Array  # float32 [B, H, G, D], not rotated, the query of the last step that selected
    ready: jax.Array  # bool [B], whether some step has selected
    hits: jax.Array  # int32 [B], steps that reused a selection
    refreshes: jax.Array  # int32 [B], steps that selected
    miss: jax.Array  # bool [B], whether this step selects
    stop: jax.Array  # int32 [B], end of this step's candidates, 0 where it does not select
    wanted: jax.Array  # int32 [B], how many candidates to select, 0 where it does not select
