"""Chosen experts: where some of a layer train and others do not, they are stacks of their own.

Legend: E experts of a layer, P ranks of ep.

Every rank of ep puts its chosen experts first, in ``experts.gate_up`` and so on, the others behind
them in ``experts.rest``. How many are chosen may differ from rank to rank, and be none. The router,
losses, loads and checkpoints name experts by logical id, as where experts migrate
(:mod:`moemesh.parallel.expert.homes`): ids become places right before the dispatcher.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.plan import Plan
from moemesh.config.tuning import STACKS, Tuning, places
from moemesh.model.transformer import Transformer
from moemesh.parallel.placement import Placement


def split_experts(
    model: Transformer,
    placements: MutableMapping[str, Placement],
    plan: Plan,
    tuning: Tuning,
    mesh: Mesh,
) -> None:
    """Split the stacks of every layer of which some experts train: the parameters held here, and
    the placements of all ranks. All weights have their values."""
    whole = dict(placements)
    placements.clear()
    behind: dict[str, Placement] = {}
    for name, where in whole.items():
        module, _, leaf = name.rpartition(".")
        if behind and not name.startswith(next(iter(behind)).partition("rest.")[0]):
            placements |= behind
            behind.clear()
        chosen = None
        if where.is_expert and leaf in STACKS:
            chosen = tuning.chosen(int(module.split(".")[1]), where.shape[0])
        if chosen is None:
            placements[name] = where
            continue
        shares = places(chosen, where.shape[0], plan.ep)
        rest = f"{module}.rest.{leaf}"
        for index, part in enumerate((name, rest)):
            lists = [share[index] for share in shares]
            into = behind if index else placements
            into[part] = replace(
                where,
                name=part,
                shape=(sum(map(len, lists)), *where.shape[1:]),
                places=tuple(expert for one in lists for expert in one),
                per_rank=tuple(map(len, lists)),
                trains=where.trains and not index,
            )
    placements |= behind
    for layer, moe in model.moe_layers().items():
        chosen = tuning.chosen(layer, model.config.num_experts)
        if chosen is None:
            continue
        shares = places(chosen, model.config.num_experts, plan.ep)
        order = [expert for mine, others in shares for expert in (*mine, *others)]
        moe.place_E = torch.argsort(torch.tensor(order, device=mesh.device))
        mine, others = shares[mesh["ep"].index]
        first = min((*mine, *others))
        moe.experts.split([expert - first for expert in mine], [e - first for e in others])
