"""The settings of `experiments.speed` and its offloading, and the model shapes that they know."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Self

import jax
from jsonargparse.typing import PositiveInt

from experiments.answering import WEIGHT_DTYPES, mesh_axes
from experiments.cli import Settings, option, record_path
from experiments.speed.variants import VARIANTS
from kvjax.cache.quantised import check_kv_dtype
from models import ModelConfig, shapes
from pallas_kernels.axes import DATA

_SMALL = ModelConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=1024, num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64,
    max_position_embeddings=1 << 20,
)  # fmt: skip
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama-3.1-8b": shapes.llama31_8b,
    # An eighth of the layers, for prompts that all layers would take minutes to prefill. A layer's time is the same in both.
    "llama-3.1-8b-4-layers": lambda: dataclasses.replace(shapes.llama31_8b(), num_layers=4),
    "llama-3.1-70b": shapes.llama31_70b,
    "qwen2.5-1.5b": shapes.qwen25_1_5b,
    "qwen3-8b": shapes.qwen3_8b,
    "llama-3.2-1b": shapes.llama32_1b,
    "qwen3-0.6b": shapes.qwen3_0_6b,
    "small": lambda: _SMALL,
}
CHUNK_SIZE = 8192  # tokens of a pass, of all rows together
MOST_ROWS = 64
_ON_CPU, _ELSEWHERE = ("small", 4096), ("llama-3.1-8b", 131072)  # the model and the length of a command that names none
_MODES = ("prefill", "largest_batch")  # what is timed instead of decode steps
# A setting on the left has no meaning without the one on the right, or beside it.
_NEEDS = {"chunk_size": "prefill", "most_rows": "largest_batch", "beside_one": "mesh"}
_EXCLUDES = {"largest_batch": ("prefill", "mesh", "batches"), "split": _MODES}


@dataclasses.dataclass(frozen=True)
class RowSettings(Settings):
    """The rows that `experiments.speed` and `experiments.speed.offload` time.

    Attributes:
        model: shape of the model, which gets random weights (default llama-3.1-8b; on a CPU small)
        methods: comma-separated, or 'all'
        lengths: comma-separated, tokens stored before decoding (default 131072; on a CPU 4096)
        batches: comma-separated, rows decoded or read together
        tokens: tokens decoded per repeat, in one program
        repeats: measurements of each row
        chunk_size: of prefill: tokens of a pass, of all rows together (default 8192)
        knobs: a knob of a method; repeatable
        kv_dtype: comma-separated, int8, float8_e4m3fn, k8v4 or int4: every method is timed with keys and values in these,
            too, in rows named METHOD@KV_DTYPE

    Raises:
        ValueError: an unknown model, method or dtype.
    """

    model: str = ""
    methods: tuple[str, ...] = ("full", "snapkv", "quest")
    lengths: tuple[PositiveInt, ...] = ()
    batches: tuple[PositiveInt, ...] = (1,)
    tokens: PositiveInt = 32
    repeats: PositiveInt = 5
    chunk_size: PositiveInt | None = None
    knobs: tuple[str, ...] = option((), flag="set", repeat=True, metavar="METHOD.KNOB=VALUE")
    kv_dtype: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.model, self.methods)
        for kind in self.kv_dtype:
            check_kv_dtype(kind)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of `VARIANTS` that are timed; each again with every `kv_dtype`."""
        names = VARIANTS if self.methods == ("all",) else self.methods
        return tuple(row for name in names for row in (name, *(f"{name}@{kind}" for kind in self.kv_dtype)))

    def on_device(self) -> Self:
        """Name the model and the lengths of settings that leave them out: small ones if JAX runs on a CPU."""
        model, length = _ON_CPU if jax.default_backend() == "cpu" else _ELSEWHERE
        return dataclasses.replace(self, model=self.model or model, lengths=self.lengths or (length,))


def check_names(model: str, methods: tuple[str, ...]) -> None:
    """Refuse an unknown model or method by a ValueError; no name of a model is allowed."""
    if model and model not in MODELS:
        raise ValueError(f"unknown model {model!r}, expected one of {', '.join(MODELS)}")
    for name in methods if methods != ("all",) else ():
        if name not in VARIANTS:
            raise ValueError(f"unknown method {name!r}, expected one of {', '.join(VARIANTS)}")


