"""Muon: the momentum of a weight matrix is orthogonalized before it updates the matrix.

Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/) with the scale of Moonlight (Liu
et al., 2025, arXiv:2502.16982), so that learning rates and weight decay of AdamW carry over. For a
gradient G of a matrix W with R rows and C columns:

    M <- momentum M + G
    O <- orthogonalize(G + momentum M)                      # Nesterov
    W <- W - lr (0.2 sqrt(max(R, C)) O + weight_decay W)

Parameters without matrices are stepped as AdamW steps them. If ranks hold parts of a matrix, one
rank collects the parts, orthogonalizes the matrix and sends the parts of O back
(:mod:`moemesh.sharding.matrices`), so every plan has the updates of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from moemesh.checkpoint.store import Shard
from moemesh.comm import transfers
from moemesh.comm.collectives import gather_json
from moemesh.comm.mesh import Mesh
from moemesh.sharding.boxes import Part
from moemesh.sharding.buckets import unit_of
from moemesh.sharding.matrices import MatrixExchange, Parts, exchanges, matrices, splits

#: Coefficients of the Newton-Schulz iteration, and its number of steps (Keller Jordan).
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
#: Updates have the root mean square of AdamW's, about 0.2 (Moonlight, section 2.2).
SCALE = 0.2
#: Added to norms, so that a zero matrix is not divided by zero.
_TINY = 1e-7


def orthogonalize(matrices_XRC: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices: singular values above 0.0015 of the
    Frobenius norm become 0.68 to 1.2, smaller ones are multiplied by up to 485. [X, R, C] to the
    same shape, in the dtype of the input."""
    a, b, c = COEFFICIENTS
    is_tall = matrices_XRC.shape[-2] > matrices_XRC.shape[-1]
    x = matrices_XRC.mT if is_tall else matrices_XRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _TINY)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


