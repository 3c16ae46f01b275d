"""The projections of a model by transformers' names, and what [lora] may ask of them."""

from __future__ import annotations

from typing import NamedTuple

from moemesh.config.errors import Problem
from moemesh.config.lora import ALL_LINEAR
from moemesh.config.model import ModelConfig
from moemesh.config.suggest import nearest_choice


class Projection(NamedTuple):
    """A projection of one kind of block: its name, the block, and numbers in and out."""

    target: str
    block: str
    inputs: int
    outputs: int


def projections(model: ModelConfig) -> list[Projection]:
    """Every projection that `model` has in some layer and that can have an adapter."""
    found = _latent(model) if model.attention == "mla" else _grouped(model)
    values = model.num_heads * model.value_head_dim
    found.append(Projection("o_proj", "attention", values, model.hidden_size))
    widths = {
        "mlp": model.intermediate_size if model.num_dense_layers else 0,
        "shared experts": model.shared_width if model.num_moe_layers else 0,
        "experts": model.expert_intermediate_size if model.num_moe_layers else 0,
    }
    for block, width in widths.items():
        if width:
            for target in ("gate_proj", "up_proj"):
                found.append(Projection(target, block, model.hidden_size, width))
            found.append(Projection("down_proj", block, width, model.hidden_size))
    return found


def _grouped(model: ModelConfig) -> list[Projection]:
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    return [
        Projection(f"{name}_proj", "attention", model.hidden_size, number * model.head_dim)
        for name, number in heads.items()
    ]


def _latent(model: ModelConfig) -> list[Projection]:
    hidden, queries = model.hidden_size, model.num_heads * model.query_head_dim
    rank, latent = model.q_lora_rank, model.kv_lora_rank
    both = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
    found = [Projection("q_proj", "attention", hidden, queries)]
    if rank:
        found = [
            Projection("q_a_proj", "attention", hidden, rank),
            Projection("q_b_proj", "attention", rank, queries),
        ]
    down = latent + model.qk_rotary_head_dim
    return [
        *found,
        Projection("kv_a_proj_with_mqa", "attention", hidden, down),
        Projection("kv_b_proj", "attention", latent, both),
    ]


def adapter_rules(model: ModelConfig) -> list[Problem]:
    """Problems of the adapters of `model`: targets it has not, a rank that is no less than
    full."""
    lora = model.lora
    if not lora.rank:
        return []
    known = projections(model)
    names = tuple(dict.fromkeys(one.target for one in known))
    problems: list[Problem] = []
    for target in lora.targets:
        if target not in (*names, ALL_LINEAR):
            message = f"targets names {target}, and the model has no such projection"
            fix = nearest_choice(target, (*names, ALL_LINEAR))
            problems.append(lora.problem("not-a-choice", "targets", message, fix))
    smallest = min(
        (one for one in known if lora.adapts(one.target)),
        key=lambda one: min(one.inputs, one.outputs),
        default=None,
    )
    if smallest is not None and lora.rank > (most := min(smallest.inputs, smallest.outputs)):
        message = (
            f"rank ({lora.rank}) exceeds the smaller dimension of {smallest.target} of "
            f"{smallest.block} ({smallest.inputs} in, {smallest.outputs} out)"
        )
        problems.append(lora.problem("too-large", "rank", message, f"rank = {most}", "targets"))
    return problems
