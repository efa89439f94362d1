"""Ablations of MosaicKV: a grid of channels and blocks, and the strategies that choose channels."""

from __future__ import annotations

from experiments.lab.ablations.arms import Lab, Methods, Table, table

_TASKS = ("niah_multikey_2", "niah_multivalue")
_CHANNELS = (1.0, 0.5, 0.25)
_FRACTIONS = (1.0, 0.5, 0.25, 0.1)  # attended shares of the blocks


def channels(lab: Lab) -> list[Table]:
    """Compare MosaicKV's shares of channels and of blocks."""
    arms: Methods = {}
    for share in _CHANNELS:
        for fraction in _FRACTIONS:
            method = lab.method("mosaickv", channels=share, fraction=fraction, capacity=1.0)
            arms[f"channels {share:g}, blocks {fraction:g}"] = ({"channels": share, "blocks": fraction}, method)
    head = lab.model.config.head_dim
    text = (
        f"Shares of the {head} channels of a vector and of the 8-token blocks; static strategy, largest channels of each "
        "vector after rotation. The paper keeps 0.25 of the channels, of heads of 128, and attends to 0.1 of the tokens."
    )
    return [table(lab, "MosaicKV: channels and blocks", text, lab.pick(*_TASKS), arms)]


def strategy(lab: Lab) -> list[Table]:
    """Compare choices of the channels that MosaicKV keeps, and sizes of its blocks."""
    kinds = {
        "largest of each vector, rotated": ("per vector", {}),
        "dynamic strategy": ("dynamic", {"strategy": "dynamic"}),
        "largest of each vector, rotated, blocks of 4": ("blocks of 4", {"block_size": 4}),
    }
    arms: Methods = {}
    for name, (kind, knobs) in kinds.items():
        for fraction, blocks in ((1.0, "all blocks"), (0.1, "a tenth of the blocks")):
            method = lab.method("mosaickv", fraction=fraction, capacity=1.0, **knobs)
            arms[f"{name}, {blocks}"] = ({"kind": kind, "blocks": fraction}, method)
    text = (
        "A quarter of the channels kept (but for the dynamic strategy, which chooses). rotated: into the eigenvectors of the "
        "segment's second moments."
    )
    return [table(lab, "MosaicKV: which channels are kept", text, lab.pick(*_TASKS), arms)]
