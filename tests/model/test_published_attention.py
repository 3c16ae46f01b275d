"""Our attention and that of transformers: the same numbers for every family of the first tier.

Weights are drawn in transformers' modules and copied. In float64 transformers' own rounding to
float32 is taken out: its norms are replaced by torch's, its tables of rotary positions by ours.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.attention import LatentAttention, build_attention
from moemesh.model.batch import Batch, Context, make_context
from moemesh.model.rope import frequencies

transformers = pytest.importorskip("transformers")

B, S = 2, 13
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
OURS: dict[str, Any] = {
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 500.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
OUR_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_beta_fast": 4.0,
    "rope_beta_slow": 0.5,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 6,
}
OUR_LATENT: dict[str, Any] = {
    "attention": "mla",
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rotary_head_dim": 4,
    "v_head_dim": 6,
    "rope_interleave": True,
}


class Family(NamedTuple):
    """`theirs` and `ours`: keys over SIZES and OURS; `kind`: model type; `layer`: of the two;
    `wide`: whether transformers computes in float64 when its weights are."""

    name: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    kind: str = ""
    layer: int = 0
    wide: bool = True


MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.1}
OUR_MSCALES = {"rope_mscale": 0.7, "rope_mscale_all_dim": 1.1}
BIASES = {"qkv_bias": True, "output_bias": True}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = [
    Family("qwen3_moe", {"head_dim": 10}, {"head_dim": 10, "qk_norm": True}),
    Family(
        "deepseek_v3",
        LATENT | {"rope_interleave": True, "rope_scaling": YARN | MSCALES},
        OUR_LATENT | OUR_YARN | OUR_MSCALES,
    ),
    Family(
        "deepseek_v3-half-pairs",
        LATENT | {"rope_interleave": False, "attention_bias": True},
        OUR_LATENT | {"rope_interleave": False} | BIASES,
        "deepseek_v3",
    ),
    *(
        Family(
            f"gpt_oss-{name}",
            WINDOW
            | {"head_dim": 8, "rope_scaling": YARN | {"truncate": False}, "attention_bias": True},
            WINDOW
            | {"head_dim": 8, "rope_truncate": False, "attention_sinks": True}
            | OUR_YARN
            | BIASES,
            "gpt_oss",
            layer,
        )
        for layer, name in enumerate(("sliding", "full"))
    ),
    Family(
        "glm4_moe",
        {"head_dim": 12, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True},
        {"head_dim": 12, "partial_rotary_factor": 0.5, "qk_norm": True, "qkv_bias": True},
    ),
    Family("mixtral", {"sliding_window": 5}, {"head_dim": 8, "sliding_window": 5}),
    Family("qwen2_moe", {}, {"head_dim": 8, "qkv_bias": True}),
    Family(
        "olmoe",
        {"clip_qkv": 0.5},
        {"head_dim": 8, "qk_norm": True, "qk_norm_over": "projection", "clip_qkv": 0.5},
    ),
    Family(
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "rope_scaling": YARN | MSCALES},
        OUR_LATENT | {"q_lora_rank": 0} | OUR_YARN | OUR_MSCALES,
        wide=False,
    ),
    Family(
        "minimax_m2",
        {"head_dim": 12, "rotary_dim": 6},
        {
            "head_dim": 12,
            "partial_rotary_factor": 0.5,
            "qk_norm": True,
            "qk_norm_over": "projection",
        },
    ),
    Family(
        "granitemoe",
        {"attention_multiplier": 0.05, "attention_bias": True},
        {"head_dim": 8, "attention_multiplier": 0.05} | BIASES,
    ),
    Family(
        "ernie4_5_moe",
        {"use_bias": True},
        {"head_dim": 8, "rope_interleave": True} | BIASES,
        wide=False,
    ),
    Family(
        "dots1",
        {"head_dim": 8, "attention_bias": True},
        {"head_dim": 8, "qk_norm": True} | BIASES,
    ),
]


def published(family: Family, kind: str) -> tuple[nn.Module, nn.Module]:
    """(attention, rotary positions) of transformers, with random weights."""
    name = family.kind or family.name
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    settings = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    attention = next(x for x in vars(source) if x.endswith("Attention") and x != "FlashAttention")
    prefix = attention.removesuffix("Attention")
    config = getattr(settings, f"{prefix}Config")(
        **(SIZES | family.theirs), attn_implementation=kind
    )
    module = getattr(source, attention)(config, family.layer)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3, generator=generator)
    return module.eval(), getattr(source, f"{prefix}RotaryEmbedding")(config)


def copied(theirs: nn.Module, config: ModelConfig, layer: int) -> nn.Module:
    """Our module with the weights of transformers' module."""
    found = {name: x.detach() for name, x in theirs.named_parameters()}
    block = build_attention(config, layer)
    if isinstance(block, LatentAttention):
        values = latent_weights(found, config)
    else:
        values = grouped_weights(found, config)
    for name in ("weight", "bias"):
        if f"o_proj.{name}" in found:
            values["output" if name == "weight" else "output_bias"] = found.pop(f"o_proj.{name}")
    if "sinks" in found:
        values["sinks"] = found.pop("sinks")
    assert not found, f"not copied: {list(found)}"
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(values.pop(name))
    assert not values
    return block.to(next(theirs.parameters()).dtype)


