"""Drive one dispatcher on every rank with a known routing, and return what each rank saw."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher
from moemesh.ops.permute import gather_rows
from moemesh.parallel.expert.all_gather import AllGatherDispatcher
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.deepep import DeepEPDispatcher
from moemesh.parallel.expert.exact import Exact
from moemesh.parallel.expert.hierarchical import HierarchicalDispatcher
from moemesh.parallel.expert.low_latency import LowLatencyDispatcher
from moemesh.parallel.expert.site import codec_of
from tests.parallel import fake_deep_ep

NUM_EXPERTS, NUM_SLOTS, HIDDEN = 8, 3, 4
#: Tokens of each rank: uneven, one rank empty.
TOKENS = [5, 0, 3, 7, 1, 2, 4, 6]


class Routed(NamedTuple):
    """One rank's tokens: features, chosen experts (some -1), weights."""

    x_TH: Tensor
    experts_TK: Tensor
    weights_TK: Tensor


def routed(rank: int, padding: bool = True) -> Routed:
    """The tokens of `rank`: a pure function, so that the test knows everybody's routing."""
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    scores = torch.rand(count, NUM_EXPERTS, generator=generator)
    experts_TK = scores.argsort(1)[:, :NUM_SLOTS]
    if padding and count:
        experts_TK[torch.rand(count, NUM_SLOTS, generator=generator) < 0.2] = -1
        experts_TK[-1] = -1
    x_TH = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator)
    weights_TK = torch.rand(count, NUM_SLOTS, dtype=torch.float64, generator=generator)
    return Routed(x_TH, experts_TK, weights_TK.masked_fill(experts_TK < 0, 0.0))


def make(name: str, mesh: Mesh) -> Dispatcher:
    """`name`, ``name+exact`` or ``name+fp8``."""
    name, _, mode = name.partition("+")
    ep, etp = mesh["ep"], mesh["etp"]
    if mode == "exact":
        return Exact(make(name, mesh), ep, etp)
    options: Any = {"codec": codec_of("fp8" if mode == "fp8" else "same")}
    match name:
        case "local":
            return LocalDispatcher(NUM_EXPERTS)
        case "all_to_all":
            return AllToAllDispatcher(ep, etp, NUM_EXPERTS, **options)
        case "hierarchical":
            rail, node = mesh["ep_rail"], mesh["ep_node"]
            return HierarchicalDispatcher(ep, rail, node, etp, NUM_EXPERTS, **options)
        case "low_latency" | "low_latency_overflowing":
            return LowLatencyDispatcher(
                ep,
                etp,
                NUM_EXPERTS,
                experts_per_token=NUM_SLOTS,
                max_tokens=max(TOKENS) if name == "low_latency" else 1,
                **options,
            )
        case "deepep":
            buffer = fake_deep_ep.Buffer(ep.group)
            buffer.any_dtype = True
            return DeepEPDispatcher(ep, NUM_EXPERTS, buffer)
        case "all_gather_dense" | "all_gather_uneven" | "all_gather_fewest_bytes":
            form: Any = name.removeprefix("all_gather_")
            group, host = mesh["ep_etp"], mesh.host("ep_etp")
            return AllGatherDispatcher(ep, group, NUM_EXPERTS, form, host=host, **options)
        case "all_gather_spare":
            host = mesh.host("ep_etp")
            return AllGatherDispatcher(ep, mesh["ep_etp"], NUM_EXPERTS, host=host, spare_rows=768)
        case _:
            raise ValueError(name)


def scale_of(expert: Tensor) -> Tensor:
    """Expert i multiplies by i + 1: a wrong expert or a lost row changes the sum."""
    return expert.double() + 1


def dispatch_on_rank(mesh: Mesh, name: str) -> dict[str, Any]:
    """plan, dispatch, scale by expert and weight, combine, and the backward of it all."""
    dispatcher = make(name, mesh)
    x_TH, experts_TK, weights_TK = routed(mesh.rank)
    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    plan = dispatcher.plan(experts_TK)
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    first = mesh["ep"].index * len(rows.counts_L)
    expert_R = torch.repeat_interleave(
        torch.arange(first, first + len(rows.counts_L)), rows.counts_L
    )
    # Each expert-tensor rank computes a part of every row; the parts add up.
    share = 1 / mesh["etp"].size
    x_RH = rows.source_NH.index_select(0, rows.map.source_R)
    y_RH = x_RH * (scale_of(expert_R) * rows.weights_R)[:, None] * share
    y_TH = dispatcher.combine(y_RH, plan).wait()
    (y_TH * (torch.arange(HIDDEN) + 1)).sum().backward()
    again = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    return {
        "y": y_TH.detach(),
        "grad_x": x_TH.grad,
        "grad_weights": weights_TK.grad,
        "rows": gather_rows(rows.source_NH, rows.map).detach(),
        "replayed": gather_rows(again.source_NH, again.map).detach(),
        "counts": rows.counts_L,
        "ledger": mesh.ledger.rows(),
    }


def assert_contract(ranks: list[dict[str, Any]], layout: Layout) -> None:
    """Every rank has the sum over experts and its gradients, also from a saved plan. Its rows are
    those of the tokens of its group: by expert, owner rank and token, so that sums do not depend on
    the layout."""
    per_expert = NUM_EXPERTS // layout.ep
    for rank, got in enumerate(ranks):
        for key, tensor in expected(rank).items():
            assert_close(got[key], tensor, rtol=1e-12, atol=1e-12, msg=f"{key} of rank {rank}")
        assert torch.equal(got["rows"], got["replayed"])
        first = layout.coordinates(rank)["ep"] * per_expert
        rows = [
            routed(owner).x_TH[token]
            for expert in range(first, first + per_expert)
            for owner in layout.group_of("ep_etp", rank)
            for token in (routed(owner).experts_TK == expert).any(1).nonzero().flatten().tolist()
        ]
        assert torch.equal(got["rows"], torch.stack(rows))
        assert int(got["counts"].sum()) == len(rows)


def expected(rank: int) -> dict[str, Tensor]:
    """The same by hand, one token at a time."""
    x_TH, experts_TK, weights_TK = routed(rank)
    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    scale_TK = torch.where(experts_TK >= 0, scale_of(experts_TK), 0.0)
    y_TH = (scale_TK * weights_TK).sum(1, keepdim=True) * x_TH
    (y_TH * (torch.arange(HIDDEN) + 1)).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x_TH, weights_TK)]
    return {"y": y_TH.detach(), "grad_x": grads[0], "grad_weights": grads[1]}
