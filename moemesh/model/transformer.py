"""The plain model of one device: embedding, layers of attention and feed-forward, head.

Legend: B sequences, S positions, T tokens of the residual stream on this rank, H hidden, L MoE
layers, E experts, Q scopes of auxiliary losses, X = 2 E + 1 sums of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.attention import Attention, AttentionBlock, LatentAttention
from moemesh.model.balance_loss import joint_loss, no_sums
from moemesh.model.batch import Batch, Context, make_context
from moemesh.model.faults import of_tokens
from moemesh.model.layers import MLP, RMSNorm, VocabularyRows
from moemesh.model.moe import MoE, MoEOutput, swiglu_form
from moemesh.model.seams import (
    PLAIN_FLOW,
    Flow,
    Memory,
    Tokens,
    Vocabulary,
    WeightGate,
)
from moemesh.monitor.progress import at_layer
from moemesh.ops.linear import linear
from moemesh.sharding.buckets import unit_of


class Layer(nn.Module):
    """Pre-norm block: attention, then a dense MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        #: Factor of a block's output before it is added to the residual stream.
        self.multiplier = config.residual_multiplier
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        kind = LatentAttention if config.attention == "mla" else Attention
        self.attention: AttentionBlock = kind(config, index)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward: MoE | MLP = (
            MoE(config, index)
            if config.is_moe_layer(index)
            else MLP(config.hidden_size, config.intermediate_size, swiglu_form(config), config.lora)
        )

    def forward(self, x_TH: Tensor, context: Context) -> tuple[Tensor, MoEOutput | None]:
        y_TH = self.attention(self.attention_norm(x_TH), context)
        x_TH = torch.add(x_TH, y_TH, alpha=self.multiplier)
        normed_TH, feed_forward = self.feed_forward_norm(x_TH), self.feed_forward
        if isinstance(feed_forward, MLP):
            y_TH = feed_forward(normed_TH, context.num_tokens)
            return torch.add(x_TH, y_TH, alpha=self.multiplier), None
        x_TH = context.flow.cut(x_TH)
        routed = feed_forward(normed_TH, context)
        return torch.add(x_TH, routed.y_TH, alpha=self.multiplier), routed


# Multi-token prediction: extra layers after the last, each of which predicts one token further.
#
# DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2. Module k reads at
# position s the stream of module k - 1 (of the model's last layer, for k = 1) and the embedding
# of token s + k, and predicts token s + k + 1:
#
#     h_k = Layer(M_k [norm(embedding of token s + k); norm(h_(k-1))])
#     loss_k = cross-entropy of head(norm(h_k)) for token s + k + 1
#
# Embedding and head are the model's own. The order of the two halves of M_k is that of the
# released weights, whose module has a final norm of its own, too.


class PredictionLayer(Layer):
    """A layer with its input projection: ``projection`` [H, 2 H] and two norms. The norm after the
    layer is in :attr:`Transformer.ahead_norms`."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        hidden, epsilon = config.hidden_size, config.norm_eps
        self.embedding_norm = RMSNorm(hidden, epsilon)
        self.stream_norm = RMSNorm(hidden, epsilon)
        self.projection = nn.Parameter(torch.empty(hidden, 2 * hidden))

    def join(self, x_TH: Tensor, embedded_TH: Tensor) -> Tensor:
        """The layer's input [T, H], from the stream and the embeddings of later tokens."""
        both = [self.embedding_norm(embedded_TH), self.stream_norm(x_TH)]
        return linear(torch.cat(both, dim=1), self.projection)


class ModelPart(NamedTuple):
    """The part of the model that one forward runs: the embedding if `first`, these layers, then the
    head and the extra prediction layers if `last`. A pipeline stage is a part; on one device the
    whole model is one."""

    layers: range
    first: bool = True
    last: bool = True

    def units(self, config: ModelConfig) -> frozenset[str]:
        """Units of :mod:`moemesh.sharding.buckets` that it reads; a tied head and extra prediction
        layers read the embedding."""
        layers = (*self.layers, *(config.mtp_layers if self.last else ()))
        reads_embedding = self.first or (self.last and config.ends_share_a_table)
        ends = ["embedding"] * reads_embedding + ["head"] * self.last
        return frozenset([*ends, *(f"layers.{index}" for index in layers)])


