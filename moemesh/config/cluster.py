"""The machine a plan is made for: nodes, memory, arithmetic, links and their measured times."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, ValidationError

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.limits import parse_toml
from moemesh.config.section import Positive, Range, Section, Size
from moemesh.config.sources import preset_names, read_preset_table
from moemesh.config.suggest import nearest_choice, nearest_name
from moemesh.config.toml import format_key, format_value, unreadable

if TYPE_CHECKING:
    from moemesh.config.devices import Accelerator

# Meanings, units and examples of the keys of a cluster file.


class ClusterKey(NamedTuple):
    """One key of a cluster file, for comments in the file and for messages. `names`: other words
    for the key, which a message corrects."""

    meaning: str
    unit: str
    example: str
    names: tuple[str, ...] = ()


KEYS = {
    name: ClusterKey(**row)
    for name, row in parse_toml(
        Path(__file__).with_name("cluster_keys.toml").read_text(encoding="utf-8")
    ).items()
}


def example(name: str) -> str:
    """The key with a value, as a line of the file: `nodes = 2`; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{name} = {key.example}" if key else ""


def meaning(name: str) -> str:
    """Meaning and unit for a message; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{key.meaning[0].lower()}{key.meaning[1:]} [{key.unit}]" if key else ""


LinkOperation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class LinkCurve(Section):
    """Measured times of one operation in one shape of group: ``seconds[i]`` for ``bytes[i]``.

    Bytes are those of the full tensor (for an all-to-all: of each rank), ascending. All groups of
    the shape ran at the same time; `members_per_node` ranks of a group share a node.
    """

    section: ClassVar[str] = "cluster.links"

    operation: LinkOperation
    ranks: int
    members_per_node: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def mistake(self) -> str:
        """The problem of the curve; "" if it is valid."""
        if self.ranks < 2:
            return f"a group has at least 2 ranks, not {self.ranks}"
        if not 1 <= self.members_per_node <= self.ranks:
            return f"members_per_node ({self.members_per_node}) must lie between 1 and ranks"
        if not self.bytes or len(self.bytes) != len(self.seconds):
            return f"{len(self.bytes)} bytes and {len(self.seconds)} seconds: one of each a size"
        if min(self.bytes) <= 0 or min(self.seconds) <= 0:
            return "bytes and seconds must be above 0"
        if any(b <= a for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            return "bytes must ascend"
        return ""


class OwnRun(Section):
    """A measured run: `seconds` of its step, and the seconds `predicted` from the constants alone.
    `left_out`: log of measured over predicted seconds if only the other runs correct the
    prediction. `weight`: its weight in corrections. `features`: numbers that identify similar runs.
    """

    section: ClassVar[str] = "cluster.own_runs"

    run: str
    seconds: float
    predicted: float
    left_out: float
    weight: float
    #: The release of its software: "stack 26.02".
    release: str = ""
    features: dict[str, float]


# Ranges that detect a wrong unit: a smaller rate was meant in GB/s, a larger latency in
# microseconds.
_Rate = Annotated[float, Range(1e5)]
_Latency = Annotated[float, Range(0.0, 1.0, open_high=True)]


class Cluster(Section):
    """Equal nodes of equal devices. Bandwidths are bytes/s in one direction for one device,
    latencies seconds, `peak_flops` dense operations/s by dtype ("bfloat16", "float8", ...).
    """

    section: ClassVar[str] = "cluster"

    name: str
    nodes: Size
    gpus_per_node: Size
    #: Memory of one device.
    memory_bytes: Annotated[int, Range(10**6)]
    memory_bandwidth: _Rate
    peak_flops: dict[str, float]
    intra_node_bandwidth: _Rate
    intra_node_latency: _Latency
    inter_node_bandwidth: _Rate
    inter_node_latency: _Latency
    #: The device by name ("H100-80G"), for constants that were calibrated on the same device.
    accelerator: str = ""
    #: Share of a device's memory that a job may take; None: as calibrated for the device.
    usable_share: Annotated[float, Range(0.0, 1.0, open_low=True)] | None = None
    #: Price of an hour of one device, in any currency: the planner then prints costs, too.
    gpu_hour_price: Positive | None = None
    #: Calibrated constants of the planner's time model by name, as `moemesh calibrate` writes them.
    constants: dict[str, float] = Field(default_factory=dict[str, float])
    #: Measured collectives, as `moemesh bench links` writes them: they replace the closed forms.
    links: tuple[LinkCurve, ...] = ()
    #: Runs of the cluster, as `moemesh calibrate` writes them: they correct predictions for similar
    #: layouts.
    own_runs: tuple[OwnRun, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def check(self) -> list[Problem]:
        """Problems with the rules of a cluster description; empty if it is valid."""
        problems = [
            replace(problem, message=f"{problem.message}: {meaning(name)}", fix=example(name))
            if (name := problem.key.rpartition(".")[2]) in KEYS
            else problem
            for problem in self.range_problems()
        ]
        faults = list[tuple[str, object, str, str]]()
        if not self.peak_flops:
            message = f"at least one number type: {meaning('peak_flops')}"
            faults.append(("peak_flops", None, message, example("peak_flops")))
        for dtype, flops in self.peak_flops.items():
            if flops < _SLOWEST:
                message = f"peak_flops of {dtype} must be at least {_SLOWEST:g}, not {flops:g}"
                fix = f"the dense peak in operations/s, such as 989.4e12, or leave {dtype} out"
                faults.append((f"peak_flops.{dtype}", flops, message, fix))
        for name, value in self.constants.items():
            if value <= 0:
                message = f"a calibrated constant is above 0, not {value}"
                fix = "leave it out; the planner has a default"
                faults.append((f"constants.{name}", value, message, fix))
        for number, curve in enumerate(self.links, start=1):
            if mistake := curve.mistake():
                message = f"the measured {curve.operation} of {curve.ranks} ranks: {mistake}"
                fix = "repeat `moemesh bench links`, or leave it out"
                faults.append((f"links.{number}", None, message, fix))
        for key, value, message, fix in faults:
            problems.append(Problem.of("out-of-range", f"cluster.{key}", value, message, fix))
        return problems

    def to_toml(self, heading: str, *, explained: bool = False) -> str:
        """The file that :func:`load_cluster` reads. `heading` becomes a comment; if `explained`,
        each key has a comment with its meaning and unit."""
        lines = [f"# {line}".rstrip() for line in heading.splitlines()]
        tables = ("peak_flops", "constants")

        def explain(name: str) -> None:
            if explained:
                key = KEYS[name]
                text = f"{key.meaning} ({key.unit})."
                lines.extend(["", *(f"# {line}" for line in textwrap.wrap(text, 96))])

        for name, value in self.model_dump(exclude={*tables, "links", "own_runs"}).items():
            if value not in ("", None):
                explain(name)
                lines.append(f"{name} = {_shown(value)}")
        for name in tables:
            if values := getattr(self, name):
                explain(name)
                lines += [f"[{name}]"] if explained else ["", f"[{name}]"]
                lines += [f"{format_key(key)} = {_shown(value)}" for key, value in values.items()]
        for name, rows in (("links", self.links), ("own_runs", self.own_runs)):
            if rows:
                explain(name)
            for row in rows:
                lines += ["", f"[[{name}]]"]
                values = row.model_dump(exclude_defaults=True)
                lines += [f"{key} = {_shown(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    """Six significant digits for a number that is not whole, everything else with all digits."""
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return "[" + ", ".join(_shown(item) for item in items) + "]"
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "{ " + ", ".join(f"{format_key(key)} = {_shown(item)}" for key, item in pairs) + " }"
    if isinstance(value, float) and value >= 1e6 and float(short := f"{value:.6g}") == value:
        return short.replace("e+", "e") if "e" in short else f"{short}.0"
    if isinstance(value, float) and not value.is_integer():
        text = f"{value:.6g}"
        return text if "." in text or "e" in text else f"{text}.0"
    return format_value(value)


def load_cluster(source: str | Path | Cluster) -> Cluster:
    """The preset of that name or several nodes of it ("4xdgx_h100"), the TOML file at that path, or
    devices of a data sheet ("8xH100", "MI300X" for one node of them, "2x4xH100" for 2 nodes of 4);
    a Cluster is returned unchanged. Raises ConfigError with every problem found."""
    if isinstance(source, Cluster):
        return source
    source = str(source)
    if source in preset_names("clusters"):
        return _build(read_preset_table(source, "clusters"), f"preset {source}")
    path = Path(source)
    try:
        table = parse_toml(path.read_text(encoding="utf-8-sig"))
    except OSError:
        return _cluster_of_devices(source)
    except ValueError as error:
        message = unreadable(error)
        raise ConfigError([Problem.of("syntax", "cluster", source, message)]) from None
    return _build(table, source)


#: Least operations/s of a device: a smaller number was meant in TFLOP/s.
_SLOWEST = 1e6
#: Latencies of NVLink and of InfiniBand in seconds: typical values, which data sheets lack.
_INTRA_LATENCY, _INTER_LATENCY = 3e-6, 8e-6


def cluster_of_device(device: Accelerator, num_devices: int | None = None) -> Cluster:
    """Cluster "8xH100-80G" of `num_devices` devices (by default one node of them): a part of one
    node, or several whole ones. Raises ValueError for another number."""
    size = device.node_size
    count = size if num_devices is None else num_devices
    if not count or (count > size and count % size):
        nearest = max(size, round(count / size) * size) if count else 1
        raise ValueError(
            f"{count} {device.name} are neither a part of a node of {size} nor whole nodes: "
            f"{nearest}x{device.name}"
        )
    sixteen, eight, four = device.peak_flops  # by bits
    peaks = {"bfloat16": sixteen}
    peaks |= {"float8": eight} if eight > sixteen else {}
    peaks |= {"float4": four} if four > eight else {}
    peaks |= {"float32": wide} if (wide := device.peak("float32")) else {}
    return Cluster(
        name=f"{count}x{device.name}",
        nodes=max(1, count // size),
        gpus_per_node=min(count, size),
        memory_bytes=int(device.memory_bytes),
        memory_bandwidth=device.memory_bandwidth,
        peak_flops=peaks,
        intra_node_bandwidth=device.intra_node_bandwidth,
        intra_node_latency=_INTRA_LATENCY,
        inter_node_bandwidth=device.inter_node_bandwidth,
        inter_node_latency=_INTER_LATENCY,
        accelerator=device.name,
    )


def _cluster_of_devices(source: str) -> Cluster:
    """The cluster of "8xH100", "4 x dgx_h100" or "2xp5.48xlarge". Raises ConfigError for a text
    that names neither a device, nor a preset, nor a cloud's machine type, and for devices that do
    not fill nodes."""
    from moemesh.config.devices import (
        ACCELERATORS,
        MACHINES,
        counted,
        described_device,
        machine_of,
    )

    names, (nodes, count, name) = preset_names("clusters"), counted(source)
    preset, device = re.sub(r"[ -]", "_", name.strip().lower()), described_device(name)
    if preset in names and nodes is None and count != 0 and (name == preset or device is None):
        cluster = load_cluster(preset)
        return cluster.model_copy(update={"nodes": cluster.nodes * (count or 1)})
    machine = machine_of(name)
    if machine is not None and nodes is None and count != 0:
        cluster = cluster_of_device(machine)
        return cluster.model_copy(update={"nodes": count or 1, "name": source})
    if device is not None:
        try:
            cluster = cluster_of_device(device, count)
            if nodes is not None and cluster.nodes > 1:
                raise ValueError(f"a node of {device.name} has {device.node_size}: {count}x{name}")
        except ValueError as error:
            message, _, fix = str(error).rpartition(": ")
            problem = Problem.of("not-divisible", "cluster", source, message, fix)
            raise ConfigError([problem]) from None
        is_sheet = device == ACCELERATORS[device.name] and nodes is None
        changes = {"nodes": nodes or cluster.nodes, "name": cluster.name if is_sheet else source}
        return cluster.model_copy(update=changes)
    message = "neither a cluster preset, nor a readable TOML file, nor a device with a data sheet"
    known = {each.lower(): each for each in (*ACCELERATORS, *MACHINES)}
    near = nearest_name(name, names) or known.get(nearest_name(name.lower(), list(known)), "")
    file = source if source.endswith(".toml") else "mine.toml"
    fix = f"did you mean {near}? " if near not in names and near else ""
    fix += (
        nearest_choice(name, names)
        + "; a device or machine of `moemesh cluster list`, like 8xMI300X; "
    )
    fix += f"`moemesh cluster init {shlex.quote(file)}{f' --from {near}' if near in names else ''}`"
    fix += " writes a file to edit"
    raise ConfigError([Problem.of("no-file", "cluster", source, message, fix)])


#: Unit of a text in place of a number -> its factor to the unit of the key; B is a byte, b a bit.
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9} | {
    f"{prefix}{unit}": size * factor
    for prefix, size in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.items()
    for unit, factor in {"B": 1, "b": 0.125, "bit": 0.125, "FLOP": 1, "FLOPS": 1}.items()
} | {"MiB": 2.0**20, "GiB": 2.0**30}  # fmt: skip


def _in_units(name: str, value: object) -> str:
    """The line of the file for the key `name`, whose `value` is a text with a unit; else ""."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Zµ]+?)(?:/s|ps)?", str(value).strip())
    if match is None or match[2] not in _UNITS:
        return ""
    if match[2].endswith("s") != name.endswith("latency"):  # bytes of a latency, or the reverse
        return ""
    number = float(match[1]) * _UNITS[match[2]]
    shown = f"{number:.0f}" if name == "memory_bytes" else _shown(number)
    return f"{name} = {{ bfloat16 = {shown} }}" if name == "peak_flops" else f"{name} = {shown}"


def _build(table: dict[str, object], origin: str) -> Cluster:
    """The cluster of one table. Raises ConfigError with all problems."""
    try:
        cluster = Cluster.model_validate(table)
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            name = ".".join(str(part) for part in detail["loc"])
            code, value, message = "wrong-type", detail["input"], detail["msg"]
            fix = _in_units(name, detail["input"]) or example(name.partition(".")[0])
            if detail["type"] == "missing":
                code, value, message = "missing", None, "it must be given"
            if name in KEYS:
                message = f"{message[0].lower()}{message[1:]}: {meaning(name)}"
            if detail["type"] == "extra_forbidden":
                code, message = "unknown-key", f"a cluster has no key `{name}`"
                key = next((key for key in KEYS if name.lower() in KEYS[key].names), None)
                fix = f"{key} is {meaning(key)}" if key else nearest_choice(name, tuple(KEYS))
            problem = Problem.of(code, f"cluster.{name}", value, message, fix)
            problems.append(replace(problem, origin=origin))
        raise ConfigError(problems) from None
    if problems := cluster.check():
        raise ConfigError(problems)
    return cluster
