"""Pieces of a logical tensor in the tensors of a folder, with their reshapes and transposes.

A logical tensor (for example ``layers.3.attention.qkv``) may be cut into several stored tensors
(``q_proj``, ``k_proj``, ``v_proj``), each reshaped and transposed. Every such part is a
:class:`TensorPiece`, which gives the slice of the stored tensor that a rank reads for its shard,
and the stored tensor that an export writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


#: Reader of any part of any tensor: (name, a range for each dim) -> numbers. Names are those of a
#: folder for stored tensors, logical names for weights.
Read = Callable[[str, Sequence[range]], "Tensor"]


class StoredSource(Protocol):
    """Stored tensors, read by parts."""

    def read(self, name: str, box: Sequence[range], /) -> Tensor: ...
    def read_into(self, name: str, box: Sequence[range], out: Tensor, /) -> None: ...


class TensorPiece(NamedTuple):
    """Part of a logical tensor at `offset`, held by the stored tensor `source`. The stored tensor
    of shape `stored` is reshaped to `view` (which only splits its dims, or adds dims of size 1);
    dim i of the part is dim ``order[i]`` of the view."""

    source: str
    stored: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view[dim] for dim in self.order)

    @property
    def box(self) -> list[range]:
        """Ranges of the part in the dims of the logical tensor."""
        ends = zip(self.offset, self.shape, strict=True)
        return [range(start, start + size) for start, size in ends]

    def overlap(self, box: Sequence[range]) -> list[range] | None:
        """Part of `box` that this piece holds, in the dims of the logical tensor; None if empty."""
        common = [
            range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            for wanted, held in zip(box, self.box, strict=True)
        ]
        return common if all(common) else None

    def read(self, box: Sequence[range], read: Read) -> Tensor:
        """The numbers of `box`, a part of the piece, in the dims of the logical tensor."""
        ranges, sizes, inner = self._stored(box)
        return read(self.source, ranges).reshape(sizes)[tuple(inner)].permute(self.order)

    def read_into(self, box: Sequence[range], out: Tensor, source: StoredSource) -> None:
        """Same as :meth:`read`, into `out`; without an intermediate copy if `out` can be viewed in
        the stored shape."""
        ranges, sizes, inner = self._stored(box)
        target = out.permute(self._inverse_order)
        if list(target.shape) == sizes:
            try:
                merged = target.view([len(part) for part in ranges])
            except RuntimeError:  # strides of `out` do not allow to merge dims
                pass
            else:
                source.read_into(self.source, ranges, merged)
                return
        target.copy_(source.read(self.source, ranges).reshape(sizes)[tuple(inner)])

    @property
    def _inverse_order(self) -> list[int]:
        """Permutation from the dims of the logical tensor to those of the view."""
        return [self.order.index(dim) for dim in range(len(self.order))]

    def _stored(self, box: Sequence[range]) -> tuple[list[range], list[int], list[slice]]:
        """Ranges of the stored tensor that hold `box`, the shape of these ranges in the view, and
        the index of `box` in that shape."""
        wanted = [range(0)] * len(self.view)
        for dim, part, start in zip(self.order, box, self.offset, strict=True):
            wanted[dim] = range(part.start - start, part.stop - start)
        # View dims that each stored dim is split into; those of size 1 may go anywhere.
        groups: list[list[int]] = []
        dims = iter(range(len(self.view)))
        for size in self.stored:
            group: list[int] = []
            while prod(self.view[dim] for dim in group) < size:
                group.append(next(dims))
            groups.append(group)
        groups[-1] += dims
        assert prod(self.stored) == prod(self.view), f"{self.view} must be a view of {self.stored}"
        ranges: list[range] = []
        sizes: list[int] = []
        inner: list[slice] = []
        for group in groups:
            # The shortest range of the stored dim that holds the wanted part, its shape, and the
            # index in that shape. View dims after the first with several indices are read in full.
            start, stride = 0, prod(self.view[dim] for dim in group)
            stop: int | None = None
            for dim in group:
                part, size = wanted[dim], self.view[dim]
                if stop is not None:
                    sizes.append(size)
                    inner.append(slice(part.start, part.stop))
                    continue
                stride //= max(size, 1)
                start += part.start * stride
                sizes.append(len(part))
                inner.append(slice(None))
                if len(part) != 1:
                    stop = start + len(part) * stride
            ranges.append(range(start, start + 1 if stop is None else stop))
        return ranges, sizes, inner

    def store(self, logical: Tensor) -> Tensor:
        """The stored tensor of the part `logical` (of the shape of the piece)."""
        return logical.permute(self._inverse_order).reshape(self.stored).contiguous()


def whole(source: str, shape: tuple[int, ...]) -> TensorPiece:
    """Piece of a stored tensor that equals the logical tensor."""
    return TensorPiece(source, shape, shape, tuple(range(len(shape))), (0,) * len(shape))


def slices(part: Sequence[range], box: Sequence[range] | None = None) -> tuple[slice, ...]:
    """The index of `part` in a tensor, or in the part `box` of it."""
    starts = [0] * len(part) if box is None else [dim.start for dim in box]
    return tuple(slice(x.start - a, x.stop - a) for x, a in zip(part, starts, strict=True))


def assemble(pieces: Sequence[TensorPiece], box: Sequence[range], read: Read) -> Tensor:
    """The numbers of `box` of a logical tensor that `pieces` cover."""
    # Late: names and shapes of a folder are checked before torch is imported.
    import torch

    parts = [(common, piece) for piece in pieces if (common := piece.overlap(box)) is not None]
    if len(parts) == 1 and parts[0][0] == list(box):
        return parts[0][1].read(parts[0][0], read)
    result: Tensor | None = None
    for common, piece in parts:
        part = piece.read(common, read)
        if result is None:
            shape = [len(wanted) for wanted in box]
            result = torch.empty(shape, dtype=part.dtype, device=part.device)
        # Dtypes of pieces may differ.
        result = result.to(torch.promote_types(result.dtype, part.dtype))
        result[slices(common, box)] = part
    return torch.empty([len(wanted) for wanted in box]) if result is None else result
