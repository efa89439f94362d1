"""The fixed texts of the tasks that the shipped model was trained with."""

from __future__ import annotations

from experiments.tasks import infinitebench, ruler
from experiments.tasks.haystack import NOISE

# The templates have the order of the corpus from which the shipped tokenizer was trained.
TRAINED_TEMPLATES: tuple[str, ...] = (
    ruler.NIAH_CONTEXT,
    ruler.NIAH_QUESTION,
    ruler.NIAH_PREFIX,
    ruler.NEEDLE,
    ruler.VT_CONTEXT,
    ruler.VT_QUESTION,
    ruler.VT_PREFIX,
    infinitebench.PASSKEY_CONTEXT,
    infinitebench.NUMBER_STRING_CONTEXT,
    *infinitebench.PASSKEY,
    *infinitebench.NUMBER_STRING,
    infinitebench.KV_CONTEXT,
    infinitebench.KV_PREFIX,
    NOISE,
)
