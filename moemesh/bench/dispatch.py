"""`moemesh bench dispatch`: every dispatcher under a given load, against the bare all-to-all.

All contenders take turns in every round, one step of each, so that what else the machine does hits
all alike. A step counts as long as its slowest rank takes, planning included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from moemesh.bench import hosts
from moemesh.bench.measure import Bench, Builder, against_transformers, measure
from moemesh.bench.workloads import WORKLOADS, workload
from moemesh.comm import collectives, launch
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.trace.memory import format_bytes

#: In the order of the table. "all" means these.
DISPATCHERS = ("all_to_all", "all_gather", "hierarchical", "low_latency", "auto")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MODES = ("dispatch_only", "moe_fwd_bwd")
PAYLOADS = ("same", "fp8")
#: A run that takes longer is stopped.
TIMEOUT_SECONDS = 1200


class BenchError(UserError):
    """Settings of a benchmark that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; each field is the option of the same name. Raises BenchError.

    ``tokens`` are those of all ranks together, ``width`` is one expert's, ``ranks_per_node = 0``
    means one node (or as many as ``hosts``), ``hosts = 0`` emulates none.
    """

    workload: str = "W0"
    dispatcher: str = "all"
    ranks: int = 4
    ranks_per_node: int = 0
    hosts: int = 0
    link: str = "1gbit"
    experts: int = 64
    top_k: int = 8
    groups: int = 8
    tokens: int = 4096
    hidden: int = 512
    width: int = 256
    payload: str = "same"
    dtype: str = "float32"
    mode: str = "dispatch_only"
    chunks: int = 1
    rounds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("mode", MODES), ("payload", PAYLOADS)):
            if (value := getattr(self, name)) not in known:
                raise BenchError(f"no {name} {value!r}: choose from {', '.join(known)}")
        self._check_division("ranks", self.ranks, "experts", self.experts)
        self._check_division("ranks-per-node", self.node, "ranks", self.ranks)
        if self.hosts:
            hosts.link_rate(self.link)
            self._check_division("hosts", self.hosts, "ranks", self.ranks)
            if self.ranks_per_node not in (0, self.ranks // self.hosts):
                raise BenchError(
                    f"{self.hosts} hosts of {self.ranks // self.hosts} ranks are not "
                    f"ranks-per-node {self.ranks_per_node}"
                )
        for name in self.workloads:  # says what is wrong with names, experts, top-k and groups
            workload(
                name,
                seed=0,
                step=0,
                gids=range(0),
                num_experts=self.experts,
                experts_per_token=self.top_k,
                num_groups=self.groups,
            )
        for name in self.dispatchers:
            if name not in DISPATCHERS:
                raise BenchError(
                    f"no dispatcher {name!r} here: all, or some of {', '.join(DISPATCHERS)}"
                )

    @staticmethod
    def _check_division(name: str, part: int, whole_name: str, whole: int) -> None:
        if part < 1 or whole % part:
            raise BenchError(f"{name} ({part}) must divide {whole_name} ({whole})")

    @property
    def node(self) -> int:
        """Ranks of one node."""
        if self.hosts:
            return max(1, self.ranks // self.hosts)
        return self.ranks_per_node or self.ranks

    @property
    def workloads(self) -> tuple[str, ...]:
        return WORKLOADS if self.workload == "all" else tuple(self.workload.split(","))

    @property
    def dispatchers(self) -> tuple[str, ...]:
        return DISPATCHERS if self.dispatcher == "all" else tuple(self.dispatcher.split(","))

    def arguments(self) -> list[str]:
        """The command line of these settings, for the ranks."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given)
        return ["bench", "dispatch", *(word for option in options for word in option)]

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def command(settings: Settings, builder: Builder, *, as_json: bool) -> int:
    """Start the ranks that `settings` ask for, or be one of them; returns the exit code."""
    arguments = settings.arguments() + (["--json"] if as_json else [])
    if launch.joined() or settings.ranks == 1:
        return _rank(settings, builder, as_json)
    if not settings.hosts:
        return launch.launch(settings.ranks, arguments)
    with hosts.hosts(settings.hosts, settings.link) as names:
        printed = hosts.run_ranks(
            names,
            ranks_per_host=settings.node,
            command=[sys.executable, "-m", "moemesh", *arguments],
            timeout=TIMEOUT_SECONDS,
        )
    print(printed, end="")
    return 0


