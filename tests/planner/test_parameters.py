"""Exact parameter counts against released models, papers and our own modules."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from moemesh.config.model import ModelConfig
from moemesh.config.sources import preset_names
from moemesh.model.transformer import Transformer
from moemesh.planner.parameters import (
    attended_tokens,
    core_flops,
    count_flops,
    count_parameters,
    end_weights,
    hardware_flops,
    layer_weights,
    training_flops,
)
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import gpt, load_model
from moemesh.planner.shapes.shape import ModelShape, from_model_config
from tests.planner.closed_forms import gpt_iteration, gpt_parameters

#: Exactly as released (DeepSeek without its extra prediction layer and selection biases).
RELEASED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_209_408,
    "qwen2-57b-a14b": 57_408_658_944,
}


@pytest.mark.parametrize(("name", "total"), RELEASED.items())
def test_released_models(name: str, total: int) -> None:
    assert count_parameters(load_model(name).shape).total == total


def test_every_preset_is_counted() -> None:
    assert {*preset_names()} - {"tiny"} <= RELEASED.keys()


def test_deepseek_v3_without_tables() -> None:
    counts = count_parameters(load_model("deepseek-v3").shape)
    assert f"{counts.active_without_embeddings / 1e9:.2f}" == "35.70"
    assert counts.selection_bias == 58 * 256
    assert counts.mtp == end_weights(load_model("deepseek-v3").shape)["mtp"].total > 11e9


def test_parts_add_up() -> None:
    for name in RELEASED:
        parts = asdict(count_parameters(load_model(name).shape))
        whole = ("total", "active", "active_without_embeddings", "mtp", "selection_bias")
        assert sum(size for part, size in parts.items() if part not in whole) == parts["total"]


@pytest.mark.parametrize("vocab", [51200, 50257])
@pytest.mark.parametrize("hidden", [128, 256])
def test_gpt_closed_form(hidden: int, vocab: int) -> None:
    """12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)), and the final norm that it leaves out."""
    layers, positions = 3, 2048
    counted = count_parameters(gpt(layers, hidden, 8, vocab)).total
    assert counted == gpt_parameters(layers, hidden, vocab, positions) + 2 * hidden
    inner = 1 + 13 / (12 * hidden) + (vocab + positions) / (12 * layers * hidden)
    assert gpt_parameters(layers, hidden, vocab, positions) == pytest.approx(
        12 * layers * hidden**2 * inner
    )


MODELS = [
    {},
    {"qk_norm": True, "tied_embeddings": True},
    {"num_experts": 0, "num_shared_experts": 0},
    {"router_logit_bias": True, "num_shared_experts": 0, "first_dense_layers": 0},
    {"num_shared_experts": 2, "shared_intermediate_size": 320, "vocab_size": 37},
]


@pytest.mark.parametrize("keys", MODELS, ids=str)
def test_our_own_modules(keys: dict[str, object]) -> None:
    config = ModelConfig(**keys)  # type: ignore[arg-type]
    modules = sum(parameter.numel() for parameter in Transformer(config).parameters())
    assert count_parameters(from_model_config(config)).total == modules


def test_the_router_of_a_bias_and_the_shared_gate() -> None:
    sizes = {
        "num_layers": 1, "hidden_size": 8, "vocab_size": 16, "num_heads": 2, "num_kv_heads": 2,
        "head_dim": 4, "moe_layers": (0,), "num_experts": 4, "experts_per_token": 2,
        "expert_intermediate_size": 6, "shared_intermediate_size": 10,
    }  # fmt: skip
    plain = layer_weights(ModelShape(**sizes), True).total
    assert layer_weights(ModelShape(**sizes, shared_gate=True), True).total == plain + 8
    assert layer_weights(ModelShape(**sizes, router_logit_bias=True), True).total == plain + 4
    biased = layer_weights(ModelShape(**sizes, expert_bias=True), True)
    assert biased.total == plain + 4 * (2 * 6 + 8)
    # Biases are cut like their matrices; the bias added after the sum over etp, by its channels.
    assert biased.expert == layer_weights(ModelShape(**sizes), True).expert + 4 * (2 * 6 + 8)


def test_what_tensor_parallelism_cuts() -> None:
    shape = load_model("llama3-8b").shape
    weights = layer_weights(shape, False)
    assert weights.replicated == 2 * 4096
    whole = layer_weights(shape, False, True)
    assert whole.replicated == 2 * 4096 + 4096 * 4096
    assert whole.total == weights.total


# FLOPs in both conventions: published rates, closed forms, and the mistakes about them.


#: GFLOP per token of training, as printed.
RATES = [
    ("deepseek-v3", "causal", "250.45"),
    ("deepseek-v3", "full", "281.15"),
    ("qwen3-235b-a22b", "causal", "148.3"),
]


@pytest.mark.parametrize(("name", "convention", "printed"), RATES)
def test_published_rates(name: str, convention: str, printed: str) -> None:
    flops = count_flops(load_model(name).shape, 4096, convention)  # type: ignore[arg-type]
    digits = len(printed.partition(".")[2])
    assert f"{flops.training / 1e9:.{digits}f}" == printed


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96)])
def test_gpt_closed_form_of_flops(layers: int, hidden: int, heads: int, recompute: bool) -> None:
    """72 B s L h^2 (1 + s/(6h) + V/(12Lh)); 96 and V/(16Lh) with full recomputation."""
    seq, batch, vocab = 2048, 7, 51200
    parts = frozenset({"full"}) if recompute else frozenset[str]()
    # Megatron's kernels keep the scores: no product of FlashAttention's backward.
    layout = PlannedLayout(
        seq_len=seq, global_batch=1, attention_kernel="fused", loss="fused", recompute=parts
    )
    per_token = hardware_flops(gpt(layers, hidden, heads, vocab), layout, "full")
    closed = gpt_iteration(batch, seq, layers, hidden, vocab, recompute=recompute)
    assert per_token * batch * seq == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(
    ("parts", "forwards"),
    [
        ({"attention"}, {"core": 1}),
        ({"mla_up"}, {"up": 1}),
        ({"experts"}, {"routed": 2 / 3}),
        ({"shared_expert"}, {"shared": 1}),
        ({"moe"}, {"routed": 1, "shared": 1, "router": 1}),
        ({"moe", "experts", "norm"}, {"routed": 1, "shared": 1, "router": 1}),
        ({"operators"}, {"products": 1 / 2, "shared": 1 / 2, "dense": 1 / 2}),
    ],
)
def test_repeated_parts(parts: set[str], forwards: dict[str, float]) -> None:
    """A model of two dense and two expert layers of DeepSeek-V3, 4096 tokens."""
    shape = load_model("deepseek-v3").shape
    shape = shape.changed(num_layers=4, moe_layers=(2, 3), num_mtp_layers=0)
    layout = PlannedLayout(seq_len=4096, global_batch=1, recompute=frozenset(parts))
    h, heads = 7168, 128
    up = 1536 * heads * 192 + 512 * heads * (128 + 128)
    each = {
        "core": 4 * core_flops(shape, 4096, 0, "full"),
        "up": 4 * 2 * up,
        "products": 4 * 2 * (h * (1536 + 512 + 64) + up + heads * 128 * h),
        "routed": 2 * 2 * 3 * h * 8 * 2048,
        "shared": 2 * 2 * 3 * h * 2048,
        "router": 2 * 2 * h * 256,
        "dense": 2 * 2 * 3 * h * 18432,
    }
    more = hardware_flops(shape, layout, "full")
    more -= hardware_flops(shape, layout.changed(recompute=frozenset()), "full")
    assert more == pytest.approx(sum(each[part] * share for part, share in forwards.items()))


def test_flash_attention_computes_half_a_core_more() -> None:
    """3.5 forwards of the core in all, of which model FLOPs count 3; of a loss in chunks, 4 of the
    head."""
    shape, layout = gpt(4, 64, 4), PlannedLayout(seq_len=128, global_batch=1)
    flops = count_flops(shape, 128, "full")
    more = hardware_flops(shape, layout, "full") - flops.training
    assert more == flops.attention / 2 + flops.head


def test_windows() -> None:
    assert attended_tokens(1000, 0, "full") == 1000
    assert attended_tokens(1000, 0, "causal") == 500
    assert attended_tokens(1000, 128, "full") == 128
    # 128 queries see 64 keys on average, 872 see 128.
    assert attended_tokens(1000, 128, "causal") == pytest.approx((128 * 64 + 872 * 128) / 1000)
    assert attended_tokens(100, 128, "causal") == 50


def test_latent_attention_multiplies_its_whole_heads_in_training() -> None:
    shape = load_model("deepseek-v3").shape
    assert core_flops(shape, 4096, 0, "full") == 2 * 4096 * 128 * (192 + 128)


@pytest.mark.parametrize(("schedule", "of_rank"), [("1f1b", 4), ("dualpipe", 8)])
def test_some_layers_of_a_rank_are_recomputed(schedule: str, of_rank: int) -> None:
    """Sixteen layers on 4 ranks; a rank of DualPipe has those of two stages."""
    layout = PlannedLayout(
        pp=4, schedule=schedule, seq_len=128, global_batch=8, recompute=frozenset({"full"})
    )
    none, half, whole = (
        hardware_flops(gpt(16, 64, 4), layout.changed(recompute_layers=number), "full")
        for number in (0, of_rank // 2, of_rank)
    )
    assert none < half and half - none == pytest.approx(whole - half)


def test_adapters_leave_out_the_gradients_of_the_weights() -> None:
    """Products cost two forwards instead of three, attention cores three."""
    shape = load_model("qwen3-30b-a3b").shape
    whole, adapted = (training_flops(shape, 64, adapters=adapters) for adapters in (False, True))
    cores = count_flops(shape, 64, "causal").attention
    assert adapted == pytest.approx((whole - 3 * cores) * 2 / 3 + 3 * cores)
