"""One workload through all contenders, turn by turn: times, bytes, memory and drops of all ranks.

Legend: R ranks, T own tokens, K experts per token, L local experts.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import contenders, crossing, peers
from benchmarks.contenders import Step, Work
from benchmarks.workloads import rank_tokens, workload
from moemesh.bench import hosts
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher
from moemesh.model.moe import MoE
from moemesh.parallel.expert.build import choose_dispatcher, make_dispatcher
from moemesh.sharding.dispatchers import ROWS_SLACK, packed_bytes

#: Where the rounds of a workload start: those of W7 shall meet its burst (steps 32 to 35).
FIRST_STEPS = {"W7": 28}

#: What carries token rows; everything else is counts, ids and weights.
ROW_CALLERS = ("moe.dispatch", "moe.combine")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The measurement on this rank: `dispatchers` by name, "auto" among them."""

    config: ModelConfig
    plan: Plan
    mesh: Mesh
    dispatchers: tuple[str, ...]
    ranks_per_node: int
    dtype: torch.dtype
    num_chunks: int
    num_groups: int
    num_tokens: int
    with_layer: bool
    num_rounds: int
    seed: int

    @cached_property
    def layer(self) -> MoE:
        return contenders.make_layer(self.config, self.mesh.world_size, self.mesh.rank, self.dtype)

    def tokens(self, name: str) -> tuple[range, ...]:
        """The token ids of every rank."""
        return rank_tokens(name, num_ranks=self.mesh.world_size, num_tokens=self.num_tokens)

    def share(self, name: str, step: int) -> Share:
        """This rank's part of one step of workload `name`."""
        rank = self.mesh.rank
        chosen = workload(
            name,
            seed=self.seed,
            step=step,
            gids=range(self.num_tokens),
            num_experts=self.config.num_experts,
            experts_per_token=self.config.experts_per_token,
            num_groups=self.num_groups,
        )
        experts = [chosen[part.start : part.stop] for part in self.tokens(name)]
        copies_RR = self.rows("all_to_all", experts).dispatch_RR
        generator = torch.Generator().manual_seed(rank)
        shape = (len(experts[rank]), self.config.hidden_size)
        weights_TK = torch.rand(experts[rank].shape, generator=generator) + 0.1
        counts_E = torch.bincount(chosen.flatten(), minlength=self.config.num_experts)
        return Share(
            experts=experts,
            work=Work(
                experts_TK=experts[rank],
                weights_TK=weights_TK / weights_TK.sum(1, keepdim=True),
                x_TH=torch.randn(shape, generator=generator).to(self.dtype),
                gradient_TH=torch.randn(shape, generator=generator).to(self.dtype),
                counts_L=counts_E.view(self.mesh.world_size, -1)[rank],
                input_splits=copies_RR[rank].tolist(),
                output_splits=copies_RR[:, rank].tolist(),
            ),
        )

    def contestants(self, tokens_per_rank: int) -> list[Contender]:
        """Bounds first, then every dispatcher, with one chunk and with as many as asked for."""
        found: list[Contender] = []
        if self.mesh.world_size > 1:
            bare = contenders.bare_exchange_step(self.mesh["ep"], 4 if self.with_layer else 2)
            found.append(Contender("bare_all_to_all", bare))
        if self.with_layer:
            found.append(Contender("experts", contenders.experts_step(self.layer)))
        balanced = tokens_per_rank * self.config.experts_per_token
        for name in self.dispatchers:
            chosen = name
            site = (self.config, self.plan, self.mesh)
            if name == "auto":
                chosen, _ = choose_dispatcher(*site, self.dtype, tokens_per_rank)
            made = make_dispatcher(chosen, *site, tokens_per_rank)
            if not self.with_layer:
                found.append(Contender(name, contenders.dispatch_step(made), chosen, made))
                continue
            if self.mesh.world_size > 1:
                found.append(Contender(_exchange_of(name), contenders.exchange_step(made)))
            for chunks in sorted({1, self.num_chunks}):
                step = contenders.layer_step(
                    self.layer,
                    made,
                    num_chunks=chunks,
                    max_rows=max(1, ROWS_SLACK * balanced),
                )
                found.append(Contender(name, step, chosen, made, chunks))
        return found

    def rows(
        self, dispatcher: str, experts: list[Tensor], num_slots: int = 0
    ) -> crossing.RowsBetween:
        return crossing.rows_between(
            dispatcher,
            experts,
            num_experts=self.config.num_experts,
            ranks_per_node=self.ranks_per_node,
            num_slots=num_slots,
        )

    def expected(
        self, contender: Contender, experts: list[Tensor]
    ) -> dict[tuple[str, str], crossing.Sent]:
        """Rows that this rank must send in a step, by caller and phase."""
        row_bytes = self.config.hidden_size * self.dtype.itemsize
        coded = self.plan.payload == "fp8"
        slots = getattr(contender.dispatcher, "num_slots", 0)
        cut = [part.split(shard_sizes(len(part), contender.chunks)) for part in experts]
        found: dict[tuple[str, str], crossing.Sent] = {}
        for chunk in zip(*cut, strict=True):
            sent = crossing.bytes_sent(
                self.rows(contender.chosen, list(chunk), slots),
                self.mesh.rank,
                ranks_per_node=self.ranks_per_node,
                row_bytes=row_bytes,
                coded_row_bytes=packed_bytes(self.config.hidden_size) if coded else row_bytes,
                with_backward=self.with_layer,
            )
            for key, part in sent.items():
                so_far = found.get(key, crossing.Sent(0, 0))
                found[key] = crossing.Sent(
                    so_far.own_node + part.own_node, so_far.across + part.across
                )
        return found