def _rank(settings: Settings, builder: Builder, as_json: bool) -> int:
    ranks = launch.start("cpu", TIMEOUT_SECONDS)
    launch.keep_freed_memory()
    if ranks.world_size != settings.ranks:
        raise BenchError(f"{ranks.world_size} ranks were started for ranks = {settings.ranks}")
    found = run(settings, builder, make_mesh(settings))
    if ranks.rank == 0:
        print(json.dumps(found) if as_json else table(found), flush=True)
    launch.stop()
    return 0


def make_mesh(settings: Settings) -> Mesh:
    """All ranks are one expert-parallel group."""
    if settings.ranks == 1:
        return Mesh.single("cpu")
    num_ranks = settings.ranks
    return Mesh.create(Layout(dp=num_ranks, ep=num_ranks, ranks_per_node=settings.node), "cpu")


def run(settings: Settings, builder: Builder, mesh: Mesh) -> dict[str, Any]:
    """Measure on every rank; the same object on all, as `--json` prints it."""
    config = ModelConfig(
        hidden_size=settings.hidden,
        expert_intermediate_size=settings.width,
        num_experts=settings.experts,
        experts_per_token=settings.top_k,
        num_shared_experts=0,
    )
    plan = Plan(
        dp=settings.ranks,
        ep=settings.ranks,
        payload=settings.payload,  # type: ignore[arg-type]
        ranks_per_node=settings.node,
    )
    bench = Bench(
        config=config,
        plan=plan,
        mesh=mesh,
        builder=builder,
        dispatchers=settings.dispatchers,
        ranks_per_node=settings.node,
        dtype=DTYPES[settings.dtype],
        num_chunks=settings.chunks,
        num_groups=settings.groups,
        num_tokens=settings.tokens,
        with_layer=settings.mode == "moe_fwd_bwd",
        num_rounds=settings.rounds,
        seed=settings.seed,
    )
    found = [measure(bench, name) for name in settings.workloads]
    peer = against_transformers(bench) if mesh.rank == 0 and bench.with_layer else None
    (peer, *_) = collectives.gather_json(peer, mesh["world"])
    return {"settings": settings.to_json(), "workloads": found, "single_process": peer}


def table(found: dict[str, Any]) -> str:
    """The result for a person: a block a workload, a line a contender."""
    settings = found["settings"]
    blocks = [
        f"{settings['mode']}, {settings['ranks']} ranks"
        + (f" on {settings['hosts']} hosts at {settings['link']}" if settings["hosts"] else "")
        + f", {settings['tokens']} tokens, hidden {settings['hidden']}, top-{settings['top_k']} of "
        f"{settings['experts']} experts, {settings['dtype']}, payload {settings['payload']}"
    ]
    for result in found["workloads"]:
        rows = [_HEAD, *(_cells(name, entry) for name, entry in _named(result))]
        blocks.append(f"{result['workload']}\n{_aligned(rows)}")
    if peer := found["single_process"]:
        blocks.append(
            f"one process, forward and backward: ours {peer['ours_seconds'] * 1e3:.1f} ms, "
            f"transformers {peer['version']} {peer['transformers_seconds'] * 1e3:.1f} ms"
        )
    return "\n\n".join(blocks)


_HEAD = (
    *("", "p50 ms", "p95", "max", "x bare", "exposed ms", "hidden %"),
    *("sent", "across", "link", "peak", "dropped"),
)


def _named(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    named = [(name.replace("_", " "), entry) for name, entry in result["bounds"].items()]
    for entry in result["dispatchers"]:
        chunks = f", {entry['chunks']} chunks" if entry["chunks"] > 1 else ""
        chosen = f" = {entry['chosen']}" if entry["chosen"] != entry["dispatcher"] else ""
        named.append((entry["dispatcher"] + chosen + chunks, entry))
    return named


def _cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    seconds = entry["seconds"]
    ratio = entry.get("ratio_to_bare_all_to_all")
    exposed, hidden = entry.get("exposed_seconds"), entry.get("hidden_share")
    sizes = [entry.get(key) for key in ("sent_bytes", "across_bytes", "link_bytes")]
    sizes.append(entry.get("peak_bytes"))
    return (
        name,
        *(f"{seconds[key] * 1e3:.1f}" for key in ("p50", "p95", "max")),
        "" if ratio is None else f"{ratio:.2f}",
        "" if exposed is None else f"{exposed * 1e3:.1f}",
        "" if hidden is None else f"{hidden * 100:.0f}",
        *("" if size is None else format_bytes(size) for size in sizes),
        str(entry.get("dropped", "")),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )
