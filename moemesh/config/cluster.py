"""The machine a plan is made for: nodes, memory, arithmetic, links and their measured times."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, cast

from pydantic import BeforeValidator, Field, ValidationError

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.section import NOT_NEGATIVE, POSITIVE, SIZE, Range, Section, as_tuple
from moemesh.config.sources import preset_names, read_preset_table
from moemesh.config.suggest import nearest_choice
from moemesh.config.toml import format_key, format_value, unreadable

# Meanings, units and examples of the keys of a cluster file.


class ClusterKey(NamedTuple):
    """The meaning of one key: in a comment of the file, and in a message about it."""

    meaning: str
    unit: str
    example: str


KEYS: dict[str, ClusterKey] = {
    "name": ClusterKey("Name of the cluster in answers", "text", '"my_cluster"'),
    "nodes": ClusterKey("Nodes; `plan --nodes` takes another number", "nodes", "2"),
    "gpus_per_node": ClusterKey(
        "Devices of a node, joined by its fast links: `nvidia-smi -L | wc -l`", "devices", "8"
    ),
    "memory_bytes": ClusterKey(
        "Memory of one device: the total of `nvidia-smi`, MiB times 1048576", "bytes", "85899345920"
    ),
    "memory_bandwidth": ClusterKey(
        "Rate of a device's memory (HBM), from its data sheet", "bytes/s", "3.35e12"
    ),
    "peak_flops": ClusterKey(
        "Dense peak of matrix products by number type: half of a figure printed with sparsity",
        "operations/s of one device",
        "{ bfloat16 = 989.4e12, float8 = 1978.9e12 }",
    ),
    "intra_node_bandwidth": ClusterKey(
        "Links inside a node (NVLink, else PCIe), one device, one direction: half of a figure that "
        "counts both ways",
        "bytes/s",
        "450e9",
    ),
    "intra_node_latency": ClusterKey("Latency of a message inside a node", "seconds", "3e-6"),
    "inter_node_bandwidth": ClusterKey(
        "Network between nodes (InfiniBand, RoCE, Ethernet), one device's share, one direction: "
        "Gb/s of a node's cards / 8 / devices of a node",
        "bytes/s",
        "50e9",
    ),
    "inter_node_latency": ClusterKey("Latency of a message between nodes", "seconds", "8e-6"),
    "accelerator": ClusterKey(
        "The device by name, for constants that were calibrated on its kind", "text", '"H100-80G"'
    ),
    "usable_share": ClusterKey(
        "Share of a device's memory that a job may take; left out: as calibrated", "0 to 1", "0.95"
    ),
    "constants": ClusterKey(
        "Constants of the time model, as `moemesh calibrate` writes them",
        "by name",
        "{ gemm_efficiency = 0.8 }",
    ),
    "links": ClusterKey(
        "Measured collectives, as `moemesh bench links` writes them", "a list of tables", "[]"
    ),
    "own_runs": ClusterKey(
        "Runs that taught what the constants cannot say, as `moemesh calibrate` writes them",
        "a list of tables",
        "[]",
    ),
}


def example(name: str) -> str:
    """The key with a value, as a line of the file: `nodes = 2`; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{name} = {key.example}" if key else ""


def told(name: str) -> str:
    """Meaning and unit for a message; "" for an unknown key."""
    key = KEYS.get(name)
    return f"{key.meaning[0].lower()}{key.meaning[1:]} [{key.unit}]" if key else ""


LinkOperation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class LinkCurve(Section):
    """Measured times of one operation in one shape of group: ``seconds[i]`` for ``bytes[i]``.

    Bytes are those of the full tensor (of an all-to-all: what each rank holds), ascending. All
    groups of the shape were at work at once; `members_per_node` ranks of a group share a node.
    """

    section: ClassVar[str] = "cluster.links"

    operation: LinkOperation
    ranks: int
    members_per_node: int
    bytes: Annotated[tuple[float, ...], BeforeValidator(as_tuple)]
    seconds: Annotated[tuple[float, ...], BeforeValidator(as_tuple)]

    def mistake(self) -> str:
        """The problem of the curve; "" for nothing."""
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
    """A measured run: ``seconds`` of its step, those that the constants alone predict, how far it
    was off when it was left out (log of measured over predicted), its `weight` in corrections, and
    the features in which other runs are like it."""

    section: ClassVar[str] = "cluster.own_runs"

    run: str
    seconds: float
    predicted: float
    left_out: float
    weight: float
    #: The release of its software ("stack 26.02") and the log of its measured over predicted bytes.
    release: str = ""
    memory: float | None = None
    features: dict[str, float]