@dataclass(frozen=True, kw_only=True)
class Share:
    """One step: the experts of every rank's tokens, and this rank's work."""

    experts: list[Tensor]
    work: Work


@dataclass(frozen=True)
class Contender:
    """Something timed; a bound has no dispatcher. `chosen` is what "auto" stands for, else `name`;
    `samples` are this rank's, one a round."""

    name: str
    step: Step
    chosen: str = ""
    dispatcher: Dispatcher | None = None
    chunks: int = 1
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step of one contender on this rank. Bytes that it sent: `sent` token rows and `other`
    things by the ledger; `own_node` and `across` by the closed formula, which `as_expected` says is
    what the ledger has; `link` by the interface's counter."""

    seconds: float
    sent: int
    own_node: int
    across: int
    other: int
    as_expected: bool
    link: int


def against_transformers(bench: Bench) -> dict[str, Any] | None:
    """The whole layer of W0 in this process alone, ours beside transformers'; None without it.

    Medians of interleaved rounds.
    """
    layer = contenders.make_layer(bench.config, 1, 0, bench.dtype)
    if (peer := peers.transformers_step(layer)) is None:
        return None
    version, theirs = peer
    ours = contenders.layer_step(layer, LocalDispatcher(bench.config.num_experts))
    work = replace(bench, mesh=Mesh.single("cpu")).share("W0", 0).work
    times: dict[Step, list[float]] = {ours: [], theirs: []}
    for _ in range(bench.num_rounds + 1):
        for step, taken in times.items():
            start = time.perf_counter()
            step(work)
            taken.append(time.perf_counter() - start)
    return {
        "version": version,
        "ours_seconds": float(np.median(times[ours][1:])),
        "transformers_seconds": float(np.median(times[theirs][1:])),
    }


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """One workload, measured on every rank and gathered on every rank."""
    contestants = bench.contestants(max(len(part) for part in bench.tokens(name)))
    first = FIRST_STEPS.get(name, 0)
    share = bench.share(name, first)
    inspected = [_inspect(contender, share.work) for contender in contestants]
    for contender in contestants:
        contender.step(share.work)  # the profiler leaves things cold
    for number in range(bench.num_rounds):
        share = bench.share(name, first + number)
        turn = number % len(contestants)
        for contender in contestants[turn:] + contestants[:turn]:
            contender.samples.append(_timed(bench, contender, share))
    told = [
        {"samples": [vars(sample) for sample in contender.samples], **inspection}
        for contender, inspection in zip(contestants, inspected, strict=True)
    ]
    ranks = collectives.gather_json(told, bench.mesh["world"])
    return _result(bench, name, contestants, [list(rows) for rows in zip(*ranks, strict=True)])


def _inspect(contender: Contender, work: Work) -> dict[str, Any]:
    """Peak memory of a step, and the (token, slot) pairs sent out and arrived."""
    peak = contenders.peak_bytes(lambda: contender.step(work))
    found = {"peak": peak, "routed": 0, "arrived": 0}
    if contender.dispatcher is not None:
        with torch.no_grad():
            plan = contender.dispatcher.plan(work.experts_TK)
            rows = contender.dispatcher.dispatch(work.x_TH, work.weights_TK, plan).wait()
        found["routed"] = int((work.experts_TK >= 0).sum())
        found["arrived"] = int(rows.counts_L.sum())
    return found