def grouped_weights(found: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    heads, size = config.num_kv_heads, config.head_dim
    values: dict[str, Tensor] = {}
    for leaf, name in (("weight", "qkv"), ("bias", "qkv_bias")):
        if f"q_proj.{leaf}" in found:
            parts = [
                found.pop(f"{which}_proj.{leaf}").unflatten(0, (heads, -1, size))
                for which in ("q", "k", "v")
            ]
            packed = torch.cat(parts, dim=1)
            values[name] = packed if leaf == "weight" else packed.flatten()
    for theirs, ours in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
        if f"{theirs}.weight" in found:
            values[f"{ours}.weight"] = found.pop(f"{theirs}.weight")
    return values


def latent_weights(found: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    names = {
        "q_a_proj.weight": "query_down",
        "q_a_proj.bias": "query_down_bias",
        "q_a_layernorm.weight": "query_latent_norm.weight",
        "kv_a_proj_with_mqa.weight": "key_value_down",
        "kv_a_proj_with_mqa.bias": "key_value_down_bias",
        "kv_a_layernorm.weight": "key_value_latent_norm.weight",
    }
    by_head = {
        "q_proj.weight": "query",
        "q_b_proj.weight": "query_up",
        "kv_b_proj.weight": "key_value_up",
    }
    values = {ours: found.pop(theirs) for theirs, ours in names.items() if theirs in found}
    for theirs, ours in by_head.items():
        if theirs in found:
            values[ours] = found.pop(theirs).unflatten(0, (config.num_heads, -1))
    return values


def context_of(config: ModelConfig) -> Context:
    tokens = torch.zeros(B, S, dtype=torch.int64)
    batch = Batch(tokens_BS=tokens, targets_BS=tokens, sequences_B=torch.arange(B))
    return make_context(batch, range(B * S), config)


def mask_of(config: ModelConfig, layer: int, dtype: torch.dtype) -> Tensor:
    """What a position sees, as numbers to add to scores [1, 1, S, S]."""
    behind = torch.arange(S)[:, None] - torch.arange(S)
    seen = (behind >= 0) & (behind < (config.window(layer) or S))
    return torch.zeros(S, S, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def theirs_of(module: nn.Module, rotary: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(S)[None]
    return module(x, position_embeddings=rotary(x, positions), attention_mask=mask)[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_same_output_and_gradient_in_float32(family: Family) -> None:
    config = ModelConfig(**(OURS | family.ours))
    assert config.check() == []
    theirs, rotary = published(family, "eager")
    ours = copied(theirs, config, family.layer)
    x = torch.randn(B, S, config.hidden_size, generator=torch.Generator().manual_seed(2))
    mask = mask_of(config, family.layer, x.dtype)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    expected = theirs_of(theirs, rotary, one, mask)
    got = ours(other.flatten(0, 1), context_of(config)).view_as(expected)
    assert_close(got, expected, 2e-6)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    assert_close(other.grad, one.grad, 1e-5)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.wide], ids=lambda family: family.name
)
def test_the_same_output_in_float64(family: Family) -> None:
    config = ModelConfig(**(OURS | family.ours))
    theirs, _ = published(family, "eager" if config.attention_sinks else "sdpa")
    theirs = theirs.double()
    ours = copied(theirs, config, family.layer)
    for prefix, module in list(theirs.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon).double()
            norm.weight = module.weight
            setattr(theirs, prefix, norm)
    context = context_of(config)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(B, S, config.hidden_size, generator=generator, dtype=torch.float64)
    half = (slice(None, None, 2) if config.rope_interleave else slice(None)), config.rotary_dim
    tables = [table[:, 0, half[0]][:, : half[1] // 2] for table in (context.cosine, context.sine)]
    if family.kind == "gpt_oss":  # its tables have no copy for the other half
        embeddings = tuple(table[None] for table in tables)
    else:
        embeddings = tuple(torch.cat([table, table], dim=1)[None] for table in tables)
    mask = mask_of(config, family.layer, x.dtype)
    expected = theirs(x, position_embeddings=embeddings, attention_mask=mask)[0]
    got = ours(x.flatten(0, 1), context).view_as(expected)
    assert_close(got, expected, 1e-10)


def assert_close(got: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert got is not None and expected is not None
    difference, scale = (got - expected).detach().abs().max(), expected.detach().abs().max()
    worst = float(difference / scale.clamp(min=1.0))
    assert worst <= tolerance, f"relative difference {worst:.1e}"


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "rope_factor": 4.0},
    ),
    "llama3": (
        LLAMA3,
        {"rope_type": "llama3", "rope_factor": 8.0, "original_max_position_embeddings": 32},
    ),
    "yarn": (YARN, OUR_YARN),
    "yarn-long": (
        YARN | {"factor": 40.0, "original_max_position_embeddings": 4096} | MSCALES,
        OUR_YARN | {"rope_factor": 40.0, "original_max_position_embeddings": 4096} | OUR_MSCALES,
    ),
    "yarn-fractions": (YARN | {"truncate": False}, OUR_YARN | {"rope_truncate": False}),
    "yarn-factor": (
        YARN | {"attention_factor": 0.9},
        OUR_YARN | {"rope_attention_factor": 0.9},
    ),
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", ROPES)
def test_stretched_frequencies_and_their_factor(name: str, share: float) -> None:
    """Against transformers' functions, in the shape of Llama with 32 channels a head."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, ours = ROPES[name]
    theirs = LlamaConfig(
        **(SIZES | {"head_dim": 32, "rope_theta": 1e4}),
        rope_scaling=scaling | {"partial_rotary_factor": share},
    )
    expected_F, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    config = ModelConfig(head_dim=32, partial_rotary_factor=share, **ours)
    assert config.check() == []
    torch.testing.assert_close(frequencies(config).float(), expected_F, rtol=1e-6, atol=0)
    assert config.rope_scale == pytest.approx(factor, rel=1e-12)
