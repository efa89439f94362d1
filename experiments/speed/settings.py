"""The settings of `experiments.speed` and `experiments.speed.offload`, and the model shapes that they know."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence

from jsonargparse.typing import PositiveInt

from experiments.answering import WEIGHT_DTYPES, mesh_axes
from experiments.cli import Settings, option, record_path
from experiments.speed.sum_variants import check_sums
from experiments.speed.variants import VARIANTS, VERIFIED
from kvjax.cache.quantised import check_kv_dtype
from models import ModelConfig, shapes
from pallas_kernels.axes import DATA, MODEL

MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama-3.1-8b": shapes.llama31_8b,
    # An eighth of the layers, for prompts that all layers would take minutes to prefill. A layer's time is the same in both.
    "llama-3.1-8b-4-layers": lambda: dataclasses.replace(shapes.llama31_8b(), num_layers=4),
    "llama-3.1-70b": shapes.llama31_70b,
    "qwen2.5-1.5b": shapes.qwen25_1_5b,
    "qwen3-8b": shapes.qwen3_8b,
    "llama-3.2-1b": shapes.llama32_1b,
    "qwen3-0.6b": shapes.qwen3_0_6b,
}
CHUNK_SIZE = 8192  # tokens of a pass, of all rows together
MOST_ROWS = 64
_MODES = ("prefill", "attention_only", "largest_batch")  # what is timed instead of decode steps


@dataclasses.dataclass(frozen=True)
class SpeedSettings(Settings):
    """What `experiments.speed` times.

    Attributes:
        model: shape of the model, which gets random weights
        methods: comma-separated, or 'all'; Full is always run first
        lengths: comma-separated, tokens stored before decoding
        batches: comma-separated, rows decoded or read together (default 1)
        mesh: the devices over which the model, the rows or the slots of a row are spread, such as data=1,model=2 or slots=2
            (default: one device)
        beside_one: with --mesh: time every row on one device before, in the same run
        beside_part: with --mesh: time one device's part of the model before, alone, which waits for no sum
        sums: with --mesh: comma-separated variants of sums over devices, of xla, nccl-graph, nccl-graph-open and
            symmetric-graph; every row is timed under each (default: as XLA does it)
        tokens: tokens decoded per repeat, in one program
        repeats: measurements of each row
        split: split the time of a decode step into its parts (default: yes, on one device)
        prefill: time prefill instead
        attention_only: time one layer's attention instead
        largest_batch: look for the largest batch instead of --batches
        chunk_size: with --prefill: tokens of a pass, of all rows together (default 8192)
        queries: with --attention-only: tokens at once (default 1, which decodes)
        most_rows: with --largest-batch: where to begin at most (default 64)
        knobs: a knob of a method; repeatable
        kv_dtype: comma-separated, int8, float8_e4m3fn, k8v4 or int4: every method is timed with keys and values in these,
            too, in rows named METHOD@KV_DTYPE
        acceptance: comma-separated, for methods named verified_METHOD: the share of drafted tokens that are kept at each
            place, as `experiments.lab.exact` measures it on real text; so many tokens are drafted in each pass
        weight_dtype: keep kernels and tables in int8 or int4; the rows' model is named MODEL@WEIGHT_DTYPE

    Raises:
        ValueError: an unknown model or method, a number below 1, or a setting that has no meaning beside the others.
    """

    model: str = "llama-3.1-8b"
    methods: tuple[str, ...] = ("full",)
    lengths: tuple[PositiveInt, ...] = (131072,)
    batches: tuple[PositiveInt, ...] = ()
    mesh: str | None = None
    beside_one: bool = False
    beside_part: bool = False
    sums: tuple[str, ...] = ()
    tokens: PositiveInt = 32
    repeats: PositiveInt = 5
    split: bool | None = None
    prefill: bool = False
    attention_only: bool = False
    largest_batch: bool = False
    chunk_size: PositiveInt | None = None
    queries: PositiveInt | None = None
    most_rows: PositiveInt | None = None
    knobs: tuple[str, ...] = option((), flag="set", repeat=True, metavar="METHOD.KNOB=VALUE")
    kv_dtype: tuple[str, ...] = ()
    acceptance: tuple[float, ...] = ()
    weight_dtype: str | None = option(None, choices=WEIGHT_DTYPES)

    @property
    def shown_model(self) -> str:
        """The model's name in rows, with the dtype of its codes if it has any."""
        return self.model if self.weight_dtype is None else f"{self.model}@{self.weight_dtype}"

    def __post_init__(self) -> None:
        _check_shared(self, ("lengths", "batches", "tokens", "repeats", "chunk_size", "queries", "most_rows"))
        self._check_acceptance()
        if sum(vars(self)[name] for name in _MODES) > 1:
            raise ValueError(f"expected at most one of {', '.join(_MODES[:-1])} and {_MODES[-1]}")
        for name, needs in (("chunk_size", "prefill"), ("queries", "attention_only"), ("most_rows", "largest_batch")):
            if vars(self)[name] is not None and not vars(self)[needs]:
                raise ValueError(f"{_flag(name)} has no meaning without {_flag(needs)}")
        axes = mesh_axes(self.mesh)
        if axes and (self.attention_only or self.largest_batch):
            raise ValueError("--mesh has no meaning with --attention-only, which has one layer, and --largest-batch")
        for flag, given in (("--mesh", axes and not self.beside_one), *((_flag(name), vars(self)[name]) for name in _MODES)):
            if self.split and given:
                raise ValueError(f"--split has no meaning with {flag}: only decode steps on one device are split into parts")
        for name in self.sums:
            check_sums(name)
        for name in ("sums", "beside_one", "beside_part"):
            if vars(self)[name] and not axes:
                raise ValueError(f"{_flag(name)} has no meaning without --mesh")
        if self.beside_part and (axes[MODEL] == 1 or math.prod(axes.values()) > axes[MODEL]):
            raise ValueError(f"--beside-part needs a mesh that divides the model and nothing else, got --mesh {self.mesh}")
        for batch in self.batches or (1,):
            if axes and batch % axes[DATA]:
                raise ValueError(f"--batches must be multiples of the {axes[DATA]} devices of the axis {DATA!r}, got {batch}")
        if self.batches and (self.attention_only or self.largest_batch):
            raise ValueError("--batches has no meaning with --attention-only, which has one row, and --largest-batch")

    def _check_acceptance(self) -> None:
        kept, drafts = self.acceptance, [name for name in self.methods if name.startswith(VERIFIED)]
        if bool(kept) != bool(drafts):
            raise ValueError(
                f"--acceptance belongs to methods named verified_METHOD, got {kept or 'none'} and {', '.join(self.methods)}"
            )
        if drafts and (self.mesh or any(vars(self)[name] for name in _MODES)):
            raise ValueError(f"{drafts[0]} is timed in decode steps on one device: leave out --mesh, --prefill and the like")
        if kept and (len(kept) < 2 or not 1 >= kept[0] >= kept[-1] >= 0 or list(kept) != sorted(kept, reverse=True)):
            raise ValueError(f"acceptance must be at least two shares from 1 to 0 that do not rise, got {kept}")
        if kept and self.tokens <= len(kept):
            raise ValueError(f"tokens must be above {len(kept)}, the tokens drafted in a pass, got {self.tokens}")

    @property
    def splits(self) -> bool:
        """Whether the time of decode steps is split into its parts."""
        return self.split is not False and self.mesh is None

    @property
    def left_whole(self) -> bool:
        """Whether decode steps would be split on one device, but are not split on the mesh."""
        return self.split is not False and self.mesh is not None and not any(vars(self)[name] for name in _MODES)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of `VARIANTS` that are timed, Full first; each again with every `kv_dtype`."""
        return _in_each(dict.fromkeys(["full", *_variants(self.methods)]), self.kv_dtype)


@dataclasses.dataclass(frozen=True)
class OffloadSettings(Settings):
    """What `experiments.speed.offload` times.

    Attributes:
        model: shape of the model, which gets random weights
        methods: comma-separated, or 'all'; those that cannot offload run resident
        lengths: comma-separated, tokens stored before decoding
        batches: comma-separated, rows decoded together
        tokens: tokens decoded per repeat, in one program
        repeats: measurements of each row
        share: share of the layers in host memory, above 0 and at most 1; 'fit' keeps on the device those that fit
        no_resident: measure from host memory only
        prompts: time prefill into host memory instead
        chunk_size: with --prompts: tokens of a prefill pass (default 8192)
        knobs: a knob of a method; repeatable
        kv_dtype: comma-separated, int8, float8_e4m3fn, k8v4 or int4: every method is measured with keys and values in these,
            too, in rows named METHOD@KV_DTYPE

    Raises:
        ValueError: an unknown model or method, a number out of range, or a setting that has no meaning beside the others.
    """

    model: str = "llama-3.1-8b"
    methods: tuple[str, ...] = ("pariskv",)
    lengths: tuple[PositiveInt, ...] = (131072,)
    batches: tuple[PositiveInt, ...] = (1,)
    tokens: PositiveInt = 32
    repeats: PositiveInt = 5
    share: float | str = 1.0
    no_resident: bool = False
    prompts: bool = False
    chunk_size: PositiveInt | None = None
    knobs: tuple[str, ...] = option((), flag="set", repeat=True, metavar="METHOD.KNOB=VALUE")
    kv_dtype: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_shared(self, ("lengths", "batches", "tokens", "repeats", "chunk_size"))
        if self.share != "fit" and (isinstance(self.share, str) or not 0 < self.share <= 1):
            raise ValueError(f"share must be 'fit' or a number above 0 and at most 1, got {self.share!r}")
        if self.chunk_size is not None and not self.prompts:
            raise ValueError("--chunk-size has no meaning without --prompts")
        if self.no_resident and self.prompts:
            raise ValueError("expected at most one of no_resident and prompts")

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of `VARIANTS` that are timed; each again with every `kv_dtype`."""
        return _in_each(_variants(self.methods), self.kv_dtype)

    @property
    def speed(self) -> SpeedSettings:
        """These settings as settings of `experiments.speed`, whose `Bench` measures the rows."""
        fields = ("model", "lengths", "batches", "tokens", "repeats", "chunk_size", "knobs", "kv_dtype")
        shared = {name: vars(self)[name] for name in fields}
        return SpeedSettings(methods=_variants(self.methods), split=False, prefill=self.prompts, **shared)