def _timed(bench: Bench, contender: Contender, share: Share) -> Sample:
    world = bench.mesh["world"]
    collectives.barrier(world)
    link, before = _on_link(bench), _sent(bench)
    collectives.barrier(world)  # nobody starts before everybody has read the counters
    start = time.perf_counter()
    contender.step(share.work)
    seconds = time.perf_counter() - start
    collectives.barrier(world)
    sent = Counter(_sent(bench))
    sent.subtract(before)
    sent = +sent  # what others sent before stays at zero: leave it out
    expected = {}
    if contender.dispatcher is not None:
        expected = bench.expected(contender, share.experts)
    rows = {key: size for key, size in sent.items() if key[1] in ROW_CALLERS}
    return Sample(
        seconds=seconds,
        sent=sum(rows.values()),
        own_node=sum(part.own_node for part in expected.values()),
        across=sum(part.across for part in expected.values()),
        other=sum(sent.values()) - sum(rows.values()),
        as_expected=bool(expected) and _agree(rows, expected),
        link=_on_link(bench) - link,
    )


def _on_link(bench: Bench) -> int:
    """This host's counter, read by its first rank."""
    if bench.mesh.rank % bench.ranks_per_node:
        return 0
    return hosts.bytes_on_link() or 0


def _sent(bench: Bench) -> dict[tuple[str, str, str], int]:
    """Bytes sent so far, by axis, caller and phase."""
    found: dict[tuple[str, str, str], int] = {}
    for entry in bench.mesh.ledger.entries():
        key = (entry.axis, entry.caller, entry.phase)
        found[key] = found.get(key, 0) + entry.wire_bytes
    return found


def _agree(
    rows: dict[tuple[str, str, str], int], expected: dict[tuple[str, str], crossing.Sent]
) -> bool:
    """Whether the ledger has the closed formula's bytes: by caller and phase, and where an axis
    stays inside a node or leaves it, there too."""
    measured = dict.fromkeys(expected, 0)
    for (axis, caller, phase), size in rows.items():
        if (caller, phase) not in expected:
            return False
        measured[caller, phase] += size
        side = {"ep_node": "own_node", "ep_rail": "across"}.get(axis)
        if side is not None and size != getattr(expected[caller, phase], side):
            return False
    return all(measured[key] == part.total for key, part in expected.items())


def _exchange_of(name: str) -> str:
    return f"{name}_exchange_alone"


def _result(
    bench: Bench, name: str, contestants: list[Contender], told: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    dispatchers: list[dict[str, Any]] = []
    for contender, ranks in zip(contestants, told, strict=True):
        entry = _entry(bench, contender, ranks)
        if contender.dispatcher is None:
            bounds[contender.name] = entry
        else:
            named = {"dispatcher": contender.name, "chosen": contender.chosen}
            dispatchers.append({**named, "chunks": contender.chunks, **entry})
    bare, experts = bounds.get("bare_all_to_all"), bounds.get("experts")
    for entry in dispatchers:
        if bare is not None:
            ratio = entry["seconds"]["p50"] / bare["seconds"]["p50"]
            entry["ratio_to_bare_all_to_all"] = ratio
        if experts is not None:
            # What the exchange adds to the experts' own time, round by round.
            added = np.subtract(entry["steps"], experts["steps"])
            entry["exposed_seconds"] = float(np.median(added))
            if exchange := bounds.get(_exchange_of(entry["dispatcher"])):
                hidden = 1 - added / np.array(exchange["steps"])
                entry["hidden_share"] = float(np.median(hidden))
    return {
        "workload": name,
        "first_step": FIRST_STEPS.get(name, 0),
        "tokens_per_rank": [len(part) for part in bench.tokens(name)],
        "bounds": bounds,
        "dispatchers": dispatchers,
    }


def _entry(bench: Bench, contender: Contender, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One contender: the slowest rank of every step; bytes of all ranks together, a mean step."""
    samples = [rank["samples"] for rank in ranks]
    slowest = [max(sample["seconds"] for sample in step) for step in zip(*samples, strict=True)]

    def per_step(key: str) -> float:
        return sum(sample[key] for rank in samples for sample in rank) / bench.num_rounds

    entry: dict[str, Any] = {
        "seconds": {
            "p50": float(np.percentile(slowest, 50)),
            "p95": float(np.percentile(slowest, 95)),
            "max": max(slowest),
        },
        "steps": slowest,
        "peak_bytes": max(rank["peak"] for rank in ranks),
        "link_bytes": per_step("link") if hosts.bytes_on_link() is not None else None,
    }
    if contender.dispatcher is not None:
        known = all(sample["as_expected"] for rank in samples for sample in rank)
        entry |= {
            "sent_bytes": per_step("sent"),
            "own_node_bytes": per_step("own_node") if known else None,
            "across_bytes": per_step("across") if known else None,
            "other_bytes": per_step("other"),
            "bytes_as_expected": known,
            "dropped": sum(rank["routed"] - rank["arrived"] for rank in ranks),
        }
    return entry
