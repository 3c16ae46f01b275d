"""Random configurations of every family: the logits of transformers, or a refusal by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.export import config_json, differences
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import model_values
from moemesh.sharding.load_run import load_run
from tests.huggingface.ours import assert_same_weights, config_of, load, logits, there_and_back
from tests.huggingface.tiny import DENSE, make

pytest.importorskip("transformers")

# Random configurations of the families: switches that a released config.json may have set.

#: key -> values to draw from; None leaves the key to COMMON, the family, or the class of it.
_COMMON: dict[str, list[Any]] = {
    "tie_word_embeddings": [False, True],
    "rms_norm_eps": [1e-5, 1e-6, 1e-3],
    "num_hidden_layers": [2, 3, 4],
    "vocab_size": [288, 301],
}
_HEADS = [(4, 4), (4, 1), (4, 2), (6, 3)]
_LATENT: dict[str, list[Any]] = {
    "q_lora_rank": [24, None],
    "qk_rope_head_dim": [8, 12],
    "v_head_dim": [10, 16],
    "attention_bias": [False, True],
}
_GROUPS: dict[str, list[Any]] = {
    "n_routed_experts": [8, 16],
    "n_group, topk_group": [(1, 1), (4, 2), (2, 1)],
    "num_experts_per_tok": [1, 2, 3],
    "routed_scaling_factor": [1.0, 2.5],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
}
_SPARSE: dict[str, list[Any]] = {
    "mlp_only_layers": [[], [0], [1]],
    "decoder_sparse_step": [1, 2],
    "norm_topk_prob": [False, True],
    "num_experts_per_tok": [1, 3],
}
_WINDOW: dict[str, list[Any]] = {
    "use_sliding_window": [False, True],
    "sliding_window": [24, 96],
    "max_window_layers": [0, 1, 5],
}
_BIAS: dict[str, list[Any]] = {"attention_bias": [False, True]}
_NORM: dict[str, list[Any]] = {"norm_topk_prob": [False, True]}
_GRANITE: dict[str, list[Any]] = {
    "embedding_multiplier": [1.0, 3.0],
    "attention_multiplier": [0.25, 0.5],
    "residual_multiplier": [1.0, 0.4],
    "logits_scaling": [1.0, 2.0],
}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "qwen3_moe": {
        **_SPARSE,
        **_BIAS,
        "num_experts": [4, 6],
        "use_sliding_window": [False, True],
        "sliding_window": [24, None],
    },
    "mixtral": {"num_local_experts": [2, 5], "sliding_window": [None, 24]},
    "qwen2_moe": {
        **_SPARSE,
        **_WINDOW,
        "qkv_bias": [False, True],
        "shared_expert_intermediate_size": [24, 40],
    },
    "olmoe": {**_NORM, **_BIAS, "clip_qkv": [None, 0.7], "num_experts_per_tok": [1, 4]},
    "deepseek_v2": {
        **_LATENT,
        **_GROUPS,
        **_NORM,
        "topk_method": ["greedy", "group_limited_greedy"],
    },
    "deepseek_v3": {**_LATENT, **_GROUPS, **_NORM, "rope_interleave": [True, False]},
    "glm4_moe": {
        **_GROUPS,
        **_NORM,
        **_BIAS,
        "use_qk_norm": [False, True],
        "partial_rotary_factor": [0.5, 1.0],
    },
    "glm4_moe_lite": {
        **_LATENT,
        **{key: values for key, values in _GROUPS.items() if key != "first_k_dense_replace"},
        **_NORM,
        "rope_interleave": [True, False],
        # Repeated over the layers.
        "mlp_layer_types": [["sparse"], ["sparse", "dense"], ["dense", "sparse", "sparse"]],
    },
    "solar_open": {**_GROUPS, **_NORM, **_BIAS, "first_k_dense_replace": [0]},
    "hy_v3": {
        **_BIAS,
        "num_experts": [8, 16],
        "num_experts_per_tok": [1, 2, 3],
        "num_shared_experts": [1, 2],
        "router_scaling_factor": [1.0, 2.5],
        "mlp_layer_types": [["sparse"], ["sparse", "dense"], ["dense", "sparse", "sparse"]],
    },
    "dots1": {**_GROUPS, **_NORM, **_BIAS, **_WINDOW},
    "gpt_oss": {
        "num_experts_per_tok": [1, 3],
        "sliding_window": [16, 96],
        "attention_bias": [True, False],
        "layer_types": [None],
        "swiglu_limit": [7.0, 1.0],
    },
    "minimax_m2": {"num_experts_per_tok": [1, 3], "rotary_dim": [8, 4]},
    "granitemoe": {**_GRANITE, **_BIAS, "num_experts_per_tok": [1, 2]},
    "ernie4_5_moe": {
        "use_bias": [False, True],
        "moe_num_shared_experts": [0, 2],
        "moe_layer_interval": [1, 2],
        "moe_layer_start_index": [0, 1],
        "moe_layer_end_index": [-1, 1, 2],
        "moe_norm_min": [1e-12, 0.3],
        "moe_k": [1, 3],
    },
    "llama": {**_BIAS, "mlp_bias": [False, True]},
    "mistral": {"sliding_window": [None, 24]},
    "qwen2": {**_WINDOW},
    "qwen3": {**_BIAS, **_WINDOW},
    "granite": {**_GRANITE, **_BIAS, "mlp_bias": [False, True]},
}


def draw(kind: str, seed: int) -> dict[str, Any]:
    """A configuration of the family `kind`, as changes of that of :mod:`tests.huggingface.tiny`."""
    chosen = random.Random(f"{kind} {seed}")
    values: dict[str, Any] = {}
    for key, options in {**_COMMON, **OPTIONS[kind]}.items():
        value = chosen.choice(options)
        if ", " in key:
            values |= dict(zip(key.split(", "), value, strict=True))
        else:
            values[key] = value
    if pattern := values.get("mlp_layer_types"):
        layers = values["num_hidden_layers"]
        values["mlp_layer_types"] = (pattern * layers)[:layers]
    if "qk_rope_head_dim" in values:
        heads = chosen.choice([4, 6])
        values |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        values["head_dim"] = values["qk_rope_head_dim"]
    else:
        heads, kv_heads = chosen.choice(_HEADS)
        values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        values["head_dim"] = 48 // heads if kind in ("olmoe", "qwen2") else chosen.choice([8, 16])
    values["rope_parameters"] = _rope(kind, chosen)
    if kind == "minimax_m2":
        values["rotary_dim"] = min(values["rotary_dim"], values["head_dim"])
    return values


def _rope(kind: str, chosen: random.Random) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": chosen.choice([1e4, 1e6])}
    original = {"factor": 4.0, "original_max_position_embeddings": 128}
    match chosen.choice(["default", "default", "linear", "llama3", "yarn"]):
        case "linear":
            table |= {"rope_type": "linear", "factor": 2.0}
        case "llama3":
            table |= {"rope_type": "llama3", **original}
            table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        case "yarn":
            table |= {"rope_type": "yarn", **original}
            if chosen.random() < 0.5:
                table |= {"beta_fast": 16.0, "beta_slow": 2.0}
            if chosen.random() < 0.5:
                table |= {"attention_factor": 1.2}
            elif chosen.random() < 0.5:
                table |= {"mscale": 0.8, "mscale_all_dim": 0.6}
        case _:
            pass
    return table


SEEDS = range(8)
CASES = [f"{kind}-{seed}" for kind in OPTIONS for seed in SEEDS]
#: Switches that our model does not have, by what the refusal names.
REFUSED = {"mlp_bias": "mlp_bias = True", "use_bias": "use_bias"}


def refused(values: dict[str, Any]) -> str | None:
    """The switch of a configuration that must be refused."""
    return next((name for key, name in REFUSED.items() if values.get(key)), None)


@pytest.mark.representative("qwen2_moe-1", "deepseek_v2-0", "dots1-0", "gpt_oss-2", "mistral-0")
@pytest.mark.parametrize("case", CASES)
def test_random_configurations(case: str, tmp_path: Path) -> None:
    kind, _, seed = case.rpartition("-")
    values = draw(kind, int(seed))
    model, folder = make(kind, **values), tmp_path / "model"
    model.save_pretrained(folder)
    if (name := refused(values)) is not None:
        with pytest.raises(ConfigError, match=name):
            model_values(read_config(folder))
        return
    ids = torch.randint(0, 288, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.double()(ids).logits
    found, _ = logits(load(folder, torch.float64), ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)

    # Our config.json of it, in the keys of old versions alone, means the same model.
    config = config_of(folder)
    if config.routed_layers or kind in DENSE:
        written = config_json(config, kind)
        assert differences(config, kind, model_values(written)) == {}
        del written["rope_parameters"]
        # Old versions omit the key for no scaling; gpt_oss fills in a default of its own.
        fills = kind == "gpt_oss" and config.rope_type == "default"
        assert fills or differences(config, kind, model_values(written)) == {}
    back = there_and_back(folder, tmp_path)
    assert_same_weights(folder, back)
    trained = load_run([], [f"model.path={back}"]).config.model
    assert trained.model_copy(update={"implementation": config.implementation}) == config