@dataclasses.dataclass(frozen=True)
class SpeedSettings(RowSettings):
    """What `experiments.speed` times.

    Attributes:
        methods: comma-separated, or 'all'; Full is always run first
        batches: comma-separated, rows decoded or read together (default 1)
        mesh: the devices over which the model, the rows or the slots of a row are spread, such as data=1,model=2 or slots=2
            (default: one device)
        beside_one: with --mesh: time every row on one device before, in the same run
        split: split the time of a decode step into the method's part and the rest (default: yes, on one device)
        prefill: time prefill instead
        largest_batch: look for the largest batch instead of --batches
        most_rows: with --largest-batch: where to begin at most (default 64)
        weight_dtype: keep kernels and tables in int8 or int4; the rows' model is named MODEL@WEIGHT_DTYPE

    Raises:
        ValueError: an unknown model or method, or a setting that has no meaning beside the others.
    """

    batches: tuple[PositiveInt, ...] = ()
    mesh: str | None = None
    beside_one: bool = False
    split: bool | None = None
    prefill: bool = False
    largest_batch: bool = False
    most_rows: PositiveInt | None = None
    weight_dtype: str | None = option(None, choices=WEIGHT_DTYPES)

    @property
    def shown_model(self) -> str:
        """The model's name in rows, with the dtype of its codes if it has any."""
        return self.model if self.weight_dtype is None else f"{self.model}@{self.weight_dtype}"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, need in _NEEDS.items():
            if vars(self)[name] and not vars(self)[need]:
                raise ValueError(f"{_flag(name)} has no meaning without {_flag(need)}")
        for name, others in _EXCLUDES.items():
            if vars(self)[name] and (clash := [other for other in others if vars(self)[other]]):
                raise ValueError(f"{_flag(name)} has no meaning with {_flag(clash[0])}")
        self._check_mesh()

    def _check_mesh(self) -> None:
        axes = mesh_axes(self.mesh)
        if self.split and axes and not self.beside_one:
            raise ValueError("--split has no meaning with --mesh: only decode steps on one device are split")
        for batch in self.batches or (1,):
            if axes and batch % axes[DATA]:
                raise ValueError(f"--batches must be multiples of the {axes[DATA]} devices of the axis {DATA!r}, got {batch}")

    @property
    def splits(self) -> bool:
        """Whether the time of decode steps is split."""
        return self.split is not False and self.mesh is None

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of `VARIANTS` that are timed, Full first; each again with every `kv_dtype`."""
        return tuple(dict.fromkeys(["full", *(f"full@{kind}" for kind in self.kv_dtype), *super().variants]))


@dataclasses.dataclass(frozen=True)
class OffloadSettings(RowSettings):
    """What `experiments.speed.offload` times.

    Attributes:
        methods: comma-separated, or 'all'; those that cannot offload run resident
        share: share of the layers in host memory, above 0 and at most 1; 'fit' keeps on the device those that fit
        no_resident: measure from host memory only
        prompts: time prefill into host memory instead

    Raises:
        ValueError: an unknown model or method, a share out of range, or a setting that has no meaning beside the others.
    """

    methods: tuple[str, ...] = ("pariskv",)
    share: float | str = 1.0
    no_resident: bool = False
    prompts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share != "fit" and (isinstance(self.share, str) or not 0 < self.share <= 1):
            raise ValueError(f"share must be 'fit' or a number above 0 and at most 1, got {self.share!r}")
        if self.chunk_size is not None and not self.prompts:
            raise ValueError("--chunk-size has no meaning without --prompts")
        if self.no_resident and self.prompts:
            raise ValueError("expected at most one of no_resident and prompts")

    @property
    def speed(self) -> SpeedSettings:
        """These settings as settings of `experiments.speed`, whose `Bench` measures the rows."""
        shared = {field.name: vars(self)[field.name] for field in dataclasses.fields(RowSettings)}
        return SpeedSettings(**shared, split=False, prefill=self.prompts)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a job writes; each has a class of its own, with the record's usual place.

    Attributes:
        out: JSON record; the table goes beside it
    """

    out: pathlib.Path = option(read=record_path)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
