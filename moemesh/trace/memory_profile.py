"""Contents of memory per rank, predicted or measured.

All numbers are bytes. The parts are those of the training state, each at its own maximum; `peak` is
the highest use at any one moment. So it may be less than the sum of the parts, or more, because of
memory outside of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moemesh.trace.strict_json import read_fields

#: Kinds of activations: the residual stream at the ends of the model and before recomputed layers,
#: the parts of layers, head and loss, logits of the current chunks of the loss, tensors kept only
#: for deferred weight gradients, and others.
ACTIVATION_KINDS: tuple[str, ...] = (
    *("stream", "norms", "attention", "mlp", "router", "dispatch", "experts", "head"),
    *("logits", "deferred", "other"),
)
LOGITS, DEFERRED, OTHER = ACTIVATION_KINDS[-3:]

#: Names of figures of memory, for every verb and page. *Held* memory is the sum of
#: :data:`PARTS`, such as weights and gradients. The peak of a *device* adds the overhead of
#: allocator and libraries. The measured peak is that of torch's *allocator* on a GPU, and of the
#: whole *process* on a CPU, torch itself included, so it exceeds the held memory.
PREDICTED_HELD, MEASURED_HELD = "held, predicted", "held, measured"
PREDICTED_PEAK = "device peak, predicted"
MEASURED_PEAKS = {
    "allocator": "allocator peak, measured",
    "process": "process peak, measured",
    "": "peak, measured",
}

#: Smallest number of elements of each operand for which an elementwise function runs in one
#: compiled pass on a CPU and keeps only its input (:mod:`moemesh.ops.fusion`); for fewer, torch's
#: operations keep copies.
ONE_PASS_NUMBERS = 1 << 16
#: Largest ratio of positions to channels of a head at which attention in bfloat16 on a CPU uses
#: :func:`moemesh.ops.attention.backward_in_rows`, for which no output is kept.
ROW_POSITIONS = 16

#: Vocabulary rows of one chunk of our loss (:mod:`moemesh.ops.cross_entropy`).
LOSS_ROWS = 8192

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Memory of one rank in bytes.

    `dense_weights` are held by every expert-parallel rank, `expert_weights` are of its experts;
    `gathered_weights` are full units of sharded weights during their use; `weight_versions` are
    older weights of asynchronous schedules; `optimizer` includes main (fp32) copies of the weights;
    `buffers` are communication and other work space; `snapshots` are copies for a rollback of an
    update; `host` is the memory of the host for an offloaded optimizer, which is in no other part.
    `activation_kinds` (:data:`ACTIVATION_KINDS`) are the parts of the activations.
    `peak_of` is the source of the measured peak: "allocator", "process", or "" in older files.
    Raises ValueError for a negative number.
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
    host: int = 0
    peak: int = 0
    activation_kinds: Mapping[str, int] = field(default_factory=dict[str, int])
    peak_of: str = ""

    def __post_init__(self) -> None:
        for name, number in {
            **self.parts(),
            "host": self.host,
            "peak": self.peak,
            **self.activation_kinds,
        }.items():
            if number < 0:
                raise ValueError(f"{name} is {number} < 0")

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

    def to_json(self) -> dict[str, Any]:
        numbers = {name: int(getattr(self, name)) for name in ("rank", *PARTS, "peak")}
        row = {**numbers, "activation_kinds": dict(self.activation_kinds)}
        row |= {"host": self.host} if self.host else {}
        return {**row, "peak_of": self.peak_of} if self.peak_of else row

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryProfile:
        """Inverse of :meth:`to_json`; missing parts are 0, unknown keys are ignored."""
        kinds = {kind: int(size) for kind, size in data.get("activation_kinds", {}).items()}
        return read_fields(cls, {**data, "activation_kinds": kinds})


#: Parts in the order of pictures and tables.
PARTS: tuple[str, ...] = tuple(
    item.name
    for item in fields(MemoryProfile)
    if item.type == "int" and item.name not in ("rank", "host", "peak")
)


@dataclass(frozen=True, kw_only=True)
class MemoryProfiles:
    """Profiles of all ranks, ordered by rank: `ranks` are measured. Raises ValueError for a
    repeated rank."""

    ranks: tuple[MemoryProfile, ...]
    predicted: tuple[MemoryProfile, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "predicted"):
            profiles: tuple[MemoryProfile, ...] = getattr(self, name)
            numbers = [profile.rank for profile in profiles]
            if len(set(numbers)) != len(numbers):
                raise ValueError(f"memory of ranks {sorted(numbers)}: a rank comes twice")
            ordered = sorted(profiles, key=lambda profile: profile.rank)
            object.__setattr__(self, name, tuple(ordered))

    @property
    def peak(self) -> int:
        """The highest peak of all ranks, 0 without ranks."""
        return max((profile.peak for profile in self.ranks), default=0)

    @property
    def peak_words(self) -> str:
        """Name of the measured peak, one of :data:`MEASURED_PEAKS`."""
        sources = {profile.peak_of for profile in self.ranks}
        return MEASURED_PEAKS.get(sources.pop() if len(sources) == 1 else "", MEASURED_PEAKS[""])

    @property
    def total(self) -> int:
        """Sum over all ranks and parts."""
        return sum(profile.total for profile in self.ranks)

    def to_json(self) -> dict[str, Any]:
        content = {"ranks": [profile.to_json() for profile in self.ranks]}
        if self.predicted:
            content["predicted"] = [profile.to_json() for profile in self.predicted]
        return content

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryProfiles:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError, ValueError, AttributeError or
        OverflowError on other data."""
        ranks, predicted = (
            tuple(MemoryProfile.from_json(profile) for profile in profiles)
            for profiles in (data["ranks"], data.get("predicted", ()))
        )
        return cls(ranks=ranks, predicted=predicted)


def logits_per_token(rows: Any, least: Callable[[Any, int], Any] = min) -> Any:
    """Maximum number of logits and gradients of logits that our loss holds for a token at one time,
    with `rows` rows of the vocabulary on a rank. `least`: minimum function for the type of `rows`.

    The logits of one chunk and their gradient end before those of the next chunk are computed.

    >>> logits_per_token(5_000), logits_per_token(10_000), logits_per_token(150_000)
    (10000, 16384, 16384)
    """
    return 2 * least(rows, LOSS_ROWS)


def format_bytes(size: float) -> str:
    """A size in bytes as text, with units of powers of 1024.

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
