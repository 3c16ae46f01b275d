"""One MoE layer with a forced routing, on the ranks of any plan: the harness of test_experts.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.contenders import apply_experts
from benchmarks.workloads import rank_tokens, workload
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.initialization import normal_slice
from moemesh.model.moe import MoE
from moemesh.model.router import Routing
from moemesh.parallel.expert.build import make_dispatcher, overlapped

TOKENS, HIDDEN, WIDTH, EXPERTS, SLOTS, GROUPS = 96, 16, 24, 16, 4, 8
CONFIG = ModelConfig(
    hidden_size=HIDDEN,
    num_experts=EXPERTS,
    experts_per_token=SLOTS,
    expert_intermediate_size=WIDTH,
    num_shared_experts=0,
)


class Case(NamedTuple):
    """What varies inside one mesh."""

    dispatcher: str
    combine: str
    chunks: int
    workload: str


class Result(NamedTuple):
    """Of all tokens, in their order, and of all experts."""

    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    grad_gate_up: Tensor
    grad_down: Tensor


def step_of(name: str) -> int:
    """A step in which the workload shows what it is there for (W7: its burst)."""
    return 33 if name == "W7" else 3


def routing_of(name: str, gids: range) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts and weights of the tokens `gids`, functions of the ids alone."""
    experts = workload(
        name,
        seed=1,
        step=step_of(name),
        gids=gids,
        num_experts=EXPERTS,
        experts_per_token=SLOTS,
        num_groups=GROUPS,
    )
    x = normal_slice(0, "x", (TOKENS, HIDDEN), [gids, range(HIDDEN)]).double()
    weights = normal_slice(0, "weights", (TOKENS, SLOTS), [gids, range(SLOTS)]).double().sigmoid()
    return x.requires_grad_(), experts, weights.requires_grad_()


def run_layer(mesh: Mesh, plan: Plan, gids: range, name: str) -> dict[str, Any]:
    """Forward and backward of this rank's tokens through its experts."""
    moe = MoE(CONFIG)
    moe.dispatcher = make_dispatcher(plan.dispatcher, CONFIG, plan, mesh, TOKENS)
    moe.runner = overlapped(plan.dispatch_chunks)
    ep, etp = mesh["ep"], mesh["etp"]
    local = shard_range(EXPERTS, ep.size, ep.index)
    width = shard_range(WIDTH, etp.size, etp.index)
    slices = {
        "gate_up": ([local, range(2), width, range(HIDDEN)], (EXPERTS, 2, WIDTH, HIDDEN)),
        "down": ([local, range(HIDDEN), width], (EXPERTS, HIDDEN, WIDTH)),
    }
    for leaf, (parts, shape) in slices.items():
        value = normal_slice(0, leaf, shape, parts).double() * 0.3
        setattr(moe.experts, leaf, nn.Parameter(value))
    x_TH, experts_TK, weights_TK = routing_of(name, gids)
    unused = torch.zeros(())
    routing = Routing(weights_TK, experts_TK, unused, unused, unused, unused, unused)
    y_TH = apply_experts(moe, x_TH, routing)
    upstream = normal_slice(0, "upstream", (TOKENS, HIDDEN), [gids, range(HIDDEN)]).double()
    y_TH.backward(upstream)
    return {
        "y": y_TH.detach(),
        "grad_x": x_TH.grad,
        "grad_weights": weights_TK.grad,
        "grad_gate_up": (slices["gate_up"][0], moe.experts.gate_up.grad),
        "grad_down": (slices["down"][0], moe.experts.down.grad),
    }


def layer_on_rank(mesh: Mesh, keys: dict[str, Any], cases: list[Case]) -> list[dict[str, Any]]:
    """Every case, one after the other, on the same ranks."""
    found = []
    for case in cases:
        chosen = {"dispatcher": case.dispatcher, "combine": case.combine}
        plan = Plan(**keys, **chosen, dispatch_chunks=case.chunks)
        gids = rank_tokens(case.workload, num_ranks=mesh.world_size, num_tokens=TOKENS)[mesh.rank]
        found.append(run_layer(mesh, plan, gids, case.workload))
    return found


def together(ranks: list[dict[str, Any]]) -> Result:
    """Tokens concatenated in rank order; expert gradients of replicas summed."""
    tokens = [torch.cat([rank[key] for rank in ranks]) for key in ("y", "grad_x", "grad_weights")]
    experts = []
    for key, shape in (
        ("grad_gate_up", (EXPERTS, 2, WIDTH, HIDDEN)),
        ("grad_down", (EXPERTS, HIDDEN, WIDTH)),
    ):
        total = torch.zeros(shape, dtype=torch.float64)
        for rank in ranks:
            parts, gradient = rank[key]
            total[tuple(slice(part.start, part.stop) for part in parts)] += gradient
        experts.append(total)
    return Result(*tokens, *experts)
