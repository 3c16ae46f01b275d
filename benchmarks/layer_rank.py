"""One rank of `benchmarks.layer`: build its part of the layer, time it, count it.

Legend: T own tokens, K slots per token, E experts, L local experts, H hidden.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bounds import BareAllToAll, BareGemms
from benchmarks.routing_shape import NUM_GROUPS
from benchmarks.shapes import SHAPES, LayerShape
from benchmarks.workloads import BURST, rank_tokens, workload
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.plan import Plan
from moemesh.model.batch import Context
from moemesh.model.experts import Experts
from moemesh.model.moe import MoE
from moemesh.model.visibility import Visibility
from moemesh.ops import swiglu
from moemesh.parallel.expert.build import make_dispatcher
from moemesh.trace.machine import peak_growth, return_freed_memory

#: Turns before the clock starts: the heap still grows in the first ones.
WARM_UP_TURNS = 3
#: Standard deviation of the weights, as in a model at its start.
INIT_STD = 0.02


class MeasuredLayer:
    """One rank's part of an MoE layer, its tokens, and one forward and backward as a call."""

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        mesh: Mesh,
        load: str = "",
    ) -> None:
        """`load` names a workload that chooses the experts in the router's place; "": none."""
        axis, config = mesh["ep"], shape.config
        self.mesh, self.moe = mesh, MoE(config)
        local = shard_range(shape.num_experts, axis.size, axis.index)
        self.moe.experts = Experts(len(local), shape.hidden, shape.width)
        if axis.size > 1:
            plan = Plan(dp=axis.size, ep=axis.size)
            self.moe.dispatcher = make_dispatcher("all_to_all", config, plan, mesh, shape.tokens)
        for name, parameter in self.moe.named_parameters():
            # The router is the same on every rank, and fp32; each rank draws its own experts.
            is_router = name.startswith("router")
            generator = torch.Generator().manual_seed(0 if is_router else 1 + axis.index)
            value = torch.randn(parameter.shape, generator=generator) * INIT_STD
            parameter.data = value if is_router else value.to(dtype)
        gids = rank_tokens(load, num_ranks=axis.size, num_tokens=shape.tokens)[axis.index]
        if not load:
            gids = shard_range(shape.tokens, axis.size, axis.index)
        self.x_TH = tokens_of_rank(shape, gids).to(dtype).requires_grad_()
        self.upstream_TH = torch.ones_like(self.x_TH)
        chosen = None
        if load:
            chosen = workload(
                load,
                seed=0,
                step=BURST.start,  # W7 shows its burst
                gids=gids,
                num_experts=shape.num_experts,
                experts_per_token=shape.top_k,
                num_groups=math.gcd(NUM_GROUPS, shape.num_experts),
            )
        self.context = single_sequence(len(self.x_TH), chosen)

    def forward(self) -> Tensor:
        return self.moe(self.x_TH, self.context).y_TH

    def __call__(self) -> None:
        """Forward and backward; gradients of the call before are dropped first."""
        self.x_TH.grad = None
        self.moe.zero_grad(set_to_none=True)
        self.forward().backward(self.upstream_TH)

    @torch.no_grad()
    def routed(self) -> tuple[list[int], list[int], list[int]]:
        """Rows of each local expert, rows sent to each rank, rows received from each rank."""
        experts_TK = self.moe.router(self.x_TH, self.context).experts_TK
        axis = self.mesh["ep"]
        sent = torch.bincount(experts_TK.flatten(), minlength=self.moe.config.num_experts)
        sent = sent.view(axis.size, -1)
        received = collectives.exchange_counts(sent, axis, caller="bench.counts")
        return received.sum(0).tolist(), sent.sum(1).tolist(), received.sum(1).tolist()

    def parts(self) -> dict[str, float]:
        """Seconds of each step of the forward, and of the backward."""
        moe, clock = self.moe, [time.perf_counter()]

        def done(value: Any) -> Any:
            clock.append(time.perf_counter())
            return value

        routing = done(moe.router(self.x_TH, self.context))
        plan = done(moe.dispatcher.plan(routing.experts_TK))
        rows = done(moe.dispatcher.dispatch(self.x_TH, routing.weights_TK, plan).wait())
        y_TH = done(moe.dispatcher.combine(done(moe.experts(rows)), plan).wait())
        done(y_TH.backward(self.upstream_TH))
        names = ("route", "plan", "dispatch", "experts", "combine", "backward")
        return {
            name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)
        }


def tokens_of_rank(shape: LayerShape, gids: range) -> Tensor:
    """[T, H] standard normal, the tokens `gids` of a shape, whichever rank holds them."""
    generator = torch.Generator().manual_seed(7)
    x_TH = torch.randn(shape.tokens, shape.hidden, generator=generator)
    return x_TH[gids.start : gids.stop].clone()