class Output(NamedTuple):
    """Results of a forward of a part.

    ``x_TH``: the residual stream after its last layer, None after the head. ``losses_T``: negative
    log-likelihood (nats) of all tokens of the batch, None before the head; ``ahead_losses``:
    the same of each extra prediction layer. ``aux``: this rank's part of the auxiliary losses,
    summed over the part's layers and scopes. ``sums``: if one loss is for all layers, its sums over
    the layers so far (:func:`moemesh.model.balance_loss.auxiliary_sums`); None after the head.

    Counts of this rank's tokens, int64, for each of the ``moe_layers`` of the part: ``counts_LE``
    of each expert, ``dropped_L`` choices whose expert was full, ``fault_L`` the first fault
    (:mod:`moemesh.model.faults`). ``more``: further tensors of the stream, from a layer that
    returns several."""

    x_TH: Tensor | None
    losses_T: Tensor | None
    aux: Tensor
    counts_LE: Tensor
    dropped_L: Tensor
    fault_L: Tensor
    moe_layers: tuple[int, ...] = ()
    ahead_losses: tuple[Tensor, ...] = ()
    sums: Tensor | None = None
    more: tuple[Tensor, ...] = ()

    @property
    def for_next(self) -> list[Tensor]:
        """Inputs of the next part; empty after the head."""
        return [x for x in (self.x_TH, *self.more, self.sums) if x is not None]


