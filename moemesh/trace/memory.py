"""Contents of memory, rank by rank, predicted or measured.

Everything in bytes. The parts are what the training state is made of; `peak` is the highest
use seen (or foreseen) at any one moment, so it may be less than the sum of the parts, each of which
is counted at its own largest, or more, by what no part explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

#: The parts in the order in which they are drawn and printed.
PARTS: tuple[str, ...] = (
    "dense_weights",
    "expert_weights",
    "gathered_weights",
    "weight_versions",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "snapshots",
)

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Bytes of one rank.

    `dense_weights` are held by every expert-parallel rank, `expert_weights` are its own experts;
    `gathered_weights` are whole units of weights that are kept as shards, while they are used;
    `weight_versions` are older weights that asynchronous schedules keep; `optimizer` includes main
    (fp32) copies of the weights; `buffers` are communication and other work space; `snapshots` are
    copies from which an update can be taken back. Raises ValueError for a negative number.
    """

    rank: int
    dense_weights: int = 0
    expert_weights: int = 0
    gathered_weights: int = 0
    weight_versions: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    snapshots: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)} < 0")

    @property
    def weights(self) -> int:
        """Dense and expert weights together."""
        return self.dense_weights + self.expert_weights

    @property
    def total(self) -> int:
        """Sum of all parts (not the peak)."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes of every part of :data:`PARTS`, in that order."""
        return {name: int(getattr(self, name)) for name in PARTS}

    def to_json(self) -> dict[str, int]:
        return {field.name: int(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryProfile:
        """Invert :meth:`to_json`; a part that is not named is 0, unknown keys are left out."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        return cls(**{name: int(value) for name, value in known.items()})


@dataclass(frozen=True, kw_only=True)
class MemoryProfiles:
    """The profiles of all ranks, ordered by rank. Raises ValueError when a rank comes twice."""

    ranks: tuple[MemoryProfile, ...]

    def __post_init__(self) -> None:
        numbers = [profile.rank for profile in self.ranks]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"memory of ranks {sorted(numbers)}: a rank comes twice")
        ordered = sorted(self.ranks, key=lambda profile: profile.rank)
        object.__setattr__(self, "ranks", tuple(ordered))

    @property
    def peak(self) -> int:
        """The highest peak of any rank, 0 when there is none."""
        return max((profile.peak for profile in self.ranks), default=0)

    @property
    def total(self) -> int:
        """Sum over all ranks and parts."""
        return sum(profile.total for profile in self.ranks)

    def to_json(self) -> dict[str, Any]:
        return {"ranks": [profile.to_json() for profile in self.ranks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryProfiles:
        """Invert :meth:`to_json`. Raises KeyError, TypeError or ValueError on other data."""
        return cls(ranks=tuple(MemoryProfile.from_json(profile) for profile in data["ranks"]))


def format_bytes(size: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> format_bytes(512), format_bytes(1536), format_bytes(80 * 2**30)
    ('512 B', '1.5 KiB', '80.0 GiB')
    """
    exponent = 0
    # 1023.95 would be printed as 1024.0.
    while abs(size) >= 1023.95 and exponent < len(_UNITS) - 1:
        size /= 1024
        exponent += 1
    digits = 0 if exponent == 0 and size == int(size) else 1
    return f"{size:.{digits}f} {_UNITS[exponent]}"
