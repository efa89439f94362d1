"""The safetensors files of a Hugging Face directory: finding and checking them, and reading parts of parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
from safetensors import SafetensorError, safe_open

from ..sizes.architecture import Architecture
from . import four_bits
from .directories import leaves_folder, read_json
from .eight_bits import SCALE, numbers, problem
from .tables.checkpoint import EMBEDDING, LM_HEAD, tensor_problems
from .tables.families import FAMILIES
from .tables.leaf import AnyLeaf, Index, Parts

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FILE_DTYPES = ("F32", "F16", "BF16", "I8")
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_BUFFERS = (".rotary_emb.inv_freq",)  # in files of old versions; computed from the config here


@dataclasses.dataclass(frozen=True)
class SafeTensors:
    """The tensors of a directory, which stay in their files until they are read.

    Attributes:
        directory: the directory of the files.
        files: the file of each tensor.
        tied: whether the embedding and the LM head are one parameter.
    """

    directory: Path
    files: Mapping[str, Path]
    tied: bool

    @classmethod
    def of(cls, directory: Path, config: Architecture, table: list[AnyLeaf]) -> SafeTensors:
        """Find and check the tensors that ``table`` asks for."""
        files = _tensor_files(directory)
        tensors = cls(directory, files, config.tie_word_embeddings)
        _check(directory, config, [dataclasses.replace(leaf, names=tensors.names(leaf)) for leaf in table], files)
        return tensors

    def names(self, leaf: AnyLeaf) -> tuple[str, ...]:
        """Name the tensors of a parameter in the files. A tied embedding may be stored only under the LM head's name."""
        embedding, head = (_stored(self.files, name) for name in (EMBEDDING, LM_HEAD))
        moved = self.tied and embedding not in self.files and head in self.files
        return tuple(head if moved and name == EMBEDDING else _stored(self.files, name) for name in leaf.names)

    def parts(self, leaf: AnyLeaf, dtype: np.dtype) -> Parts:
        """Return a function that reads a part of a parameter in ``dtype``, and nothing but that part from the files."""

        def read(index: Index) -> np.ndarray:
            part, rows = leaf.part(index)
            tensors = [self._read(name, at) for name, at in zip(self.names(leaf), rows, strict=True)]
            embedding, head = (_stored(self.files, name) for name in (EMBEDDING, LM_HEAD))
            if self.tied and leaf.names == (EMBEDDING,) and {embedding, head} <= self.files.keys():
                if not np.array_equal(tensors[0], self._read(head, rows[0])):
                    raise ValueError(f"{self.directory}: embeddings are tied, but {embedding} and {head} differ")
            return np.ascontiguousarray(part.join([tensor.astype(dtype, copy=False) for tensor in tensors]))

        return read

    def _read(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a tensor in the file's dtype; of a tensor in 8 or 4 bits, its numbers in float32 or bfloat16."""
        if name not in self.files and len(index) == 3:
            names = (name + four_bits.BLOCKS, name + four_bits.SCALES)
            with contextlib.ExitStack() as stack:
                opened = [stack.enter_context(safe_open(self.files[each], framework="numpy")) for each in names]
                blocks, scales = (one.get_slice(each) for one, each in zip(opened, names, strict=True))
                return four_bits.numbers(blocks, scales, cast("tuple[slice, slice, slice]", index))
        with safe_open(self.files[name], framework="numpy") as opened:
            return numbers(opened, name, index)


def _stored(files: Mapping[str, Path], name: str) -> str:
    """Return the name of a tensor in files that hold an encoder of images beside the text model, or else ``name``."""
    if any(other.startswith("language_model.") for other in files):
        return f"language_model.{name}"
    if any(other.startswith("model.language_model.") for other in files) and name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Find the file of every tensor, by the tensor's name. A single file comes before an index, as in transformers."""
    single, index = directory / WEIGHTS, directory / _INDEX
    if single.is_file():
        files = [single]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index} must map tensor names to files under 'weight_map'")
        if outside := [file for file in weight_map.values() if leaves_folder(file)]:
            raise ValueError(f"{index} must name files of its own directory, got {outside[0]!r}")
        files = [directory / file for file in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(absent)}")
    else:
        others = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file()) or "no .safetensors file"
        if pickled := sorted(path.name for path in directory.glob("pytorch_model*.bin")):
            others = f"{pickled[0]}, a pickle, which is not read: transformers' save_pretrained writes safetensors"
        raise FileNotFoundError(f"no {WEIGHTS} or {_INDEX} in {directory}, found {others}")
    sources = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                names = list(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: got {file.stat().st_size} bytes, {error}") from error
        sources.update(dict.fromkeys(names, file))
    return sources


def _check(directory: Path, config: Architecture, table: list[AnyLeaf], sources: dict[str, Path]) -> None:
    """Refuse tensors that do not fit the table, with one message for all of them."""
    expected = {name: leaf.file_shape(i) for leaf in table for i, name in enumerate(leaf.names)}
    if config.tie_word_embeddings and (head := _stored(sources, LM_HEAD)) in sources:
        expected[head] = (config.vocab_size, config.hidden_size)  # a second copy is allowed
    shapes, dtypes, problems = {}, {}, []
    prefix = FAMILIES[config.family].unread if config.family else ""
    # DeepSeek's files may have one more layer, which guesses the token after the next.
    drafts = f"model.layers.{config.num_layers}." if config.family and FAMILIES[config.family].router else ""
    images = _IMAGES if _stored(sources, EMBEDDING) != EMBEDDING else ()
    unread = tuple(filter(None, (prefix, drafts, *images)))
    for file in sorted(set(sources.values())):
        with safe_open(file, framework="numpy") as opened:
            names = opened.keys()  # the opened file itself is not iterable
            codes = {name for name in names if opened.get_slice(name).get_dtype() == "I8"}
            for name in names:
                if name in codes and (wrong := problem(opened, name)):
                    problems.append(wrong)
                of_scales = name.endswith(SCALE) and name.removesuffix(SCALE) in codes
                if name in expected or not (name.endswith(_BUFFERS) or of_scales or name.startswith(unread)):
                    shapes[name], dtypes[name] = (
                        tuple(opened.get_slice(name).get_shape()),
                        opened.get_slice(name).get_dtype(),
                    )
    for name in expected.keys() - shapes.keys():
        if (shape := four_bits.whole_shape(name, shapes, dtypes)) is not None:
            for end in (four_bits.BLOCKS, four_bits.SCALES):
                del shapes[name + end]
            shapes[name], dtypes[name] = shape, _FILE_DTYPES[0]
    problems = tensor_problems(expected, shapes) + problems
    for name in sorted(expected.keys() & shapes.keys()):
        if dtypes[name] not in _FILE_DTYPES:
            problems.append(f"wrong dtype {name}: got {dtypes[name]}, expected one of {', '.join(_FILE_DTYPES)}")
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"{directory} does not hold the model of its config.json:\n  {lines}")
