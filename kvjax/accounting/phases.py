"""The bytes of a method's cache, phase by phase, in a form that can be added up for any group of methods."""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes of a method's cache in one phase.

    Attributes:
        device: bytes on the device, without the bytes that other methods may share.
        host: bytes in pinned host memory.
        shared: bytes on the device of each storage that other methods may share; storage of equal keys exists once.
    """

    device: int
    host: int
    shared: Mapping[Hashable, int] = dataclasses.field(default_factory=dict)

    @property
    def alone(self) -> int:
        """The bytes on the device of a method that shares nothing."""
        return self.device + sum(self.shared.values())


@dataclasses.dataclass(frozen=True)
class Phases:
    """Bytes of a method's cache during prefill and after prefill; ``staged`` as in `kvjax.accounting.memory.Needed`."""

    reading: Part
    after: Part
    staged: int


def add_parts(parts: Iterable[Part]) -> Part:
    """Add up what exists together; storage of equal keys counts once."""
    device, host, shared = 0, 0, {}
    for part in parts:
        device, host = device + part.device, host + part.host
        shared.update(part.shared)
    return Part(device, host, shared)


def gib(size: int) -> str:
    """Write a number of bytes in GiB, or in MiB if it is smaller."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
