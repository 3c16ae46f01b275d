"""The plain model: embedding, layers of attention and feed-forward, head. It knows no rank.

Legend: T tokens of the residual stream held here, H hidden, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.attention import build_attention
from moemesh.model.batch import Batch, Context, make_context
from moemesh.model.layers import MLP, RMSNorm, VocabularyRows
from moemesh.model.moe import MoE, MoEOutput
from moemesh.model.seams import (
    PLAIN_FLOW,
    Flow,
    KeepAll,
    LocalTokens,
    LocalVocabulary,
    Memory,
    ResidentWeights,
    Tokens,
    Vocabulary,
    Weights,
)


class Part(NamedTuple):
    """The part of the model that runs at once: these layers, after the embedding if `first`, before
    the head if `last`. A pipeline stage is a part; on one device the whole model is one."""

    layers: range
    first: bool = True
    last: bool = True


class Output(NamedTuple):
    """Of one forward of a part. ``x_TH``: the residual stream behind its last layer, None behind
    the head; ``losses_T``: negative log-likelihood (nats) of all tokens of the microbatch, None
    before the head; ``aux``: this rank's part of the auxiliary losses, summed over the part's
    layers and scopes; of this rank's tokens per MoE layer of the part (int64): ``counts_LE`` of
    each expert, ``dropped_L`` choices that found their expert full, ``fault_L`` the first fault
    (:mod:`moemesh.model.faults`)."""

    x_TH: Tensor | None
    losses_T: Tensor | None
    aux: Tensor
    counts_LE: Tensor
    dropped_L: Tensor
    fault_L: Tensor


class Layer(nn.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = build_attention(config, index)
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
        x_TH = context.flow.cut(x_TH)
        routed = self.feed_forward(normed_TH, context)
        return x_TH + routed.y_TH, routed


class Transformer(nn.Module):
    """A decoder-only language model; ``num_experts = 0`` makes every layer dense.

    It holds what its `parts` need (None: the whole model), under the names of the whole model.
    Parameters are created on the meta device; :func:`moemesh.model.initialization.initialize`
    (alone, or through `parallelize`) gives them memory and values.
    """

    def __init__(self, config: ModelConfig, parts: Sequence[Part] | None = None) -> None:
        super().__init__()
        self.config = config
        parts = [whole(config)] if parts is None else parts
        embeds, predicts = any(part.first for part in parts), any(part.last for part in parts)
        tied = config.tied_embeddings
        with torch.device("meta"):
            self.embedding = (
                VocabularyRows(config.vocab_size, config.hidden_size)
                if embeds or (predicts and tied)
                else None
            )
            self.layers = nn.ModuleDict(
                {
                    str(index): Layer(config, index)
                    for index in sorted({index for part in parts for index in part.layers})
                }
            )
            self.norm = RMSNorm(config.hidden_size, config.norm_eps) if predicts else None
            self.head = (
                VocabularyRows(config.vocab_size, config.hidden_size)
                if predicts and not tied
                else None
            )
        self.vocabulary: Vocabulary = LocalVocabulary()
        self.tokens: Tokens = LocalTokens()
        self.memory: Memory = KeepAll()
        self.weights: Weights = ResidentWeights()

    def forward(
        self,
        batch: Batch,
        part: Part | None = None,
        x_TH: Tensor | None = None,
        flow: Flow = PLAIN_FLOW,
    ) -> Output:
        """Run one part (None: the whole model); `x_TH` is the stream from the part before."""
        config = self.config
        part = whole(config) if part is None else part
        local = self.tokens.local(batch.num_tokens)
        context = make_context(batch, local, config, flow)
        if part.first:
            assert x_TH is None and self.embedding is not None
            self.weights.fetch("embedding")
            x_TH = self.vocabulary.embed(batch.tokens_BS.flatten(), self.embedding.weight)
            x_TH = self.weights.leave("embedding", x_TH, read_again=False)
        assert x_TH is not None
        # Auxiliary losses are summed in the router's dtype (fp32 or fp64), never below.
        aux = x_TH.new_zeros((), dtype=torch.promote_types(x_TH.dtype, torch.float32))
        loads = [torch.zeros(0, config.num_experts + 2, dtype=torch.int64, device=x_TH.device)]
        for index in part.layers:
            x_TH = self.weights.enter(f"layers.{index}", x_TH)
            x_TH, routed = self.memory.run(self.layers[str(index)], x_TH, context)
            x_TH = self.weights.leave(f"layers.{index}", x_TH)
            if routed is not None:
                aux = aux + routed.aux
                scalars = torch.stack([routed.num_dropped, routed.fault])
                loads.append(torch.cat([routed.counts_E, scalars])[None])
        loads_L = torch.cat(loads)
        losses_T = self.losses(x_TH, batch) if part.last else None
        return Output(
            None if part.last else x_TH,
            losses_T,
            aux,
            loads_L[:, :-2],
            loads_L[:, -2],
            loads_L[:, -1],
        )

    def losses(self, x_TH: Tensor, batch: Batch) -> Tensor:
        """Norm, head and loss: nats of all tokens of the microbatch."""
        head = self.embedding if self.head is None else self.head
        assert head is not None and self.norm is not None
        x_TH = self.weights.enter("head", x_TH)
        losses_T = self.vocabulary.cross_entropy(
            self.norm(x_TH), head.weight, batch.targets_BS.flatten()
        )
        return self.weights.leave("head", losses_T)

    def moe_layers(self) -> dict[int, MoE]:
        """Global layer index -> its mixture of experts, of the layers held here."""
        return {
            int(index): layer.feed_forward
            for index, layer in self.layers.items()
            if isinstance(layer.feed_forward, MoE)
        }


def whole(config: ModelConfig) -> Part:
    """The whole model as one part."""
    return Part(range(config.num_layers))
