"""The table of docs/models.md that says what is checked of each family, and which methods a family refuses.

It is made from what the tests have: the goldens of transformers, the families whose weights are rounded to 8 bits, and the
sentences with which methods refuse a model. ``python -m tests.models.support`` writes it into the page.
"""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np

from kvjax.decoding.checks import check_sizes
from kvjax.protocol.method import Method
from kvjax.registry import classes
from models import ModelConfig
from models.files.gguf.families import FAMILIES as GGUF_FAMILIES
from models.files.hf import config as hf_config
from tests import goldens
from tests.tiny_models import TINY

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "models.md"
_BLOCK = re.compile(r"(<!-- support: made by[^>]*-->\n).*?(\n<!-- end of support -->)", re.DOTALL)
_HEAD = ("`model_type`", "logits and layers as in transformers", "weights in codes", "GGUF", "methods that it refuses")


def markdown(coded: list[str]) -> str:
    """Make the table.

    Args:
        coded: the names of the goldens that are also checked with weights in 8 bits.
    """
    ours = _refusals(ModelConfig(**TINY))  # by methods that need a knob for any model, such as scores of heads
    rows: dict[str, list[str]] = {}
    for file in sorted((goldens.FOLDER / "models" / "families").glob("*.npz")):
        hf = json.loads(str(np.load(file)["config"]))
        kind, config = hf["model_type"], ModelConfig.from_hf(hf)
        refused = ", ".join(sorted(_refusals(config) - ours)) or "none"
        gguf = "yes" if {kind.replace("_text", "").replace("_", new) for new in ("-", "")} & set(GGUF_FAMILIES) else ""
        rows[kind] = [f"`{kind}`", "yes", "yes" if file.stem in coded else "", gguf, refused]
    lines = [_HEAD, ["---"] * len(_HEAD), *(rows[kind] for kind in sorted(rows, key=hf_config.MODEL_TYPES.index))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def found() -> str | None:
    """Return the table that the page has."""
    match = _BLOCK.search(PAGE.read_text())
    return match and match[0].split("-->\n", 1)[1].rsplit("\n<!--", 1)[0]


def write(coded: list[str]) -> None:
    """Write the table into the page."""
    PAGE.write_text(_BLOCK.sub(lambda match: match[1] + markdown(coded) + match[2], PAGE.read_text()))


def _refusals(config: ModelConfig) -> set[str]:
    return {cls.__name__ for cls in classes().values() if _refuses(cls(), config)}


def _refuses(method: Method, config: ModelConfig) -> bool:
    try:
        check_sizes(method, config)
    except ValueError:
        return True
    return False


if __name__ == "__main__":
    from tests.models.test_families import CODED

    write(CODED)
