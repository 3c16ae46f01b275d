"""The computation of a `MoELayer` on prepared parameters: its output, losses and counts.

Legend: T tokens of this rank, H hidden, E experts of all ranks, K choices of a token.
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

# The MoE block of transformers 5 that a `MoELayer` replaces, under the names of folders.


class TransformersBlock:
    """The `config` of the model that a block comes from, and the places of our tensors in it.
    Raises LayerError for other modules, and for tensors that contradict the configuration, and
    ConfigError for an unknown family."""

    def __init__(self, block: nn.Module) -> None:
        check_kind("block", block, nn.Module)
        name = type(block).__name__
        given = getattr(getattr(block, "experts", None), "config", None)
        if given is None:
            raise LayerError(
                f"{name} is not a MoE block of transformers 5: no experts with a config"
            )
        if getattr(block, "jitter_noise", 0):
            raise LayerError(f"{name}: a layer has no noise of inputs: set jitter_noise to 0 first")
        # Positions are not part of a block, whatever their form.
        values = {key: one for key, one in given.to_dict().items() if not key.startswith("rope_")}
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
        expected = {p.source: p.stored for one in self.tensors.values() for p in one.pieces}
        shapes_of_block = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
        if wrong := sorted({key for key, _ in expected.items() ^ shapes_of_block.items()}):
            shapes = [
                f"{key} is {shapes_of_block.get(key)}, not {expected.get(key)}" for key in wrong[:5]
            ]
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise LayerError(f"{name} contradicts its configuration: {'; '.join(shapes)}{more}")

    @property
    def sources(self) -> list[str]:
        """The names of the block's tensors."""
        return [piece.source for tensor in self.tensors.values() for piece in tensor.pieces]

    def read(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors from the state dict of the block, in its graph."""

        def part(name: str, box: Any) -> Tensor:
            return state[name][slices(box)]

        with torch.enable_grad():
            return {
                n: one.read(list(map(range, one.shape)), part) for n, one in self.tensors.items()
            }

    def stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the block from ours."""
        return {
            piece.source: piece.store(state[name][slices(piece.box)])
            for name, tensor in self.tensors.items()
            for piece in tensor.pieces
        }

    def store_into(self, state: dict[str, Tensor], prefix: str) -> None:
        """Put the tensors of the block in the place of ours, whose names begin with `prefix`."""
        own = {name[len(prefix) :]: state.pop(name) for name in [*state] if name.startswith(prefix)}
        state.update({prefix + name: one for name, one in self.stored(own).items()})

    def recorder(self) -> nn.Module:
        """A module that gets the logits [T, E] of each forward. It is of the family's class of
        routers, by which transformers finds the outputs for ``output_router_logits``. Its hooks are
        those of the block's router: transformers adds them at the first forward only.
        """
        kind = type(self.router)
        recorder = kind.__new__(kind)
        nn.Module.__init__(recorder)
        for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            setattr(recorder, hooks, getattr(self.router, hooks))
        recorder.forward = _alone
        return recorder

    def finish(self, layer: nn.Module, inputs: object, outputs: tuple[Tensor, Any]) -> Any:
        """Hook of the layer's forward: converts its result to that of the block."""
        y, auxiliary = outputs
        layer.counts = auxiliary.counts
        return outputs if self.returns_pair else y


def _alone(logits_TE: Tensor) -> tuple[Tensor]:
    return (logits_TE,)


class Auxiliary(NamedTuple):
    """The second result of a forward.

    ``loss``: the sum of the next two, to be added to this rank's loss; both carry their
    coefficients and gradients. ``counts`` int64 [E]: choices of this rank's tokens by global expert
    id, after capacity; ``num_dropped`` int64: choices for which an expert had no room; ``finite``
    bool: whether all logits of the router were. No value waits for the device.
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
    """The computation, on parameters that are prepared for it."""

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
        # From this rank's part of the losses, a sum over its scopes, to its loss.
        scale: float | Tensor = 1.0
        if self.gradients == "sum" or self.config.aux_loss_scope == "microbatch":
            pass
        elif self.config.aux_loss_scope == "global":
            scale = float(self.num_ranks)
        elif context.valid_T is None:
            scale = 1 / max(context.num_sequences, 1)
        else:
            routed_B = context.valid_T.view(context.num_sequences, -1).any(1)
            scale = routed_B.sum().clamp(min=1).to(routing.logits_TE.dtype).reciprocal()
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
