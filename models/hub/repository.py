"""Repositories of the Hugging Face hub: find a snapshot in the local cache of ``huggingface_hub``, or download it."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .progress import megabytes, on_terminal, say

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_WANTED = (  # the files that this package reads, and the licence; no weights in other formats
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|"
    r"chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|model\.safetensors\.index\.json|model[^/]*\.safetensors|"
    r"README\.md|LICEN[CS]E[^/]*"
)


def repository_directory(name: str, *, offline: bool = False) -> Path:
    """Return the snapshot of a repository in the local cache; download it if it is absent or not whole.

    A cached snapshot is used without asking the hub for a newer version. After an interruption, whole files are not
    downloaded again.

    Args:
        name: "owner/name".
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the repository is not in the cache and ``offline``, or the hub does not have it.
        PermissionError: the repository is gated.
        ConnectionError: there is no network.
        ValueError: the repository has no weights in the format safetensors.
        OSError: the cache cannot be written, or there is no space.
    """
    snapshot = _cached(name)
    if snapshot is not None and is_whole(snapshot):
        return snapshot
    if offline or hub_is_offline():
        if snapshot is not None and _has_weights(
            snapshot
        ):  # a snapshot without tokenizer: another program may not have wanted one
            return snapshot
        raise FileNotFoundError(
            f"{name} is neither a directory nor whole in the local cache of the hub, and it may not be downloaded "
            f"(offline=True, --offline or HF_HUB_OFFLINE); `kvjax fetch {name}` gets it once"
        )
    return _download(name)


def is_whole(snapshot: Path) -> bool:
    """Tell whether a snapshot has a config, a tokenizer and all weights."""
    return _has_weights(snapshot) and (snapshot / "tokenizer.json").is_file()


def _has_weights(snapshot: Path) -> bool:
    if not (snapshot / _CONFIG).is_file():
        return False
    if (snapshot / _WEIGHTS).is_file():
        return True
    try:
        shards = set(json.loads((snapshot / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return all((snapshot / shard).is_file() for shard in shards)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def _cached(name: str) -> Path | None:
    """Find the snapshot of the repository's main branch in the local cache, whole or not."""
    import huggingface_hub

    try:
        config = huggingface_hub.try_to_load_from_cache(name, _CONFIG)
    except ValueError:  # not a name that a repository can have
        return None
    return Path(config).parent if isinstance(config, str) else None


def _download(name: str) -> Path:
    """Download a repository and return its snapshot. The config comes last: a snapshot with a config has all its files."""
    import huggingface_hub
    from huggingface_hub import constants

    missed = f"no model directory {name}, and the hub cannot be reached to look for a repository of this name"
    with one_sentence(name, missed):
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = wanted_files(sizes)
    if _CONFIG not in wanted or not any(file in wanted for file in (_WEIGHTS, _INDEX)):
        raise ValueError(_unreadable(name, sizes))
    licence = next(
        (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")), "not stated"
    )
    say(
        f"{name} (licence: {licence}) is not on this machine: downloading {megabytes(sum(sizes[file] for file in wanted))} "
        f"in {len(wanted)} files from the hub, into {constants.HF_HUB_CACHE}"
    )
    first = [file for file in wanted if file != _CONFIG]
    broken = f"the download of {name} broke off; files that are whole are kept for the next try"
    with one_sentence(name, broken), no_bars_in_logs():
        huggingface_hub.snapshot_download(name, allow_patterns=[re.sub(r"([*?[])", r"[\1]", file) for file in first])
        snapshot = Path(huggingface_hub.hf_hub_download(name, _CONFIG)).parent
    if not all((snapshot / file).is_file() for file in wanted):
        raise OSError(f"{name} was changed on the hub during the download; try again")
    say(f"{name} is in {snapshot}")
    return snapshot


@contextlib.contextmanager
def no_bars_in_logs() -> Iterator[None]:
    """Turn the bars of ``huggingface_hub`` off where no terminal shows them, unless the user has set them on or off."""
    from huggingface_hub import constants, utils

    if on_terminal() or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def wanted_files(files: Sequence[str] | dict[str, Any]) -> list[str]:
    """Select the files of a repository that this package reads: one file of weights or the shards, never both."""
    wanted = [file for file in files if re.fullmatch(_WANTED, file)]
    if _WEIGHTS in wanted:
        wanted = [file for file in wanted if file == _WEIGHTS or not file.startswith("model")]
    return wanted


def _unreadable(name: str, files: Sequence[str] | dict[str, Any]) -> str:
    """Explain why this package cannot read the files of a repository as a model."""
    other = sorted({Path(file).suffix for file in files} & {".gguf", ".bin", ".pth", ".pt", ".safetensors", ".onnx"})
    found = f"it has weights as {', '.join(other)}" if other else "it has no weights"
    more = "; download one of its .gguf files and pass the path" if ".gguf" in other else ""
    return f"{name} has no {_CONFIG} with {_WEIGHTS} or {_INDEX}: {found}{more}"


@contextlib.contextmanager
def one_sentence(name: str, otherwise: str) -> Iterator[None]:
    """Turn the errors of ``huggingface_hub`` into single sentences; ``otherwise`` is used for a broken connection."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} is gated: accept its conditions on its page at the hub, log in with `hf auth login`, and try again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no model directory {name}, and the hub has no repository of this name, or it is private (then log in with "
            "`hf auth login`)"
        ) from error
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"no model directory {name}, and no repository can have this name") from error
    except Exception as error:  # also errors of the HTTP client, which are no OSErrors and differ by version
        cause = _cause(error)
        code = cause.errno if isinstance(cause, OSError) else None
        text = " ".join(str(cause).split())[:200]
        if code in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in text:
            said = f"no space for {name} in the local cache of the hub; files that are whole are kept for the next try"
            raise OSError(errno.ENOSPC, said) from error
        if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise OSError(code, f"{name} cannot be written to the local cache of the hub: {cause}") from error
        if isinstance(cause, errors.HfHubHTTPError):
            raise OSError(f"the hub does not give {name}: {text}") from error
        raise ConnectionError(f"{otherwise} ({type(cause).__name__}: {text})") from error


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a chain of causes; an error of the HTTP client is not traced further."""
    from huggingface_hub import errors

    while error.__cause__ is not None and not isinstance(error, errors.HfHubHTTPError):
        error = error.__cause__
    return error


def hub_is_offline() -> bool:
    """Tell whether the user forbids downloads by HF_HUB_OFFLINE, an environment variable that ``huggingface_hub`` reads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
