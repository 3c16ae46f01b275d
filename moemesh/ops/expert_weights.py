"""The weights of many experts, with biases, adapters and experts that do not train.

Legend: E local experts, F expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moemesh.ops.expert_adapters import of_experts
from moemesh.ops.expert_blocks import Block
from moemesh.ops.linear import Adapter
from moemesh.ops.swiglu import PLAIN, SwigluForm


class ExpertWeights(NamedTuple):
    """``gate_up`` [E, 2, F, H], ``down`` [E, H, F], biases ``gate_up_bias`` [E, 2, F] and
    ``down_bias`` [E, part of H], which is that from channel `column` on; the form of SwiGLU; and
    the adapters of both weights, with what multiplies their products. ``rest``: the same weights of
    more experts, which come behind these in the order of rows and have no gradient."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    form: SwigluForm = PLAIN
    column: int = 0
    adapters: tuple[Adapter, ...] = ()
    scale: float = 1.0
    rest: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are there, in order: without the biases, or with both; then both
        factors of every adapter, then the rest."""
        factors = [factor for adapter in self.adapters for factor in adapter[:2]]
        own = (tensor for tensor in self[:4] if isinstance(tensor, Tensor))
        return (*own, *factors, *self.rest)

    @property
    def border(self) -> int:
        """The place where the rest begins; 0: there is none, or there is nothing else."""
        return len(self.gate_up) if self.rest else 0

    def of_block(self, block: Block) -> ExpertWeights:
        """The weights of the experts of one block, all of them before the border or behind it."""
        start, stop = block.experts.start, block.experts.stop
        own = [tensor for tensor in self[:4] if isinstance(tensor, Tensor)]
        if self.rest and start >= self.border:
            start, stop, own = start - self.border, stop - self.border, list(self.rest)
        return ExpertWeights(
            *(tensor[start:stop] for tensor in own),
            form=self.form,
            column=self.column,
            adapters=tuple(of_experts(self.adapters, block.experts)),
            scale=self.scale,
        )

    def trains(self, block: Block) -> bool:
        """Whether the experts of a block are before the border."""
        return not self.rest or block.experts.stop <= self.border

    @property
    def kind(self) -> ExpertKind:
        """All but the tensors."""
        parts = tuple(adapter[2:] for adapter in self.adapters)
        return ExpertKind(self.form, self.column, parts, self.scale, len(self.rest))

    def of(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """Other experts of the same kind, from their :attr:`tensors`."""
        return self.kind.weights(tensors)

    @property
    def of_gate_up(self) -> list[Adapter]:
        """The adapters of gate and up."""
        return [adapter for adapter in self.adapters if adapter.dim is not None]

    @property
    def of_down(self) -> list[Adapter]:
        """The adapters of the projection down."""
        return [adapter for adapter in self.adapters if adapter.dim is None]

    @property
    def part(self) -> slice:
        """The channels of the output that ``down_bias`` is added to."""
        assert self.down_bias is not None
        return slice(self.column, self.column + self.down_bias.shape[1])


class ExpertKind(NamedTuple):
    """All of :class:`ExpertWeights` but the tensors; of every adapter (dim, start, count)."""

    form: SwigluForm
    column: int
    parts: tuple[tuple[int | None, int, int], ...]
    scale: float
    num_rest: int

    def weights(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """The weights from :attr:`ExpertWeights.tensors`."""
        own = tensors[: self.num_weights(tensors)]
        end = len(tensors) - self.num_rest
        factors = tensors[len(own) : end]
        pairs = zip(self.parts, factors[::2], factors[1::2], strict=True)
        return ExpertWeights(
            *own,
            form=self.form,
            column=self.column,
            adapters=tuple(Adapter(a, b, *part) for part, a, b in pairs),
            scale=self.scale,
            rest=tuple(tensors[end:]),
        )

    def num_weights(self, tensors: Sequence[Tensor]) -> int:
        """Number of the tensors that are weights and biases: the factors follow, then the rest."""
        return len(tensors) - 2 * len(self.parts) - self.num_rest
