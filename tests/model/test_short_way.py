"""One generated token's short way through attention and experts gives the general way's logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moemesh.model import moe
from moemesh.model.batch import Batch
from moemesh.model.transformer import Transformer
from moemesh.sharding.load_run import load_run
from moemesh.train.inference.generation import KeyValueCache

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"num_experts": 0},
    "shared": {"num_shared_experts": 1, "shared_gate": "true"},
    "biases": {"num_shared_experts": 0, "expert_bias": "true", "attention_sinks": "true"},
    "window": {"sliding_window": 3},
    "mla": {
        "attention": "mla",
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rotary_head_dim": 4,
        "v_head_dim": 6,
    },
}


def logits(model: Transformer, tokens_BS: Tensor) -> Tensor:
    """A prompt of four tokens, then one token at a time."""
    cache, ends = KeyValueCache(), [0, *range(4, tokens_BS.shape[1] + 1)]
    whole = Batch(
        tokens_BS=tokens_BS,
        targets_BS=tokens_BS,
        sequences_B=torch.zeros(1, dtype=torch.int64),
        training=False,
    )
    parts = pairwise(ends)
    return torch.cat([model.logits(whole.slice(*part, cache)) for part in parts])


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_same_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2,
        "num_heads": 4, "num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 12,
    }  # fmt: skip
    keys = sizes | KINDS[kind]
    overrides = [f"model.{name}={value}" for name, value in keys.items()]
    config = load_run([], overrides, environ={}).config.model
    model = Transformer(config).to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens_BS = torch.randint(0, 256, (1, 10), generator=generator)
    general_TV = logits(model, tokens_BS)  # with a gradient
    experts = Mock(wraps=moe.expert_mlp_of_few)
    monkeypatch.setattr(moe, "expert_mlp_of_few", experts)
    with torch.no_grad():
        short_TV = logits(model, tokens_BS)
    # Every lone token's layers; the prompt's eight rows are not more than the experts, either.
    assert experts.call_count == 7 * len(model.moe_layers())
    assert_close(short_TV, general_TV.detach(), rtol=1e-12, atol=1e-12)
