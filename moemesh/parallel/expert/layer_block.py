"""The computation of a `MoELayer` on cast parameters: its output, losses and counts.

Legend: B sequences and T tokens of this rank, H hidden, E experts of all ranks, K choices of a
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moemesh.checkpoint.huggingface.logical import logical_tensors, names_of
from moemesh.checkpoint.huggingface.pieces import slices
from moemesh.config.errors import check_kind
from moemesh.config.huggingface.model import family_of, model_values
from moemesh.config.model import ModelConfig
from moemesh.config.shown import short_repr
from moemesh.model.balance_loss import auxiliary_loss
from moemesh.model.batch import Context
from moemesh.model.faults import NO_FAULT
from moemesh.model.moe import MoE
from moemesh.ops.permute import count_ids
from moemesh.parallel.expert.spread import LayerError

# The MoE block of transformers 5 that a `MoELayer` replaces; tensors have the names of a folder.


class TransformersBlock:
    """The MoE block that a layer replaces: `config`, that of its model, and `tensors`: the name of
    a tensor of the layer -> the pieces of the block's tensors that make it. Raises LayerError for
    other modules and for tensors that contradict the configuration, ConfigError for an unknown
    family."""

    def __init__(self, block: nn.Module) -> None:
        check_kind("block", block, nn.Module)
        name = type(block).__name__
        hf_config = getattr(getattr(block, "experts", None), "config", None)
        if hf_config is None:
            raise LayerError(
                f"{name} is not a MoE block of transformers 5: no experts with a config"
            )
        if getattr(block, "jitter_noise", 0):
            raise LayerError(f"{name}: a layer has no noise of inputs: set jitter_noise to 0 first")
        # A block has no rotary positions: their keys, which may have a form that we cannot read,
        # are left out.
        values = {k: v for k, v in hf_config.to_dict().items() if not k.startswith("rope_")}
        kind = family_of(values)
        self.config = ModelConfig.model_validate(model_values(values))
        layer = next(filter(self.config.is_moe_layer, range(self.config.num_layers)))
        names = names_of(kind, fused=True)
        ours, theirs = f"layers.{layer}.feed_forward.", f"model.layers.{layer}.{names.block}."
        self.returns_pair, self.router = names.returns_pair, block.get_submodule(names.router)
        self.tensors = {
            name.removeprefix(ours): tensor._replace(
                pieces=[p._replace(source=p.source.removeprefix(theirs)) for p in tensor.pieces]
            )
            for name, tensor in logical_tensors(self.config, kind, fused=True).items()
            if name.startswith(ours)
        }
        expected = {p.source: p.stored for tensor in self.tensors.values() for p in tensor.pieces}
        shapes_of_block = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
        if differing := sorted({key for key, _ in expected.items() ^ shapes_of_block.items()}):
            shapes = [
                f"{key} is {shapes_of_block.get(key)}, not {expected.get(key)}"
                for key in differing[:5]
            ]
            more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise LayerError(f"{name} contradicts its configuration: {'; '.join(shapes)}{more}")

    @property
    def sources(self) -> list[str]:
        """The names of the block's tensors."""
        return [piece.source for tensor in self.tensors.values() for piece in tensor.pieces]

    def read(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors from the state dict of the block; gradients flow to its tensors."""

        def part(name: str, box: Any) -> Tensor:
            return state[name][slices(box)]

        with torch.enable_grad():
            return {
                name: tensor.read(list(map(range, tensor.shape)), part)
                for name, tensor in self.tensors.items()
            }

    def stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the block from ours."""
        return {
            piece.source: piece.store(state[name][slices(piece.box)])
            for name, tensor in self.tensors.items()
            for piece in tensor.pieces
        }

    def store_into(self, state: dict[str, Tensor], prefix: str) -> None:
        """Replace our tensors in `state`, whose names begin with `prefix`, by the block's."""
        ours = {name: state.pop(name) for name in [*state] if name.startswith(prefix)}
        stored = self.stored({name.removeprefix(prefix): x for name, x in ours.items()})
        state.update({prefix + name: x for name, x in stored.items()})

    def recorder(self) -> nn.Module:
        """A module to be called with the logits [T, E] of each forward. It has the class of the
        family's router, by which transformers finds the modules to record for
        ``output_router_logits``, and shares the hooks of the block's router: transformers adds its
        hooks once, at the first forward of the model."""
        kind = type(self.router)
        recorder = kind.__new__(kind)
        nn.Module.__init__(recorder)
        for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            setattr(recorder, hooks, getattr(self.router, hooks))
        recorder.forward = _alone
        return recorder

    def finish(self, layer: nn.Module, inputs: object, outputs: tuple[Tensor, Any]) -> Any:
        """Hook of the layer's forward: stores its counts, converts its result to the block's."""
        y, auxiliary = outputs
        layer.counts = auxiliary.counts
        return outputs if self.returns_pair else y


def _alone(logits_TE: Tensor) -> tuple[Tensor]:
    """The forward of :meth:`TransformersBlock.recorder`: a tuple that begins with the logits, like
    that of a router."""
    return (logits_TE,)


class Auxiliary(NamedTuple):
    """The second result of a forward.

    ``loss``: the sum of the next two, to be added to this rank's loss; both carry their
    coefficients and gradients. ``counts`` int64 [E]: choices of this rank's tokens by global expert
    id, after capacity; ``num_dropped`` int64: choices for which an expert had no room; ``finite``
    bool: whether all logits of the router are finite. No value waits for the device.
    """

    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    counts: Tensor
    num_dropped: Tensor
    finite: Tensor

    def __repr__(self) -> str:
        return short_repr(self, self._asdict())


class LayerBlock(MoE):
    """The forward of a :class:`MoELayer`, on parameters in the dtype of the computation."""

    def __init__(self, config: ModelConfig, gradients: str, num_ranks: int) -> None:
        super().__init__(config)
        self.gradients, self.num_ranks = gradients, num_ranks
        self.recorder: nn.Module | None = None

    def forward(  # type: ignore[override]
        self, x_TH: Tensor, context: Context
    ) -> tuple[Tensor, Auxiliary]:
        routing = self.router(x_TH, context, self.tokens)
        if self.recorder is not None:
            self.recorder(routing.logits_TE)
        # `auxiliary_loss` is this rank's sum over its scopes; times `scale` it is this rank's loss.
        scale: float | Tensor = 1.0
        if self.gradients == "sum" or self.config.aux_loss_scope == "microbatch":
            pass
        elif self.config.aux_loss_scope == "global":
            scale = float(self.num_ranks)
        elif context.valid_T is None:
            scale = 1 / max(context.num_sequences, 1)
        else:
            routed_B = context.valid_T.view(context.num_sequences, context.length).any(1)
            scale = routed_B.sum().clamp(min=1).to(routing.logits_TE.dtype).reciprocal()
        # Each loss alone, with the coefficient of the other one set to 0.
        balance_loss, z_loss = (
            auxiliary_loss(
                routing, self.config.model_copy(update={other: 0.0}), context, self.tokens
            )
            * scale
            for other in ("z_loss_coefficient", "aux_loss_coefficient")
        )
        counts_E = count_ids(routing.experts_TK.flatten(), self.config.num_experts)
        num_dropped = routing.num_dropped
        y_TH = self.apply_experts(x_TH, routing, context)
        return y_TH, Auxiliary(
            loss=balance_loss + z_loss,
            balance_loss=balance_loss,
            z_loss=z_loss,
            counts=counts_E,
            num_dropped=counts_E.new_zeros(()) if num_dropped is None else num_dropped,
            finite=routing.fault == NO_FAULT,
        )
