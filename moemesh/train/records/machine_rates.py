"""Rates of the machine before the first step, on which the predicted seconds of a step are based.

All ranks measure at the same time, as they compute in a step, so that shared cores and links are
part of the rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moemesh.comm.collectives import barrier
from moemesh.comm.mesh import Axis, Mesh
from moemesh.comm.transfers import all_reduce_
from moemesh.config.layout import AXES
from moemesh.config.run import RunConfig
from moemesh.planner.step_parts import MEMORY, bandwidth, latency
from moemesh.trace import step_seconds as parts

#: Seconds for one rate of computation, and the least number of repetitions.
_SECONDS, _LEAST = 0.01, 5
#: Largest sizes of a product: larger ones have the same rate.
_MAX_ROWS, _MAX_WIDTH = 512, 1024
#: Numbers of the tensors whose sums measure an axis, and of the one that measures the memory.
_SMALL, _LARGE, _STREAMED = 64, 1 << 17, 1 << 22


def measure_rates(config: RunConfig, mesh: Mesh) -> dict[str, float]:
    """Rates by the names of :mod:`moemesh.planner.step_parts`; all ranks call. Empty on a GPU."""
    if mesh.device.type != "cpu":
        return {}
    model, plan, data = config.model, config.plan, config.data
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    hidden, tp = min(model.hidden_size, _MAX_WIDTH), plan.tp
    tokens = plan.tokens_per_rank(data.seq_len, data.global_batch) * tp

    def filled(*sizes: int) -> Tensor:
        return torch.full(sizes, 0.01, dtype=dtype)

    def mlp(rows: int, width: int) -> float:
        """FLOP/s of an MLP of three products."""
        rows, width = min(max(rows, 1), _MAX_ROWS), min(max(width, 1), _MAX_WIDTH)
        x, gate, down = filled(rows, hidden), filled(hidden, width), filled(width, hidden)
        return 6 * rows * hidden * width / _seconds(lambda: (F.silu(x @ gate) * (x @ gate)) @ down)

    rates: dict[str, float] = {}
    with torch.no_grad(), mesh.ledger.paused():
        barrier(mesh.control)
        # One sequence through the projections and the core of some heads.
        rows = min(max(data.seq_len // plan.cp, 1), _MAX_ROWS)
        size = max(model.query_head_dim, 1)
        heads = max(min(model.num_heads // tp, _MAX_WIDTH // size), 1)
        x, inward = filled(rows, hidden), filled(hidden, heads * size)
        outward = filled(heads * size, hidden)

        def attention() -> Tensor:
            q = (x @ inward).view(1, rows, heads, size).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return mixed.transpose(1, 2).reshape(rows, heads * size) @ outward

        flops = 4 * rows * hidden * heads * size + 2 * rows * rows * heads * size
        rates[parts.ATTENTION] = rates[parts.TOGETHER] = flops / _seconds(attention)
        if model.num_dense_layers:
            rates[parts.DENSE_MLPS] = mlp(tokens, model.intermediate_size // tp)
        if model.num_experts:
            # Rows of one expert with uniform routing.
            chosen = tokens // tp * model.experts_per_token * plan.ep * plan.etp
            width = model.expert_intermediate_size // plan.etp
            rates[parts.EXPERTS] = mlp(chosen // model.num_experts, width)
        width = min(model.vocab_size // tp, _MAX_WIDTH)
        x, head = filled(min(tokens, _MAX_ROWS), hidden), filled(hidden, width)
        flops = 2 * len(x) * hidden * width
        rates[parts.HEAD] = flops / _seconds(lambda: (x @ head).log_softmax(1))
        streamed = torch.zeros(_STREAMED)
        rates[MEMORY] = 2 * 4 * _STREAMED / _seconds(lambda: streamed.add_(1.0))
        of_ranks: dict[tuple[int, ...], tuple[float, float]] = {}
        for name in AXES:
            axis = mesh[name]
            if axis.size > 1:  # axes of the same ranks have one group
                known = of_ranks.get(ranks := tuple(axis.ranks)) or _axis_rates(axis)
                of_ranks[ranks] = rates[latency(name)], rates[bandwidth(name)] = known
    return rates


def _axis_rates(axis: Axis) -> tuple[float, float]:
    """Seconds of an operation, and bytes/s that a rank sends."""

    def seconds(number: int) -> float:
        tensor = torch.zeros(number)
        run = partial(all_reduce_, tensor, axis, caller="rates", phase="control")
        return _seconds(run, is_timed=False)

    small, large = seconds(_SMALL), seconds(_LARGE)
    sent = 2 * 4 * _LARGE * (axis.size - 1) / axis.size
    return small, sent / max(large - small, large / 10)


def _seconds(run: Callable[[], object], *, is_timed: bool = True) -> float:
    """Mean seconds of `run`. `is_timed`: repeated until `_SECONDS` have passed; an operation of
    several ranks has the same number of repetitions on each."""
    for _ in range(2):
        run()
    begin, number, passed = time.perf_counter(), 0, 0.0
    while number < _LEAST or (is_timed and passed < _SECONDS):
        run()
        number, passed = number + 1, time.perf_counter() - begin
    return max(passed / number, 1e-9)
