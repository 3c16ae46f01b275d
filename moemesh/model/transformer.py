"""The plain model: embedding, layers of attention and feed-forward, head. It knows no rank.

Legend: T tokens of the residual stream held here, H hidden, L MoE layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.attention import Attention
from moemesh.model.batch import Batch, Context, make_context
from moemesh.model.layers import MLP, RMSNorm, Rows
from moemesh.model.moe import MoE
from moemesh.model.seams import LocalTokens, LocalVocabulary, Tokens, Vocabulary


class Output(NamedTuple):
    """Of one forward: ``losses_T`` negative log-likelihood (nats) of all tokens of the microbatch;
    ``aux`` this rank's part of the auxiliary losses, summed over layers and sequences;
    ``counts_LE`` tokens of this rank per MoE layer and expert (int64)."""

    losses_T: Tensor
    aux: Tensor
    counts_LE: Tensor


class Layer(nn.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward: MoE | MLP = (
            MoE(config)
            if config.is_moe_layer(index)
            else MLP(config.hidden_size, config.intermediate_size)
        )

    def forward(
        self, x_TH: Tensor, context: Context
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), context)
        normed_TH = self.feed_forward_norm(x_TH)
        if isinstance(self.feed_forward, MLP):
            return x_TH + self.feed_forward(normed_TH, context.num_tokens), None, None
        y_TH, aux, counts_E = self.feed_forward(normed_TH, context)
        return x_TH + y_TH, aux, counts_E


class Transformer(nn.Module):
    """A decoder-only language model; ``num_experts = 0`` makes every layer dense.

    Parameters are created on the meta device; :func:`moemesh.model.initialization.initialize`
    (alone, or through `parallelize`) gives them memory and values.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = Rows(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            tied = config.tied_embeddings
            self.head = None if tied else Rows(config.vocab_size, config.hidden_size)
        self.vocabulary: Vocabulary = LocalVocabulary()
        self.tokens: Tokens = LocalTokens()

    def forward(self, batch: Batch) -> Output:
        config = self.config
        local = self.tokens.local(batch.num_tokens)
        context = make_context(batch, local, config.head_dim, config.rope_theta)
        x_TH = self.vocabulary.embed(batch.tokens_BS.flatten(), self.embedding.weight)
        # Auxiliary losses are summed in the router's dtype (fp32 or fp64), never below.
        aux = x_TH.new_zeros((), dtype=torch.promote_types(x_TH.dtype, torch.float32))
        counts: list[Tensor] = []
        for layer in self.layers:
            x_TH, layer_aux, counts_E = layer(x_TH, context)
            if layer_aux is not None:
                aux = aux + layer_aux
                counts.append(counts_E)
        head = self.embedding if self.head is None else self.head
        losses_T = self.vocabulary.cross_entropy(
            self.norm(x_TH), head.weight, batch.targets_BS.flatten()
        )
        empty = torch.zeros(0, config.num_experts, dtype=torch.int64, device=x_TH.device)
        return Output(losses_T, aux, torch.stack(counts) if counts else empty)

    def moe_layers(self) -> dict[int, MoE]:
        """Global layer index -> its mixture of experts."""
        return {
            index: layer.feed_forward
            for index, layer in enumerate(self.layers)
            if isinstance(layer.feed_forward, MoE)
        }
