"""Settings of benchmarks: options of a verb, checked before a rank starts."""

# Light to import: the command line reads its options from it.
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from moemesh.config.errors import UserError

#: Operations of `bench links`: collectives, and messages between two ranks.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class BenchError(UserError):
    """Settings of a benchmark that do not fit together."""


def described(kinds: dict[str, str]) -> str:
    """A line for each name and its meaning."""
    width = max(map(len, kinds))
    return "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in kinds.items())


def names_in(text: str, known: dict[str, str] | tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names of `text` ("W0,W3" or "all"). Raises BenchError with the known names, and with
    their meanings where `known` has them."""
    names = tuple(known) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in known:
            choices = (
                ":\n" + described(known)
                if isinstance(known, dict)
                else f": all, or some of {', '.join(known)}"
            )
            raise BenchError(f"no {what} {name!r} here{choices}")
    return names


def counts_in(text: str) -> tuple[int, ...]:
    """Numbers of ranks such as "1,4". Raises BenchError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f'--ranks "{text}": numbers of at least 1 with commas, such as 1,4')
    return tuple(map(int, words))


class Settings:
    """Base of all settings: fields with `Annotated[type, help, keywords]` are options."""

    def __post_init__(self) -> None:
        for name, hint in self._options().items():
            choices = get_args(get_args(hint)[0])
            if choices and (value := getattr(self, name)) not in choices:
                raise BenchError(f"no {name} {value!r}: choose from {', '.join(choices)}")
        self.check()

    def check(self) -> None:
        """Raises BenchError for values that do not fit together."""

    def words(self) -> list[str]:
        """Options and values of a command line that has these settings."""
        values = ((name, getattr(self, name)) for name in self._options())
        options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values)
        return [word for option in options for word in option]

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def _options(cls) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    if part < 1 or whole % part:
        raise BenchError(f"{part_name} ({part}) must divide {whole_name} ({whole})")


@dataclass(frozen=True, kw_only=True)
class HostSettings(Settings):
    """Ranks on nodes, or on emulated hosts."""

    ranks: Annotated[int, "Ranks; all share the experts.", {"min": 1}] = 4
    ranks_per_node: Annotated[int, "Ranks of a node; 0: one node.", {"min": 0}] = 0
    hosts: Annotated[int, "Emulate as many hosts (Linux, root); 0: none.", {"min": 0}] = 0
    link: Annotated[str, "Rate of each host's link."] = "1gbit"

    def check(self) -> None:
        from moemesh.bench.hosts import link_rate

        check_divides("ranks-per-node", self.node, "ranks", self.ranks)
        if self.hosts:
            link_rate(self.link)
            check_divides("hosts", self.hosts, "ranks", self.ranks)
            if self.ranks_per_node not in (0, self.ranks // self.hosts):
                raise BenchError(
                    f"{self.hosts} hosts of {self.ranks // self.hosts} ranks are not "
                    f"ranks-per-node {self.ranks_per_node}"
                )

    @property
    def node(self) -> int:
        """Ranks of one node."""
        if self.hosts:
            return max(1, self.ranks // self.hosts)
        return self.ranks_per_node or self.ranks


@dataclass(frozen=True, kw_only=True)
class LinksSettings(HostSettings):
    """Measurements of operations on tensors of these `sizes`, in bytes of the full tensor."""

    ranks: Annotated[int, "Ranks at hand."] = 4
    sizes: Annotated[str, "Bytes of the full tensor, with commas; k, m, g."] = "1k,8k,64k,512k,4m"
    operations: Annotated[str, "Names with commas, or all."] = "all"
    rounds: Annotated[int, "Timed repetitions.", {"min": 1}] = 9
    device: Annotated[Literal["cpu", "cuda"], "Device of the tensors."] = "cpu"

    def check(self) -> None:
        if self.ranks < 2:
            raise BenchError(f"ranks ({self.ranks}): a link joins at least 2")
        super().check()
        assert self.wanted
        if self.hosts and self.device == "cuda":
            raise BenchError("hosts are emulated for ranks on the CPU: device cpu, or hosts 0")
        if not self.num_bytes:
            raise BenchError(f"sizes {self.sizes!r}: at least one is needed, such as 1k,64k,4m")

    @property
    def wanted(self) -> tuple[str, ...]:
        return names_in(self.operations, OPERATIONS, "operation")

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Sizes in bytes, ascending. Raises BenchError for a word that is not a size."""
        sizes: set[int] = set()
        for word in filter(None, (part.strip().lower() for part in self.sizes.split(","))):
            unit = word[-1] if word[-1] in "kmg" else ""
            number = word.removesuffix(unit)
            if not number.isdecimal() or not 4 <= int(number) * _UNITS[unit] <= 2**32:
                raise BenchError(f"sizes: {word!r} must be a size from 4 to 4g, such as 64k")
            sizes.add(int(number) * _UNITS[unit])
        return tuple(sorted(sizes))
