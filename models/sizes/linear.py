"""The sizes of layers of linear attention."""

from __future__ import annotations

import dataclasses

from .checks import check_counts, check_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearLayers:
    """Which layers have linear attention instead of attention, and their sizes.

    Raises:
        ValueError: a size is not positive, the value heads are no multiple of the key heads, or ``layers`` is not ascending.
    """

    num_key_heads: int  # N
    num_value_heads: int  # N * R: R value heads share the query and the key of a key head
    key_dim: int  # K, of a query and of a key
    value_dim: int  # M, of a value
    conv_width: int  # W, tokens that the convolution sees, its own included
    layers: tuple[int, ...]  # layers with linear attention; every other layer has attention

    def __post_init__(self):
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_width"):
            check_counts("LinearLayers", **{name: vars(self)[name]})
        if self.conv_width < 2:
            raise ValueError(f"LinearLayers: conv_width must be at least 2 tokens, got {self.conv_width}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                "LinearLayers: num_value_heads must be a multiple of num_key_heads, "
                f"got {self.num_value_heads} and {self.num_key_heads}"
            )
        check_layers("LinearLayers", self.layers)

    @property
    def group(self) -> int:
        """R, value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Channels of one key head that go through the convolution: its query, its key and its R values."""
        return 2 * self.key_dim + self.group * self.value_dim

    def memory(self, dtype: str) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Return the shapes, without axis B, and the dtypes of what a layer keeps of a row.

        They are what the convolution still needs of the newest tokens, [N, W - 1, channels] in the dtype of computation, and
        the state of the delta rule, float32 [N, R, K, M].
        """
        heads = self.num_key_heads
        state = (heads, self.group, self.key_dim, self.value_dim)
        return ((heads, self.conv_width - 1, self.channels), dtype), (state, "float32")

    def local(self, devices: int) -> LinearLayers:
        """Divide the heads by a number of devices that divides the key heads."""
        return dataclasses.replace(
            self, num_key_heads=self.num_key_heads // devices, num_value_heads=self.num_value_heads // devices
        )


def check_linear(config: object) -> None:
    """Refuse layers of linear attention that do not fit the other fields of a `models.sizes.architecture.Architecture`."""
    fields = vars(config)
    linear, count, windows = fields["linear"], fields["num_layers"], fields["windows"]
    if fields["output_gate"] and fields["qkv_bias"]:
        raise ValueError("ModelConfig: expected one of output_gate and qkv_bias, got both True")
    if linear is None:
        return
    if linear.layers[-1] >= count or len(linear.layers) == count:
        raise ValueError(
            f"ModelConfig: linear.layers must be below num_layers={count} and leave at least one layer with attention, "
            f"got {linear.layers!r:.80}"
        )
    both = [layer for layer in linear.layers if windows and windows[layer] is not None]
    if both:
        raise ValueError(f"ModelConfig: a layer of linear attention has no window, got one in layer {both[0]}")
