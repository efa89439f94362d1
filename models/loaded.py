"""A model that is ready to be asked: its parameters, its description, its tokenizer and its chat template."""

import atexit
import dataclasses
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from tokenizers import Tokenizer

from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.machine import default_platform

from .config import ModelConfig
from .files import gguf as gguf_files
from .files.coded import check_weight_dtype
from .files.directories import checkpoint_directory, locate_gguf
from .hub.named_models import NAMED_MODELS
from .layers.modules import shape_of
from .sizes.architecture import check_dtype
from .text.chat import ChatTemplate
from .text.tokenizer import check_unicode, load_tokenizer, opening_ids
from .weights import from_pretrained


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer and its chat template, as `load` reads them.

    Attributes:
        name: the name for tables.
        params: the parameters.
        config: the description.
        tokenizer: the tokenizer.
        directory: the directory of tokenizer.json.
        mesh: the devices over which the parameters are spread; None means one device.
    """

    name: str
    params: Any
    config: ModelConfig
    tokenizer: Tokenizer
    directory: pathlib.Path
    mesh: Mesh | None = None

    def __repr__(self) -> str:
        shapes = jax.tree.leaves_with_path(self.params, is_leaf=lambda leaf: isinstance(leaf, CodedMatrix))
        count = sum(math.prod(shape_of(str(path[-1].key), leaf)) for path, leaf in shapes)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params)) / 1e6
        coded = any(isinstance(leaf, CodedMatrix) for _, leaf in shapes)
        kind = f"codes and {self.config.dtype}, {held:.0f} MB" if coded else self.config.dtype
        return f"Loaded({self.name!r}, {count / 1e6:.0f}M parameters in {kind}, config={self.config})"

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the checkpoint has none."""
        return ChatTemplate.from_directory(self.directory)

    def encode(
        self,
        context: str,
        question: str = "",
        *,
        template: bool = True,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Encode a user's message in two parts: up to the context's end, and from the question on.

        The chat template goes around both parts, so the second part ends where the assistant's answer begins. Without a
        template the first part begins with the tokenizer's opening, once. No special token stands between the parts.

        Args:
            context: the text that is prefilled.
            question: the text that follows.
            template: whether to use the chat template, if there is one.
            system: the system message; None means the template's own.
            variables: other variables of the template, such as {"enable_thinking": False}.

        Returns:
            The token ids of the two parts.

        Raises:
            ValueError: the template cannot be split around a message, there is a system message and no template, or a text is
                no Unicode.
        """
        chat = self.template if template else None
        if chat is not None:
            before, after = chat.around(system, **(variables or {}))
        elif system is not None:
            raise ValueError(f"a system message needs a chat template, which {self.name} lacks, got {system!r:.60}")
        else:
            before, after = "", ""
        for text in (before + context, question + after):
            check_unicode(text)
        first, last = (self.tokenizer.encode(x, add_special_tokens=False).ids for x in (before + context, question + after))
        opening = [] if before else opening_ids(self.tokenizer)
        return (first if first[: len(opening)] == opening else opening + first), last


def load(
    model: str | os.PathLike[str] = "builtin",
    dtype: str | None = None,
    *,
    offline: bool = False,
    mesh: Mesh | None = None,
    weight_dtype: str | None = None,
) -> Loaded:
    """Load a named model, a Hugging Face directory, a GGUF file or a repository of the hub, with all that it takes to ask it.

    Args:
        model: a GGUF file, or see `checkpoint_directory`; a named model or a repository is downloaded if it is absent.
        dtype: dtype of computation; None takes float32 on a CPU and bfloat16 elsewhere.
        offline: whether to raise an error instead of downloading.
        mesh: the devices over which the parameters are spread; None means one device.
        weight_dtype: "int8" or "int4" keeps kernels and tables in 8 or 4 bits, see `from_pretrained`.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the checkpoint is damaged or of an unknown kind, the mesh does not divide it, or it has experts and is to
            have codes.
        OSError: a download failed.
    """
    check_dtype(dtype)  # before a download
    check_weight_dtype(weight_dtype)
    name = str(model)
    gguf = locate_gguf(model, offline=offline)
    directory = checkpoint_directory(model, offline=offline) if gguf is None else _tokenizer_directory(gguf)
    if dtype is None:
        dtype = "float32" if default_platform() == "cpu" else "bfloat16"
    params, config = from_pretrained(model, dtype=dtype, offline=offline, mesh=mesh, weight_dtype=weight_dtype)
    tokenizer = load_tokenizer(directory if gguf is None else gguf, config)  # its errors name the user's file
    if gguf is not None:
        name = gguf.stem
    elif name not in NAMED_MODELS and pathlib.Path(name).expanduser().is_dir():
        name = directory.resolve().name
    return Loaded(name, params, config, tokenizer, directory, mesh)


def _tokenizer_directory(gguf: pathlib.Path) -> pathlib.Path:
    """Make a directory with the tokenizer and the chat template of a GGUF file; it is deleted when this process ends."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    gguf_files.save_tokenizer(gguf_files.open_file(gguf), directory)
    return directory
