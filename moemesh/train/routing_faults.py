"""Routing errors: all ranks stop together, with one message.

Nothing raises between two collectives: a fault is kept as a number, or as a sentence, until a point
where the ranks meet anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.model.batch import Batch
from moemesh.model.faults import NO_FAULT, RoutingError, check_experts, describe_logit
from moemesh.parallel.parallelize import RankModel


def refuse_replayed(parallel: RankModel, microbatches: Sequence[Batch]) -> None:
    """Raise RoutingError on every rank when a routing to be replayed is none, on any rank.

    Either all ranks replay or none does; all ranks call.
    """
    if all(batch.experts is None for batch in microbatches):
        return
    widths: dict[int, int] = {}
    problem = None
    try:
        for batch in microbatches:
            _check_replayed(parallel, batch, widths)
    except RoutingError as error:
        problem = str(error)
    told = gather_json([problem, sorted(widths.items())], parallel.mesh.control)
    for rank, (other, _) in enumerate(told):
        if other is not None:
            raise RoutingError(f"rank {rank}: {other}")
    if any(other != told[0][1] for _, other in told):
        raise RoutingError(
            "replayed routings of one layer differ in experts per token between ranks: "
            + "; ".join(f"rank {rank}: {dict(other)}" for rank, (_, other) in enumerate(told))
        )


def _check_replayed(parallel: RankModel, batch: Batch, widths: dict[int, int]) -> None:
    layers = parallel.model.config.routed_layers
    seq_len = batch.tokens_BS.shape[1]
    positions = torch.arange(seq_len, device=batch.sequences_B.device)
    ids_T = (batch.sequences_B[:, None] * seq_len + positions).flatten()
    for layer, experts_TK in (batch.experts or {}).items():
        if layer not in layers:
            raise RoutingError(f"layer {layer} has no experts: layers {list(layers)} have")
        if len(experts_TK) != batch.num_tokens:
            raise RoutingError(
                f"layer {layer}: a routing of {len(experts_TK)} tokens for a microbatch of "
                f"{batch.num_tokens}"
            )
        num_experts = parallel.model.config.num_experts
        check_experts(experts_TK, num_experts, layer=layer, token_ids_T=ids_T)
        if widths.setdefault(layer, experts_TK.shape[1]) != experts_TK.shape[1]:
            raise RoutingError(f"layer {layer}: microbatches differ in experts per token")


def refuse_bad_logits(parallel: RankModel, fault_L: Tensor, seq_len: int) -> None:
    """Raise RoutingError on every rank when a router's logit was not finite on any rank.

    `fault_L`: the first fault here in each MoE layer of the model. All ranks call, and they do so
    only when the gradient norm, which they share, is not finite: a good step pays nothing.
    """
    model, mesh = parallel.model, parallel.mesh
    if not fault_L.numel():
        return
    faults = fault_L.clone()
    all_reduce_(faults, mesh["world"], op="min", caller="step.faults", phase="optimizer")
    # The first layer is where it began: what comes after has read its results.
    for layer, code in zip(model.config.routed_layers, faults.tolist(), strict=True):
        if code != NO_FAULT:
            raise RoutingError(describe_logit(layer, code, model.config.num_experts, seq_len))
