"""Files of a directory that are replaced together."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

_SCRATCH = ".saving"  # a folder in the directory, which exists while the files are written


@contextlib.contextmanager
def replaced_files(directory: str | os.PathLike[str], names: Sequence[str]) -> Iterator[Path]:
    """Yield a scratch folder for new files, which replace the old files of ``directory`` when the block ends.

    If the block raises, the directory stays unchanged. Where files cannot be moved, or a process is killed while it moves
    them, the directory lacks the last of ``names``; it is never a mixture.
    """
    directory = Path(directory)
    created, scratch = not directory.exists(), directory / _SCRATCH
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(scratch / "lock", timeout=0):  # the operating system drops it when a process ends, however it ends
            try:
                yield scratch
                (directory / names[-1]).unlink(missing_ok=True)
                for name in names:
                    (scratch / name).chmod(0o644)  # safetensors makes files that nobody else may read
                    os.replace(scratch / name, directory / name)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout:
        raise ValueError(f"another process is writing to {directory}, expected one at a time") from None
    finally:
        if created and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
