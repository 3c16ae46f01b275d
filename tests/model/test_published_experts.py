"""Our MoE layer and that of transformers: the same numbers for every family of the first tier.

Weights are drawn in transformers' blocks and copied; their rows [gate; up] are ours. In float64 the
routers of transformers still round to float32: there the block is given our weights of the chosen
experts, once they are known to be theirs to within that rounding.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch, make_context
from moemesh.model.initialization import initialize
from moemesh.model.layers import MLP
from moemesh.model.moe import MoE
from moemesh.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

B, S, H = 2, 19, 24
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
}
OURS: dict[str, Any] = {
    "hidden_size": H,
    "vocab_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 6,
    "intermediate_size": 20,
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_intermediate_size": 10,
    "num_shared_experts": 0,
    "first_dense_layers": 0,
    "aux_loss_coefficient": 0.0,
}


class Family(NamedTuple):
    """`theirs` and `ours`: the keys in which a family differs from the sizes above."""

    block: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


SIGMOID: dict[str, Any] = {
    "router_score": "sigmoid",
    "router_selection_bias": True,
    "router_normalize_eps": 1e-20,
}
SHARED: dict[str, Any] = {"num_shared_experts": 2}
V3 = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 10,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
OUR_V3: dict[str, Any] = (
    SIGMOID | SHARED | {"router_groups": 4, "router_groups_kept": 2, "router_scale": 2.5}
)
LOCAL = {"num_local_experts": 8, "intermediate_size": 10}
QWEN = {"num_experts": 8, "moe_intermediate_size": 10}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family("Qwen3MoeSparseMoeBlock", QWEN | {"norm_topk_prob": True}, {}),
    "deepseek_v3": Family("DeepseekV3MoE", V3, OUR_V3),
    "gpt_oss": Family(
        "GptOssMLP",
        LOCAL | {"swiglu_limit": 0.9},
        {
            "router_when": "after",
            "router_logit_bias": True,
            "router_normalize": False,
            "expert_bias": True,
            "swiglu_limit": 0.9,
            "swiglu_alpha": 1.702,
            "swiglu_offset": 1.0,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeMoE",
        V3 | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        SIGMOID | SHARED,
    ),
    "mixtral": Family("MixtralSparseMoeBlock", LOCAL, {}),
    "qwen2_moe": Family(
        "Qwen2MoeSparseMoeBlock",
        QWEN | {"shared_expert_intermediate_size": 14, "norm_topk_prob": False},
        {
            "router_normalize": False,
            "num_shared_experts": 1,
            "shared_intermediate_size": 14,
            "shared_gate": True,
        },
    ),
    "olmoe": Family(
        "OlmoeSparseMoeBlock",
        {"num_experts": 8, "intermediate_size": 10, "norm_topk_prob": False},
        {"router_normalize": False},
    ),
    "deepseek_v2": Family(
        "DeepseekV2Moe",
        V3 | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        SHARED
        | {
            "router_normalize": False,
            "router_groups": 4,
            "router_groups_kept": 2,
            "router_group_score": "max",
            "router_scale": 16.0,
        },
    ),
    "minimax_m2": Family(
        "MiniMaxM2SparseMoeBlock",
        LOCAL,
        {"router_score": "sigmoid", "router_selection_bias": True},
    ),
    "granitemoe": Family(
        "GraniteMoeMoE",
        LOCAL,
        {"router_when": "after", "router_normalize": False},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeSparseMoeBlock",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 10,
            "moe_num_shared_experts": 2,
            # Some sums of three probabilities lie below it, some above.
            "moe_norm_min": 0.6,
        },
        SHARED | {"router_selection_bias": True, "router_normalize_min": 0.6},
    ),
    "dots1": Family(
        "Dots1MoE",
        V3 | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
        SIGMOID | SHARED | {"router_groups": 2, "router_groups_kept": 1},
    ),
}


def theirs_of(name: str) -> nn.Module:
    """The block with weights large enough that routing is far from a tie and clamps bite."""
    family = FAMILIES[name]
    keys = SIZES | family.theirs
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name](**keys)
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    block: nn.Module = getattr(module, family.block)(config)
    generator = torch.Generator().manual_seed(1)
    for leaf, tensor in [*block.named_parameters(), *block.named_buffers()]:
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.data.copy_(drawn * (0.1 if "correction_bias" in leaf else 0.6))
    return block.eval()


def ours_of(name: str, theirs: nn.Module, dtype: torch.dtype) -> MoE:
    config = ModelConfig(**(OURS | FAMILIES[name].ours))
    assert config.check() == []
    moe = MoE(config)
    state = {leaf: tensor.detach() for leaf, tensor in theirs.state_dict().items()}
    taken: dict[str, Tensor] = {}
    router = "gate" if "gate.weight" in state else "router"
    taken["router.weight"] = state.pop(f"{router}.weight")
    if config.router_logit_bias:
        taken["router.bias"] = state.pop(f"{router}.bias")
    if config.router_selection_bias:
        (bias,) = [leaf for leaf in state if leaf.endswith("e_score_correction_bias")]
        taken["router.selection_bias"] = state.pop(bias).flatten()
    gate_up, down = (state.pop(f"experts.{leaf}_proj") for leaf in ("gate_up", "down"))
    if name == "gpt_oss":  # transposed, gate and up in turns
        gate_up = torch.stack([gate_up[..., ::2], gate_up[..., 1::2]], 1).transpose(2, 3)
        down = down.transpose(1, 2)
        biases = state.pop("experts.gate_up_proj_bias")
        taken["experts.gate_up_bias"] = torch.stack([biases[:, ::2], biases[:, 1::2]], 1)
        taken["experts.down_bias"] = state.pop("experts.down_proj_bias")
    taken["experts.gate_up"] = gate_up.reshape(8, 2, 10, H)
    taken["experts.down"] = down
    if config.shared_width:
        prefix = "shared_expert." if config.shared_gate else "shared_experts."
        gate, up, last = (
            state.pop(f"{prefix}{leaf}_proj.weight") for leaf in ("gate", "up", "down")
        )
        taken |= {"shared.gate_up": torch.stack([gate, up]), "shared.down": last}
    if config.shared_gate:
        taken["shared_gate"] = state.pop("shared_expert_gate.weight")
    assert not state, f"not copied: {list(state)}"
    moe.load_state_dict(taken)
    return moe.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_our_layer_is_the_published_block(name: str, dtype: torch.dtype) -> None:
    theirs = theirs_of(name)
    ours = ours_of(name, theirs, dtype)
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(2))
    router = theirs.gate if hasattr(theirs, "gate") else theirs.router
    bias = [theirs.e_score_correction_bias] if name == "minimax_m2" else []
    _, weights, chosen = router(x.flatten(0, 1), *bias)
    x, theirs = x.to(dtype), theirs.to(dtype)
    routing = ours.router(x.flatten(0, 1))
    order, expected = routing.experts_TK.argsort(1), chosen.argsort(1)
    assert torch.equal(routing.experts_TK.gather(1, order), chosen.gather(1, expected))
    own = routing.weights_TK.gather(1, order)
    torch.testing.assert_close(own.float(), weights.gather(1, expected), rtol=2e-6, atol=2e-7)
    assert len(routing.experts_TK.unique()) == 8
    if dtype == torch.float64:
        router.forward = lambda *_: (None, routing.weights_TK, routing.experts_TK)
    found = theirs(x)
    found = (found[0] if isinstance(found, tuple) else found).flatten(0, 1)
    batch = Batch(
        tokens_BS=torch.zeros(B, S, dtype=torch.int64),
        targets_BS=torch.zeros(B, S, dtype=torch.int64),
        sequences_B=torch.arange(B),
        training=False,
    )
    got = ours(x.flatten(0, 1), make_context(batch, range(B * S), ours.config)).y_TH
    limit = 2e-6 if dtype == torch.float32 else 1e-10
    worst = float((got - found).abs().max() / found.abs().max())
    assert worst <= limit, f"{worst:.1e}"


def test_multipliers_are_those_of_scaled_weights() -> None:
    """Each multiplier of Granite is a factor of weights: the same losses in float64."""
    keys = OURS | {"first_dense_layers": 1, "num_shared_experts": 1, "expert_bias": True}
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 5.0}
    plain, scaled = (Transformer(ModelConfig(**(keys | more))) for more in ({}, factors))
    for model in (plain, scaled):
        initialize(model, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
            ours += 0.3 * torch.randn(ours.shape, dtype=torch.float64, generator=generator)
            theirs.copy_(ours)
        assert plain.embedding is not None and plain.head is not None
        plain.embedding.weight *= 3.0
        plain.head.weight /= 5.0
        for layer in plain.layers.values():
            block = layer.feed_forward
            written = [layer.attention.output]
            if isinstance(block, MLP):
                written.append(block.down)
            else:
                written += [block.experts.down, block.experts.down_bias, block.shared.down]
            for weight in written:
                weight *= 0.25
    tokens = torch.randint(32, (B, S + 1), generator=generator)
    batch = Batch(tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], sequences_B=torch.arange(B))
    expected, got = (model(batch).losses_T for model in (plain, scaled))
    assert expected is not None and got is not None and expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
