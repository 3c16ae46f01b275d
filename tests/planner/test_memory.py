"""Memory: published activation bars, model states under ZeRO, schedules, and the mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from moemesh.config.cluster import load_cluster
from moemesh.planner.kept_tensors import layer_kept
from moemesh.planner.memory import estimate_memory, rank_memory, rank_weights
from moemesh.planner.parameters import count_parameters
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import gpt, load_model
from moemesh.planner.shapes.shape import LayerKind
from moemesh.planner.speed import kv_cache_bytes
from moemesh.planner.timing.price import pricing

GIB = 2**30

SELECTIVE = {"sequence_parallel": True, "recompute": frozenset({"attention"})}
PLAIN = {"sequence_parallel": False}
GPT_22B: dict[str, Any] = {"tp": 8, "seq_len": 2048, "global_batch": 4, "microbatch": 4}
GPT_175B: dict[str, Any] = {
    "tp": 8, "pp": 8, "stages_per_rank": 3, "schedule": "interleaved_1f1b", "seq_len": 2048,
    "global_batch": 64,
}  # fmt: skip

#: Bars of Figure 1 of arXiv:2205.05198, to the last digit.
BARS = [
    ("gpt-22b", GPT_22B | PLAIN, 59.25),
    ("gpt-22b", GPT_22B | SELECTIVE, 9.5625),
    ("gpt3-175b", GPT_175B | PLAIN, 66.84375),
    ("gpt3-175b", GPT_175B | SELECTIVE, 12.3515625),
]


@pytest.mark.parametrize(("name", "keys", "gib"), BARS)
def test_activation_bars(name: str, keys: dict[str, Any], gib: float) -> None:
    layout = PlannedLayout(**keys, attention_kernel="eager")
    assert rank_memory(load_model(name).shape, layout, 0).activations == gib * GIB


def test_korthikanti_forms() -> None:
    """s b h (34 + 5 a s / h) without parallelism, and its two parallel forms."""
    shape, seq = gpt(1, 512, 8), 256
    kind, size = LayerKind(False, 0), 256 * 512
    scores = 5 * 8 * seq / 512

    def kept(**keys: Any) -> float:
        layout = PlannedLayout(seq_len=seq, global_batch=1, attention_kernel="eager", **keys)
        return layer_kept(shape, kind, layout).on_rank(layout)

    assert kept() == size * (34 + scores)
    assert kept(tp=4, sequence_parallel=False) == size * (10 + 24 / 4 + scores / 4)
    assert kept(tp=4) == size * (34 + scores) / 4
    assert kept(tp=4, recompute=frozenset({"attention"})) == size * 34 / 4
    assert kept(tp=4, recompute=frozenset({"full"})) == 2 * size / 4
    flash = PlannedLayout(seq_len=seq, global_batch=1)
    assert layer_kept(shape, kind, flash).on_rank(flash) == size * 34 + 4 * 8 * seq


def test_modern_layer() -> None:
    """12 h + 4 h_kv + 8 f a token (6 f with a fused SwiGLU), and the log-sum-exp."""
    shape = load_model("llama3-8b").shape
    layout = PlannedLayout(seq_len=1, global_batch=1, fused_activation=False)
    kept_bytes = layer_kept(shape, LayerKind(False, 0), layout).on_rank(layout)
    assert kept_bytes == 12 * 4096 + 4 * 1024 + 8 * 14336 + 4 * 32
    fused = layout.changed(fused_activation=True)
    assert kept_bytes - layer_kept(shape, LayerKind(False, 0), fused).on_rank(fused) == 2 * 14336
    unfused = layout.changed(fused_norm=False)
    more = layer_kept(shape, LayerKind(False, 0), unfused).on_rank(unfused)
    assert more - kept_bytes == 8 * 4096


def test_expert_tensor_parallelism_gathers_rows_and_cuts_widths() -> None:
    """Under every recomputation: a row of h channels is kept by all etp ranks, its width by one."""
    shape, kind = load_model("qwen3-30b-a3b").shape, LayerKind(True, 0)
    k, h = shape.experts_per_token, shape.hidden_size
    for recompute, rows in (((), 2), (("operators",), 1), (("experts",), 2), (("moe",), 0)):
        layout = PlannedLayout(seq_len=1, global_batch=4, tp=4, recompute=frozenset(recompute))
        one, four = (layer_kept(shape, kind, layout.changed(etp=etp)).routed for etp in (1, 4))
        assert four - one == rows * k * 2 * h * (4 - 1), recompute


def test_recomputed_layers_are_the_first_of_a_rank() -> None:
    """Every number from none to all: with kinds of layers together, in memory, peak and time."""
    shape = load_model("deepseek-v3").shape.changed(num_layers=4, moe_layers=(2, 3))
    layout = PlannedLayout(seq_len=4096, global_batch=2, dp=2)
    full = layout.changed(recompute=frozenset({"full"}))
    price = pricing(load_cluster("dgx_h100"))

    def priced(layout: PlannedLayout) -> tuple[float, ...]:
        peak, seconds = price.price(shape, layout)
        required = estimate_memory(shape, layout).worst.activations
        return required, peak.activations + peak.working, -seconds["total"]

    rows = [priced(full.changed(recompute_layers=number)) for number in range(5)]
    assert rows[0] == pytest.approx(priced(layout)) and rows[4] == pytest.approx(priced(full))
    assert rows[1:] == sorted(rows[1:], reverse=True)
    kept = [layer_kept(shape, kind, full).on_rank(layout) for kind in shape.kinds]
    whole = [layer_kept(shape, kind, layout).on_rank(layout) for kind in shape.kinds]
    saved = [size - left for size, left in zip(whole, kept, strict=True)]
    assert rows[2][0] - rows[3][0] == pytest.approx(saved[2])


# Model states: bytes per parameter.

STATES = [
    ({"gradient_bytes": 2}, 16.0),
    ({}, 18.0),
    ({"gradient_bytes": 6}, 20.0),
    ({"zero": 1}, 6 + 12 / 8),
    ({"zero": 1, "gradient_bytes": 2}, 4 + 12 / 8),
    ({"zero": 2, "gradient_bytes": 2}, 2 + 14 / 8),
    ({"zero": 3, "gradient_bytes": 2}, 16 / 8),
    ({"zero": 1, "optimizer_bytes": 8}, 6 + 8 / 8),
    ({"zero": 1, "zero_group": 4}, 6 + 12 / 4),
]


@pytest.mark.parametrize(("keys", "each"), STATES)
def test_bytes_per_parameter(keys: dict[str, Any], each: float) -> None:
    shape = load_model("llama3-8b").shape
    layout = PlannedLayout(dp=8, seq_len=8, global_batch=8, **keys)
    states = rank_memory(shape, layout, 0).states
    assert states == pytest.approx(each * count_parameters(shape).total, rel=1e-12)


def test_two_values_of_n() -> None:
    """Dense states are cut over dp cp, expert states over dp cp tp / (ep etp): two sums."""
    shape = load_model("qwen3-30b-a3b").shape
    layout = PlannedLayout(tp=2, dp=8, ep=8, zero=1, seq_len=8, global_batch=8)
    assert (layout.dense_shards, layout.expert_shards) == (8, 2)
    weights = rank_weights(shape, layout, 0)
    dense, expert = weights.sharded / 2 + weights.replicated, weights.expert / 8
    memory = rank_memory(shape, layout, 0)
    assert memory.optimizer == 12 * (dense / 8 + expert / 2)
    assert memory.optimizer != 12 * (dense + expert) / 8


def test_stages_hold_their_own_parts() -> None:
    shape = load_model("deepseek-v3").shape
    layout = PlannedLayout(pp=16, dp=64, ep=64, seq_len=64, global_batch=1024)
    ranks = [rank_weights(shape, layout, rank) for rank in range(16)]
    counts = count_parameters(shape)
    # Once the whole model, its extra prediction layer, and the table that this layer reads, too.
    table = shape.vocab_size * shape.hidden_size
    assert sum(weights.total for weights in ranks) == counts.total + counts.mtp + table


def test_dualpipe_holds_two_copies() -> None:
    shape = load_model("mixtral-8x7b").shape
    keys: dict[str, Any] = {"pp": 4, "dp": 2, "ep": 2, "seq_len": 8, "global_batch": 64}
    once = PlannedLayout(**keys)
    twice = PlannedLayout(**keys, schedule="dualpipe")
    total = count_parameters(shape).total
    assert sum(rank_weights(shape, once, rank).total for rank in range(4)) == total
    assert sum(rank_weights(shape, twice, rank).total for rank in range(4)) == 2 * total


def test_weights_that_an_asynchronous_schedule_stashes_are_counted() -> None:
    """PipeDream keeps p - r versions of a stage's weights, PipeDream-2BW two: weights alone."""
    shape = load_model("llama3-8b").shape
    keys: dict[str, Any] = {"pp": 4, "seq_len": 8, "global_batch": 8}
    plain = estimate_memory(shape, PlannedLayout(**keys)).ranks
    for name, copies in (("pipedream", (4, 3, 2, 1)), ("pipedream_2bw", (2, 2, 2, 2))):
        stashed = estimate_memory(shape, PlannedLayout(schedule=name, **keys)).ranks
        for one, more, count in zip(plain, stashed, copies, strict=True):
            assert more.dense_weights == count * one.dense_weights
            assert (more.gradients, more.optimizer) == (one.gradients, one.optimizer)


def test_activations_are_those_that_the_schedule_keeps() -> None:
    """Deferred weight gradients hold their inputs: ZB-H2 keeps 7 of 8 on every one of 4 ranks."""
    shape = load_model("llama3-8b").shape.changed(num_layers=4, vocab_size=8)
    for name, counts in (("zb_h2", (7, 7, 7, 7)), ("1f1b", (4, 3, 2, 1)), ("gpipe", (8, 8, 8, 8))):
        layout = PlannedLayout(
            pp=4, schedule=name, seq_len=8, global_batch=8, layers_per_stage=(1, 1, 1, 1)
        )
        one = layer_kept(shape, LayerKind(False, 0), layout).on_rank(layout)
        ratios = [memory.activations / one for memory in estimate_memory(shape, layout).ranks]
        assert ratios == pytest.approx(counts)


KV = [("llama3-405b", 516_096), ("deepseek-v3", 70_272)]


@pytest.mark.parametrize(("name", "each"), KV)
def test_kv_cache(name: str, each: int) -> None:
    assert kv_cache_bytes(load_model(name).shape, 2, 10) == 2 * 10 * each
