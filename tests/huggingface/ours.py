"""Our model from a folder of transformers, and its logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.pieces import Read, slices
from moemesh.checkpoint.huggingface.weight_folder import HuggingFaceWeights
from moemesh.checkpoint.store import Shard
from moemesh.config.huggingface.folder import read_config
from moemesh.config.huggingface.model import model_values
from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.seams import Vocabulary
from moemesh.model.transformer import Transformer


def config_of(folder: Path) -> ModelConfig:
    """The configuration that `moemesh train` would use."""
    return ModelConfig.model_validate(model_values(read_config(folder)))


def load(
    folder: Path, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> Transformer:
    """The whole model on one device; `config` may have adapters."""
    config = config or config_of(folder)
    model = Transformer(config)
    initialize(model, seed=0, dtype=dtype)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    HuggingFaceWeights(folder, config).load_into(
        [
            Shard(
                name=f"model.{name}",
                shape=tuple(tensor.shape),
                offset=(0,) * tensor.ndim,
                tensor=tensor.detach(),
            )
            for name, tensor in named.items()
        ]
    )
    return model


def weights(model: Transformer) -> Read:
    """The weights of a model in memory."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda name, box: named[name].detach()[slices(box)]


class _Logits(Vocabulary):
    """Keeps the logits that the loss is computed from."""

    logits_TV: Tensor

    def cross_entropy(self, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        self.logits_TV = x_TH @ weight_VH.T
        return super().cross_entropy(x_TH, weight_VH, targets_T)


@torch.no_grad()
def logits(model: Transformer, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V], and the tokens that every expert of every MoE layer got [L, E]."""
    kept = model.vocabulary = _Logits()
    batch = Batch(
        tokens_BS=tokens_BS,
        targets_BS=tokens_BS,
        sequences_B=torch.arange(len(tokens_BS)),
        training=False,
    )
    output = model(batch)
    return kept.logits_TV.view(*tokens_BS.shape, -1), output.counts_LE