class Cluster(Section):
    """Equal nodes of equal devices. Bandwidths are bytes/s in one direction for one device,
    latencies seconds, `peak_flops` dense operations/s by dtype ("bfloat16", "float8", ...).
    """

    section: ClassVar[str] = "cluster"

    name: str
    nodes: int
    gpus_per_node: int
    #: Memory of one device.
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    intra_node_bandwidth: float
    intra_node_latency: float
    inter_node_bandwidth: float
    inter_node_latency: float
    #: The device by name ("H100-80G"), for constants that were calibrated on the same device.
    accelerator: str = ""
    #: Share of a device's memory that a job may take; None: as calibrated for the device.
    usable_share: float | None = None
    #: Calibrated constants of the planner's time model by name, as `moemesh calibrate` writes them.
    constants: dict[str, float] = Field(default_factory=dict[str, float])
    #: Measured collectives, as `moemesh bench links` writes them: they replace the closed forms.
    links: Annotated[tuple[LinkCurve, ...], BeforeValidator(as_tuple)] = ()
    #: Runs of the cluster, as `moemesh calibrate` writes them: they correct layouts like theirs.
    own_runs: Annotated[tuple[OwnRun, ...], BeforeValidator(as_tuple)] = ()

    ranges: ClassVar[Mapping[str, Range]] = {
        "nodes": SIZE,
        "gpus_per_node": SIZE,
        "memory_bytes": Range(1),
        "memory_bandwidth": POSITIVE,
        "intra_node_bandwidth": POSITIVE,
        "intra_node_latency": NOT_NEGATIVE,
        "inter_node_bandwidth": POSITIVE,
        "inter_node_latency": NOT_NEGATIVE,
    }

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def check(self) -> list[Problem]:
        """Every rule of a cluster description; an empty list is a good one."""
        problems = [
            replace(one, message=f"{one.message}: {told(name)}", fix=example(name))
            if (name := one.key.rpartition(".")[2]) in KEYS
            else one
            for one in self.range_problems()
        ]
        share = self.usable_share
        if share is not None and not 0 < share <= 1:
            message = f"usable_share is the part of a device's memory for a job, not {share}"
            fix = "usable_share = 0.95"
            key = "cluster.usable_share"
            problems.append(Problem.of("out-of-range", key, share, message, fix))
        for dtype, flops in self.peak_flops.items():
            if flops <= 0:
                key = f"cluster.peak_flops.{dtype}"
                message = f"peak_flops of {dtype} must be above 0, not {flops}"
                fix = f"the dense peak in operations/s, or leave {dtype} out"
                problems.append(Problem.of("out-of-range", key, flops, message, fix))
        for name, value in self.constants.items():
            if value <= 0:
                key = f"cluster.constants.{name}"
                message = f"a calibrated constant is above 0, not {value}"
                fix = "leave it out; the planner knows a usual value"
                problems.append(Problem.of("out-of-range", key, value, message, fix))
        for number, curve in enumerate(self.links, start=1):
            if message := curve.mistake():
                where = f"{curve.operation} of {curve.ranks} ranks"
                key = f"cluster.links.{number}"
                message = f"the measured {where}: {message}"
                fix = "measure again with `moemesh bench links`, or leave it out"
                problems.append(Problem.of("out-of-range", key, None, message, fix))
        return problems

    def to_toml(self, heading: str, *, explained: bool = False) -> str:
        """The file that :func:`load_cluster` reads; `heading` becomes a comment, and so do, where
        `explained`, the meaning and unit of each key."""
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
    """Six significant digits for a measured number, everything else as it is."""
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
    """The preset of that name, or the TOML file at that path; a cluster stays what it is.

    Raises ConfigError with every problem found.
    """
    if isinstance(source, Cluster):
        return source
    source = str(source)
    if source in preset_names("clusters"):
        return _build(read_preset_table(source, "clusters"), f"preset {source}")
    path = Path(source)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError:
        message = "neither a cluster preset nor a readable TOML file"
        fix = nearest_choice(source, preset_names("clusters"))
        fix += f"{'; ' if fix else ''}`moemesh cluster init {source}` writes one to edit"
        raise ConfigError([Problem.of("no-file", "cluster", source, message, fix)]) from None
    except (ValueError, RecursionError) as error:
        message = unreadable(error)
        raise ConfigError([Problem.of("syntax", "cluster", source, message)]) from None
    return _build(table, source)


def _build(table: dict[str, object], origin: str) -> Cluster:
    """The checked cluster of one table."""
    try:
        cluster = Cluster.model_validate(table)
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            name = ".".join(str(part) for part in detail["loc"])
            value = None if detail["type"] == "missing" else detail["input"]
            key, message, code = name.partition(".")[0], detail["msg"], "wrong-type"
            fix = example(key)
            if detail["type"] == "missing":
                code, message = "missing", "it must be given"
            if name in KEYS:
                message = f"{message[0].lower()}{message[1:]}: {told(name)}"
            if detail["type"] == "extra_forbidden":
                code = "unknown-key"
                message, fix = (
                    f"a cluster has no key `{name}`",
                    nearest_choice(name, tuple(Cluster.model_fields)),
                )
            problems.append(
                Problem(
                    code=code,
                    key=f"cluster.{name}",
                    value=value,
                    origin=origin,
                    message=message,
                    fix=fix,
                )
            )
        raise ConfigError(problems) from None
    if problems := cluster.check():
        raise ConfigError(problems)
    return cluster
