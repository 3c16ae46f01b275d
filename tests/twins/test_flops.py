"""FLOPs that the planner expects of the devices, beside those of the products in real steps."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moemesh.planner.layout_sources import from_plan, trained_shares
from moemesh.planner.parameters import hardware_flops, training_flops
from moemesh.planner.shapes.counted import shape_of
from moemesh.planner.step_parts import pass_flops
from moemesh.sharding.load_run import load_run
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.training import Shape, build, microbatches, on_ranks_of

BATCH, SEQ_LEN = 2, 64
LATENT = [
    f"model.{key}"
    for key in (
        "attention=mla", "q_lora_rank=48", "kv_lora_rank=32", "qk_nope_head_dim=16",
        "qk_rotary_head_dim=8", "v_head_dim=24",
    )
]  # fmt: skip


def _grouped(a: list[int], b: list[int], *_: Any, **__: Any) -> int:
    """FLOPs of [M, K] x [E, K, N] in groups of rows, or of [K, M] x [M, N] in groups of columns."""
    return 2 * prod(a) * b[-1]


def _forward(query: list[int], key: list[int], value: list[int], *_: Any, **__: Any) -> int:
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _backward(_: Any, query: list[int], key: list[int], value: list[int], *__: Any, **___: Any):
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


_ATEN = torch.ops.aten
#: Operations that torch's counter leaves out: -> FLOPs from the sizes of their inputs.
COUNTED = {
    _ATEN._grouped_mm: _grouped,
    _ATEN.addmm_: lambda _, a, b, **__: 2 * prod(a) * b[1],
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counted_on_rank(mesh: Any, config: Any) -> int:
    """FLOPs of one step."""
    shape = Shape(BATCH, SEQ_LEN)
    parallel = build(mesh, config.model, config.plan, shape, "float32", tuning=config.tuning)
    batches = microbatches(config.model, config.plan, shape, 1, mesh)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        gradients_of_step(parallel, batches, TimelineRecorder(0))
    return counter.get_total_flops()


def config_of(*overrides: str) -> Any:
    sizes = (f"data.seq_len={SEQ_LEN}", f"data.global_batch={BATCH}", "train.dtype=float32")
    return load_run([], [*sizes, *overrides], environ={}).config


@pytest.mark.parametrize(
    ("near", "overrides"),
    [
        (0.0, []),
        (0.0, ["model.num_experts=0", "model.num_shared_experts=0"]),
        (0.0, ["plan.recompute=selective"]),
        (0.0, ["plan.recompute=selective", "plan.recompute_experts=false"]),
        (0.0, ["plan.recompute=selective", "plan.recompute_attention=false"]),
        (0.0, ["model.num_mtp_layers=1", "model.tied_embeddings=true"]),
        (0.0, LATENT),
        # A run skips the last product of a dense layer, whose result no backward reads.
        (0.02, ["plan.recompute=full"]),
        (0.02, ["model.num_mtp_layers=2", "plan.recompute=full"]),
        # Inputs of adapters are as wide as their outputs on average.
        (0.001, ["lora.rank=4"]),
        (0.02, ["lora.rank=16", "plan.recompute=full"]),
        (0.005, ["lora.rank=16", 'lora.targets=["q_proj", "down_proj"]']),
    ],
)
def test_flops_are_those_of_the_run(near: float, overrides: list[str]) -> None:
    """With whole rows of scores, as the kernels of a CPU count them."""
    config = config_of("model.num_layers=3", *overrides)
    (measured,) = on_ranks_of(config.model, config.plan, counted_on_rank, config)
    layout = from_plan(config.plan, seq_len=SEQ_LEN, global_batch=BATCH)
    layout = layout.changed(**trained_shares(config))
    expected = hardware_flops(shape_of(config.model), layout, "full") * BATCH * SEQ_LEN
    assert expected == pytest.approx(measured, rel=max(near, 1e-9))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("recompute", "rank"), [("none", 0), ("none", 4), ("selective", 0), ("full", 0)]
)
def test_parts_of_a_step_have_all_layers(ahead: int, recompute: str, rank: int) -> None:
    """Without what a CPU repeats in any case, in the core and in the loss, and without the products
    of adapters."""
    config = config_of(
        f"model.num_mtp_layers={ahead}", f"plan.recompute={recompute}", f"lora.rank={rank}"
    )
    shape, tokens = shape_of(config.model), BATCH * SEQ_LEN
    layout = from_plan(config.plan, seq_len=SEQ_LEN, global_batch=BATCH)
    layout = layout.changed(loss="fused", attention_kernel="eager", adapters=rank > 0)
    layout = layout.changed(trained_dense=0.0, trained_experts=0.0)
    passes = pass_flops(config)
    assert sum(passes.values()) == pytest.approx(hardware_flops(shape, layout, "causal") * tokens)
    if recompute == "none":
        model_flops = training_flops(shape, SEQ_LEN, adapters=rank > 0)
        assert sum(passes.values()) == pytest.approx(model_flops * tokens)