#: Function from directions to updates, each as name -> tensor in the parameter's local shape.
Update = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class Muon(torch.optim.Optimizer):
    """Steps the group with `names` (of its parameters, in order) by `update`, the others as
    AdamW."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        update: Update,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "names": None})
        self._momentum, self._update = momentum, update
        others = self._adamw_groups()
        self._adamw = (
            torch.optim.AdamW(others, betas=betas, eps=eps, fused=True) if others else None
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["names"] is None:
                continue
            directions: dict[str, Tensor] = {}
            for name, weight in zip(group["names"], group["params"], strict=True):
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum: Tensor = state["momentum_buffer"]
                momentum.mul_(self._momentum).add_(weight.grad)
                directions[name] = weight.grad.add(momentum, alpha=self._momentum)
            updates = self._update(directions)  # even without matrices: it is a collective
            for name, weight in zip(group["names"], group["params"], strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(updates[name], alpha=-group["lr"])
        if self._adamw is not None:
            # load_state_dict and schedules change `self`, not the inner optimizer.
            self._adamw.state = self.state
            for inner, group in zip(self._adamw.param_groups, self._adamw_groups(), strict=True):
                inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
            self._adamw.step()

    def _adamw_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["names"] is None]


class MatrixUpdates:
    """Orthogonalizes the directions of all matrices of a stage, whatever parts its ranks hold.

    `shards` maps tensors by name to this rank's parts of them, which have the names of checkpoints
    and share the memory of the tensors. All ranks of the axis `stage` call an instance together.
    """

    def __init__(
        self,
        mesh: Mesh,
        shards: Callable[[Mapping[str, Tensor]], Iterable[Shard]],
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: that of gradients, also on ranks that own nothing."""
        self._axis, self._shards, self._dtype = mesh["stage"], shards, dtype
        #: Unit -> exchange of its parts between ranks; None before the first call.
        self._exchanges: dict[str, MatrixExchange] | None = None

    def __call__(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scaled updates, in the shapes of `directions`."""
        rank = self._axis.index
        updates = {name: torch.zeros_like(tensor) for name, tensor in directions.items()}
        direction_parts = {part_of(shard): shard.tensor for shard in self._shards(directions)}
        update_parts = {part_of(shard): shard.tensor for shard in self._shards(updates)}
        if self._exchanges is None:
            gathered = gather_json(list(direction_parts), self._axis)
            # JSON has made lists of the tuples in a part.
            self._exchanges = exchanges(
                [[Part(name, *map(tuple, sizes)) for name, *sizes in parts] for parts in gathered]
            )
        #: Unit -> parts that this rank computes alone: whole matrices, or stacks of them.
        local: dict[str, list[Part]] = {}
        for part in direction_parts:
            exchange = self._exchanges.get(unit_of(part.name))
            if exchange is None or part.name not in exchange.owners:
                local.setdefault(unit_of(part.name), []).append(part)
        for unit in sorted(local.keys() | self._exchanges.keys()):
            whole = {part.name: direction_parts[part] for part in local.get(unit, ())}
            exchange = self._exchanges.get(unit)
            if exchange is not None:
                # The tensors that this rank owns, from the parts of all ranks.
                owned = [
                    (part, tensor)
                    for part, tensor in direction_parts.items()
                    if exchange.owners.get(part.name) == rank
                ]
                received = self._send(exchange.there, direction_parts.__getitem__)
                for part, tensor in (*owned, *received):
                    if part.name not in whole:
                        whole[part.name] = tensor.new_zeros(part.shape)
                    _cut(whole[part.name], part).copy_(tensor)
            results = orthogonalize_all(whole)
            for part in local.get(unit, ()):
                update_parts[part].copy_(results[part.name])
            if exchange is not None:
                # Send the updates of these tensors back, to the ranks that hold the parts.
                for part, tensor in update_parts.items():
                    if exchange.owners.get(part.name) == rank:
                        tensor.copy_(_cut(results[part.name], part))

                def update_of(part: Part, results: Mapping[str, Tensor] = results) -> Tensor:
                    return _cut(results[part.name], part)

                for part, tensor in self._send(exchange.back, update_of):
                    update_parts[part].copy_(tensor)
        return updates

    def _send(
        self,
        parts: Parts,
        tensor_of: Callable[[Part], Tensor],
    ) -> Iterable[tuple[Part, Tensor]]:
        """Send the parts with this rank as source; returns those that it receives."""
        size, rank = self._axis.size, self._axis.index
        sent = [part for other in range(size) for part in parts.get((rank, other), ())]
        received = [part for other in range(size) for part in parts.get((other, rank), ())]
        empty = torch.empty(0, dtype=self._dtype, device=self._axis.device)
        flat = torch.cat([empty, *(tensor_of(part).reshape(-1) for part in sent)])
        inputs, outputs = splits(parts, rank, size)
        result = transfers.all_to_all(
            flat, self._axis, inputs, outputs, phase="optimizer", caller="matrices"
        )
        pieces = result.split([prod(part.sizes) for part in received]) if received else ()
        return [
            (part, piece.view(part.sizes)) for part, piece in zip(received, pieces, strict=True)
        ]


def orthogonalize_all(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scaled updates of whole tensors; matrices of one shape are computed together."""
    results = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in whole.items():
        for matrix in matrices(name, tensor.shape):
            pair = tensor[matrix.box], results[name][matrix.box]
            by_shape.setdefault((matrix.rows, matrix.columns), []).append(pair)
    for (rows, columns), pairs in by_shape.items():
        stack = torch.stack([direction.reshape(rows, columns) for direction, _ in pairs])
        updates = orthogonalize(stack) * (SCALE * max(rows, columns) ** 0.5)
        for (_, result), update in zip(pairs, updates, strict=True):
            result.copy_(update.view(result.shape))
    return results


def part_of(shard: Shard) -> Part:
    return Part(shard.name, tuple(shard.shape), tuple(shard.offset), tuple(shard.tensor.shape))


def _cut(tensor: Tensor, part: Part) -> Tensor:
    for dim, (start, size) in enumerate(zip(part.offset, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