def part_of(config: ModelConfig, parts: int) -> ModelConfig:
    """Describe one device's part of a model as a model of its own, with the parameters that the device has on a mesh.

    Args:
        config: the model.
        parts: the devices over which it is divided; with 1 it is returned as it is.

    Raises:
        ValueError: the parts would not be equal.
    """
    if parts == 1:
        return config
    # `local` leaves the vocabulary whole, because a cache keeps the logits of all tokens. End tokens may be in another part.
    return dataclasses.replace(config.local(parts), vocab_size=config.vocab_size // parts, eos_token_ids=())


def _variants(methods: Sequence[str]) -> tuple[str, ...]:
    return tuple(VARIANTS) if tuple(methods) == ("all",) else tuple(methods)


def _in_each(variants: Iterable[str], kinds: Sequence[str]) -> tuple[str, ...]:
    """Name the rows: each variant in the dtype of the model, and in each dtype of ``kinds``."""
    return tuple(text for name in variants for text in (name, *(f"{name}@{kind}" for kind in kinds)))


def _check_shared(settings: SpeedSettings | OffloadSettings, fields: Sequence[str]) -> None:
    """Refuse an unknown model, method or dtype, and a number below 1 in any of the fields."""
    if settings.model not in MODELS:
        raise ValueError(f"unknown model {settings.model!r}, expected one of {', '.join(MODELS)}")
    for name in _variants(settings.methods):
        if name.removeprefix(VERIFIED) not in VARIANTS:
            raise ValueError(f"unknown method {name!r}, expected one of {', '.join(VARIANTS)}")
    for kind in settings.kv_dtype:
        check_kv_dtype(kind)
    check_positive(settings, fields)


def check_positive(settings: Settings, fields: Sequence[str]) -> None:
    """Refuse a number below 1 in any of the fields, which hold numbers, tuples of numbers or None."""
    for name in fields:
        value = vars(settings)[name]
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a job writes; each has a class of its own, with the record's usual place.

    Attributes:
        out: JSON record; the table goes beside it
    """

    out: pathlib.Path = option(read=record_path)


@dataclasses.dataclass(frozen=True)
class PlottedOutput(Output):
    """Where a job writes that has a figure.

    Attributes:
        plot: draw the figure beside the record (needs matplotlib)
    """

    plot: bool = True


@dataclasses.dataclass(frozen=True)
class SpeedCommand(PlottedOutput):
    """Where `experiments.speed` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/speed.json"), read=record_path)


@dataclasses.dataclass(frozen=True)
class OffloadCommand(PlottedOutput):
    """Where `experiments.speed.offload` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/offload.json"), read=record_path)
