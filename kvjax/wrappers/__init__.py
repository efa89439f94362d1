"""Wrappers: methods made of other methods; and the patterns of prompts that `Prefill` takes."""

from kvjax.attention.patterns import Pattern as Pattern
from kvjax.attention.patterns import patterns as patterns
from kvjax.wrappers.compose import DenseBelow as DenseBelow
from kvjax.wrappers.compose import PerLayer as PerLayer
from kvjax.wrappers.compose import Stages as Stages
from kvjax.wrappers.layer_budgets import LayerBudgets as LayerBudgets
from kvjax.wrappers.layer_budgets import layer_shares as layer_shares
from kvjax.wrappers.periodic import Periodic as Periodic
from kvjax.wrappers.reuse import Reuse as Reuse
from kvjax.wrappers.sparse_prefill import Prefill as Prefill
from kvjax.wrappers.twilight import Twilight as Twilight