def measure(
    shape: LayerShape,
    dtype: torch.dtype,
    mesh: Mesh,
    rounds: int,
    load: str = "",
) -> dict[str, Any]:
    """Measure on this rank and gather; the result is the same on every rank.

    Times of a round are those of the slowest rank. The bounds and the layer take turns, each round
    in another order, so that whatever else the machine does hits them alike. Processor time, summed
    over ranks and threads, is counted beside: on a shared machine it says more.
    """
    torch.set_num_threads(1)
    # Load every library that a first call loads, so that it is not counted as the layer's memory.
    MeasuredLayer(SHAPES["tiny"], dtype, Mesh.single("cpu"))()
    swiglu.load(dtype)
    layer, world = MeasuredLayer(shape, dtype, mesh, load), mesh["world"]
    peak_bytes = _peak_bytes(layer)
    saved_bytes = _saved_bytes(layer)
    counts, sent, received = layer.routed()
    gemms = BareGemms(counts, shape.hidden, shape.width, dtype)
    timed: dict[str, Callable[[], None]] = {"layer": layer, "gemm": gemms}
    exchange = None
    if world.size > 1:
        exchange = BareAllToAll(mesh["ep"], sent, received, shape.hidden, dtype)
        timed["all_to_all"] = exchange
    seconds, cpu_seconds = _time_in_turns(timed, mesh, rounds)
    parts = [layer.parts() for _ in range(rounds)]
    with FlopCounterMode(display=False) as flops:
        gemms()
    own = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "parts": parts,
        "saved_bytes": saved_bytes,
        "peak_bytes": peak_bytes,
        "rows": sum(counts),
        "flops": flops.get_total_flops(),
        "bytes_sent": exchange.bytes_sent if exchange else 0,
    }
    return _summary(collectives.gather_json(own, world), rounds)


def _time_in_turns(
    timed: dict[str, Callable[[], None]], mesh: Mesh, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and processor seconds of every round."""
    wall: dict[str, list[float]] = {name: [] for name in timed}
    cpu: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    gc.collect()
    for turn in range(-WARM_UP_TURNS, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            collectives.barrier(mesh["world"])
            start, cpu_start = time.perf_counter(), time.process_time()
            timed[name]()
            if turn >= 0:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    return wall, cpu


def _summary(ranks: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    def over_ranks(key: str, combine: Callable[..., float]) -> dict[str, list[float]]:
        return {
            name: [combine(rank[key][name][turn] for rank in ranks) for turn in range(rounds)]
            for name in ranks[0][key]
        }

    seconds, cpu_seconds = over_ranks("seconds", max), over_ranks("cpu_seconds", sum)
    parts = {
        name: spread([max(rank["parts"][turn][name] for rank in ranks) for turn in range(rounds)])
        for name in ranks[0]["parts"][0]
    }
    per_rank = ("saved_bytes", "peak_bytes", "rows", "flops", "bytes_sent")
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": spread(_ratios(seconds)),
        "cpu_seconds": {name: spread(values) for name, values in cpu_seconds.items()},
        "cpu_ratio": spread(_ratios(cpu_seconds)),
        "parts_seconds": {name: values["median"] for name, values in parts.items()},
        **{key: [rank[key] for rank in ranks] for key in per_rank},
    }


def _ratios(seconds: dict[str, list[float]]) -> list[float]:
    """The layer over the sum of its bounds, round by round."""
    bounds = zip(*(values for name, values in seconds.items() if name != "layer"), strict=True)
    return [layer / sum(bound) for layer, bound in zip(seconds["layer"], bounds, strict=True)]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = (
        torch.tensor(values).double().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    )
    return {"median": float(median), "quartile_1": float(low), "quartile_3": float(high)}


def _saved_bytes(layer: MeasuredLayer) -> int:
    """Bytes that the forward keeps for the backward: distinct storages, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.moe.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, or its address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.forward().backward(layer.upstream_TH)
    return sum(num_bytes for num_bytes, _ in kept.values())


def _peak_bytes(layer: MeasuredLayer) -> int | None:
    """Growth of this process's memory in one forward and backward, gradients included.

    Over weights and tokens. None where the kernel or the C library cannot tell (not Linux, glibc).
    """
    if not return_freed_memory():  # or the layer would use unseen what making the weights has freed
        return None
    grown = peak_growth()
    layer()
    return grown()


def single_sequence(num_tokens: int, chosen_TK: Tensor | None = None) -> Context:
    """One sequence without padding, and the experts of its tokens if they are given."""
    tokens_T = torch.arange(num_tokens)
    return Context(
        num_sequences=1,
        seq_len=num_tokens,
        num_tokens=num_tokens,
        length=num_tokens,
        visible=Visibility((), ()),
        sequence_T=torch.zeros_like(tokens_T),
        position_T=tokens_T,
        valid_T=None,
        token_ids_T=tokens_T,
        experts=None if chosen_TK is None else {0: chosen_TK},
    )
