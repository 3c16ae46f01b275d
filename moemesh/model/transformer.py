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
from moemesh.model.moe import MoE, MoEOutput
from moemesh.model.seams import LocalTokens, LocalVocabulary, Tokens, Vocabulary


class Output(NamedTuple):
    """Of one forward: ``losses_T`` negative log-likelihood (nats) of all tokens of the microbatch;
    ``aux`` this rank's part of the auxiliary losses, summed over layers and scopes; of this rank's
    tokens per MoE layer (int64): ``counts_LE`` of each expert, ``dropped_L`` choices that found
    their expert full, ``fault_L`` the first fault (:mod:`moemesh.model.faults`)."""

    losses_T: Tensor
    aux: Tensor
    counts_LE: Tensor
    dropped_L: Tensor
    fault_L: Tensor


class Layer(nn.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward: MoE | MLP = (
            MoE(config, index)
            if config.is_moe_layer(index)
            else MLP(config.hidden_size, config.intermediate_size)
        )

    def forward(self, x_TH: Tensor, context: Context) -> tuple[Tensor, MoEOutput | None]:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), context)
        normed_TH = self.feed_forward_norm(x_TH)
        if isinstance(self.feed_forward, MLP):
            return x_TH + self.feed_forward(normed_TH, context.num_tokens), None
        routed = self.feed_forward(normed_TH, context)
        return x_TH + routed.y_TH, routed


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
        loads = [torch.zeros(0, config.num_experts + 2, dtype=torch.int64, device=x_TH.device)]
        for layer in self.layers:
            x_TH, routed = layer(x_TH, context)
            if routed is not None:
                aux = aux + routed.aux
                scalars = torch.stack([routed.num_dropped, routed.fault])
                loads.append(torch.cat([routed.counts_E, scalars])[None])
        head = self.embedding if self.head is None else self.head
        losses_T = self.vocabulary.cross_entropy(
            self.norm(x_TH), head.weight, batch.targets_BS.flatten()
        )
        loads_L = torch.cat(loads)
        return Output(losses_T, aux, loads_L[:, :-2], loads_L[:, -2], loads_L[:, -1])

    def moe_layers(self) -> dict[int, MoE]:
        """Global layer index -> its mixture of experts."""
        return {
            index: layer.feed_forward
            for index, layer in enumerate(self.layers)
            if isinstance(layer.feed_forward, MoE)
        }