class Transformer(nn.Module):
    """A decoder-only language model; ``num_experts = 0`` makes every layer dense.

    It has the modules of its `parts` (None: the whole model), under the names of the whole model.
    Parameters are created on the meta device; :func:`moemesh.model.initialization.initialize`
    (alone, or through `parallelize`) gives them memory and values.
    """

    def __init__(self, config: ModelConfig, parts: Sequence[ModelPart] | None = None) -> None:
        super().__init__()
        self.config = config
        parts = [whole(config)] if parts is None else parts
        embeds, predicts = any(part.first for part in parts), any(part.last for part in parts)
        tied, ahead = config.tied_embeddings, config.mtp_layers if predicts else range(0)
        with torch.device("meta"):
            self.embedding = (
                VocabularyRows(config.vocab_size, config.hidden_size)
                if embeds or (predicts and tied) or ahead
                else None
            )
            self.layers = nn.ModuleDict(
                {
                    str(index): Layer(config, index)
                    for index in sorted({index for part in parts for index in part.layers})
                }
                | {str(index): PredictionLayer(config, index) for index in ahead}
            )
            self.norm = RMSNorm(config.hidden_size, config.norm_eps) if predicts else None
            #: Norms between each extra prediction layer and the head.
            self.ahead_norms = nn.ModuleDict(
                {str(index): RMSNorm(config.hidden_size, config.norm_eps) for index in ahead}
            )
            self.head = (
                VocabularyRows(config.vocab_size, config.hidden_size)
                if predicts and not tied
                else None
            )
        self.vocabulary = Vocabulary()
        self.tokens = Tokens()
        self.memory = Memory()
        self.weights = WeightGate()
        #: The units ("embedding", "layers.3", "head") that no backward reaches.
        self.without_backward: Collection[str] = ()

    def forward(
        self,
        batch: Batch,
        part: ModelPart | None = None,
        *received: Tensor,
        flow: Flow = PLAIN_FLOW,
    ) -> Output:
        """Run one part (None: all). `received`: :attr:`Output.for_next` of the previous part."""
        config = self.config
        # The first part receives nothing; sums are received only if all layers share a loss.
        x_TH, sums_QX = (*received, None, None)[:2]
        part = whole(config) if part is None else part
        local = self.tokens.local(batch.num_tokens)
        context = make_context(batch, local, config, flow)
        if part.first:
            assert x_TH is None
            x_TH = self.embed(batch.tokens_BS)
        assert x_TH is not None
        loads = Loads(config, x_TH, context, sums_QX)
        for index in part.layers:
            x_TH = loads.run(self, index, x_TH, context)
        losses_T, ahead = None, tuple[Tensor, ...]()
        if part.last:
            assert self.norm is not None
            losses_T = self.losses(x_TH, self.norm, batch.targets_BS)
            if config.num_mtp_layers and batch.training:
                losses_T = flow.cut(losses_T)
                ahead = self._predict_ahead(batch, x_TH, context, loads)
        aux, sums_QX = loads.aux, None
        if loads.is_joint:
            aux, sums_QX = x_TH.new_zeros(()), aux
            if part.last:
                aux, sums_QX = joint_loss(sums_QX, config, context, self.tokens), None
        return Output(
            None if part.last else x_TH,
            losses_T,
            aux,
            *loads.counts(),
            moe_layers=tuple(loads.layers),
            ahead_losses=ahead,
            sums=sums_QX,
        )

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Embeddings [T, H] of this rank's rows: the first layer's input, or a prediction layer's
        second one."""
        assert self.embedding is not None
        self.weights.fetch("embedding")
        x_TH = self.vocabulary.embed(tokens_BS.flatten(), self.embedding.weight)
        x_TH = self.weights.leave("embedding", x_TH, read_in_backward=False)
        multiplier = self.config.embedding_multiplier
        return x_TH if multiplier == 1.0 else x_TH * multiplier

    def begin_graph(self, unit: str, x_TH: Tensor) -> Tensor:
        """`x_TH`, the input of `unit`, made part of autograd's graph. If no parameter before it
        trains, it is not, and the backward of the unit, with its exchanges, would not run."""
        if unit in self.without_backward or x_TH.requires_grad or not torch.is_grad_enabled():
            return x_TH
        return _Begin.apply(x_TH, x_TH.new_zeros((), requires_grad=True))

    def losses(self, x_TH: Tensor, norm: RMSNorm, targets_BS: Tensor) -> Tensor:
        """Norm, head and loss: nats [T] of all tokens of the microbatch."""
        x_TH, weight_VH = self._before_head(x_TH, norm)
        losses_T = self.vocabulary.cross_entropy(x_TH, weight_VH, targets_BS.flatten())
        return self.weights.leave("head", losses_T)

    def logits(self, batch: Batch) -> Tensor:
        """Logits [B*S, V] of a batch; the model must be in one part."""
        x_TH = self.stream(batch)
        assert self.norm is not None
        x_TH, weight_VH = self._before_head(x_TH, self.norm)
        logits_TV = self.vocabulary.logits(x_TH, weight_VH, batch.num_tokens)
        return self.weights.leave("head", logits_TV)

    def stream(self, batch: Batch) -> Tensor:
        """The residual stream after the last layer [T, H]; the model must be in one part."""
        return self(batch, whole(self.config)._replace(last=False)).x_TH

    def _before_head(self, x_TH: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The rows that enter the head, and its weight."""
        head = self.embedding if self.head is None else self.head
        assert head is not None
        x_TH = norm(self.weights.enter("head", self.begin_graph("head", x_TH)))
        scaling = self.config.logits_scaling
        return x_TH if scaling == 1.0 else x_TH / scaling, head.weight

    def _predict_ahead(
        self, batch: Batch, x_TH: Tensor, context: Context, loads: Loads
    ) -> tuple[Tensor, ...]:
        """The losses of every extra prediction layer, each on the stream of the one before."""
        losses: list[Tensor] = []
        for depth, index in enumerate(self.config.mtp_layers, start=1):
            ahead, norm = batch.ahead(depth), self.ahead_norms[str(index)]
            assert isinstance(norm, RMSNorm)
            embedded_TH = self.embed(ahead.tokens_BS)
            if ahead.valid_BS is not None:  # the last positions have no token so far ahead
                local = self.tokens.local(ahead.valid_BS.numel())
                valid_T = ahead.valid_BS.flatten()[local.start : local.stop]
                context = replace(context, valid_T=valid_T)
            x_TH = loads.run(self, index, x_TH, context, embedded_TH)
            losses_T = self.losses(x_TH, norm, ahead.targets_BS)
            is_last = depth == self.config.num_mtp_layers
            losses.append(losses_T if is_last else context.flow.cut(losses_T))
        return tuple(losses)

    def parameters_of(self, part: ModelPart) -> list[nn.Parameter]:
        """Parameters that the forward of `part` reads."""
        units = part.units(self.config)
        return [p for name, p in self.named_parameters() if self.unit_of(name) in units]

    def unit_of(self, name: str) -> str:
        """The unit of the parameter `name`."""
        return unit_of(name)

    def selection_biases(self) -> dict[int, tuple[str, Tensor]]:
        """Global layer index -> name and values of the router's selection bias, for the layers of
        this rank that have one."""
        if not self.config.router_selection_bias:
            return {}
        return {
            layer: (f"layers.{layer}.feed_forward.router.selection_bias", bias_E)
            for layer, moe in self.moe_layers().items()
            if (bias_E := moe.router.selection_bias) is not None
        }

    def num_sequences(self, batch: Batch) -> int:
        """Number of sequences that a part computes for `batch`."""
        return len(batch.tokens_BS)

    def stream_specs(self, batch: Batch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of the residual stream that a part returns for `batch`."""
        shape = len(self.tokens.local(batch.num_tokens)), self.config.hidden_size
        # The first parameter is an embedding or a norm, never one of an fp32 router.
        return [(shape, next(self.parameters()).dtype)]

    def moe_layers(self) -> dict[int, MoE]:
        """Global layer index -> mixture of experts, for the layers of this rank."""
        return {
            int(index): feed_forward
            for index, layer in self.layers.items()
            if isinstance(feed_forward := layer.feed_forward, MoE)
        }


class _Begin(torch.autograd.Function):
    """The identity. Its result requires a gradient (because of `anchor`); its input gets none."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, anchor: Tensor) -> Tensor:
        return x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[None, None]:
        return None, None


class Loads:
    """Runs layers, and collects the counts and losses that MoE layers return with their output."""

    def __init__(
        self, config: ModelConfig, x_TH: Tensor, context: Context, sums_QX: Tensor | None
    ) -> None:
        self.layers: list[int] = []
        #: Sum of the auxiliary losses, in the router's dtype (fp32 or fp64); or, if one loss is for
        #: all layers, the sums for it, which start from `sums_QX` of earlier parts.
        self.aux = x_TH.new_zeros((), dtype=torch.promote_types(x_TH.dtype, torch.float32))
        self.is_joint = config.has_joint_aux_loss
        if self.is_joint:
            self.aux = no_sums(config, context) if sums_QX is None else sums_QX
        self._context, self._num_experts = context, config.num_experts
        self._routed: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def run(
        self,
        model: Transformer,
        index: int,
        x_TH: Tensor,
        context: Context,
        embedded_TH: Tensor | None = None,
    ) -> Tensor:
        """The stream after layer `index`; `embedded_TH`: embeddings for a prediction layer."""
        at_layer(index)
        layer, unit = model.layers[str(index)], f"layers.{index}"
        x_TH = model.weights.enter(unit, model.begin_graph(unit, x_TH))
        if embedded_TH is not None:
            assert isinstance(layer, PredictionLayer)
            x_TH = layer.join(x_TH, embedded_TH)
        x_TH, routed = model.memory.run(layer, x_TH, context)
        x_TH = model.weights.leave(unit, x_TH)
        if routed is not None:
            self.layers.append(index)
            self.aux = self.aux if routed.aux is None else self.aux + routed.aux
            self._routed.append((routed.counts_E, routed.num_dropped, routed.fault))
        return x_TH

    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """``counts_LE``, ``dropped_L`` and ``fault_L`` of :class:`Output`."""
        ids_T = self._context.token_ids_T
        if not self._routed:
            return ids_T.new_zeros(0, self._num_experts), ids_T.new_zeros(0), ids_T.new_zeros(0)
        counts, dropped, faults = zip(*self._routed, strict=True)
        dropped_L = ids_T.new_zeros(len(counts))
        if set(dropped) != {None}:
            zero = ids_T.new_zeros(())
            dropped_L = torch.stack([zero if number is None else number for number in dropped])
        fault_L = of_tokens(torch.stack(faults), ids_T, self._num_experts)
        return torch.stack(counts), dropped_L, fault_L


def whole(config: ModelConfig) -> ModelPart:
    """The whole model as one part."""
    return ModelPart(range(config.num_layers))
