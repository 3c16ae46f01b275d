"""Weights derived from stored ones: with merged adapters, of an equivalent model in another form,
and of a mixture of experts upcycled from a dense model.

Each public function but :func:`delta_of` maps a `Read` to a `Read`: (name, box) -> the part `box`
of a weight, one range for each dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moemesh.checkpoint.huggingface.logical import logical_shapes, table_piece
from moemesh.checkpoint.huggingface.pieces import Read
from moemesh.checkpoint.huggingface.weight_folder import EXPERT
from moemesh.config.architecture import ParameterRecord
from moemesh.config.lora import LoraConfig, factor_name, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.initialization import normal_slice
from moemesh.sharding.parameters import tensors


def merged(weights: Read, model: ModelConfig) -> Read:
    """Weights of `model` with its adapters merged: W + scaling B A, computed in fp32 or wider."""
    # A model of transformers' code: the factors of a weight are read in full.
    if model.architecture is not None:
        lora, known = model.lora, {record.name: record for record in model.architecture.parameters}

        def read(name: str, box: Sequence[range]) -> Tensor:
            weight, record = weights(name, box), known.get(name)
            if record is None or not record.adapted(lora):
                return weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            experts = list(box[:1]) if record.is_expert else []

            def factor(name: str, shape: tuple[int, ...]) -> Tensor:
                ranges = [*experts, *map(range, shape[len(experts) :])]
                return weights(name, ranges).to(wide)

            inner = [slice(part.start, part.stop) for part in box[len(experts) :]]
            delta = delta_of(record, lora, factor)[(..., *inner)]
            return weight.to(wide) + lora.scaling * delta

        return read

    # Our own model: only the parts of the factors that the box needs are read.
    lora, known = model.lora, {tensor.name: tensor for tensor in tensors(model, Plan())}

    def read(name: str, box: Sequence[range]) -> Tensor:
        weight, tensor = weights(name, box), known.get(name)
        if tensor is None:
            return weight
        block, rank = tensor.name.rpartition(".")[0], range(lora.rank)
        experts = list(box[:1]) if tensor.is_expert else []
        wide = torch.promote_types(weight.dtype, torch.float32)
        for part in parts_of(name.rpartition(".")[2], tensor.shape):
            *rows, columns = box
            into = [slice(None)] * len(rows)  # rows of the box that the product is added to
            if not lora.adapts(part.target):
                continue
            if part.dim is not None:  # the weight stacks several projections: q, k, v or gate, up
                dim = part.dim + tensor.is_expert
                first = max(rows[dim].start, part.start)
                last = min(rows[dim].stop, part.start + part.size)
                if first >= last:
                    continue
                into[dim] = slice(first - rows[dim].start, last - rows[dim].start)
                rows[dim] = range(first - part.start, last - part.start)
            a, b = (
                weights(f"{block}.{factor_name(part.target, factor)}", ranges).to(wide)
                for factor, ranges in (("A", [*experts, rank, columns]), ("B", [*rows, rank]))
            )
            delta = b.flatten(len(experts), -2) @ a
            weight = weight.to(wide, copy=True)
            weight[tuple(into)] += lora.scaling * delta.view(*b.shape[:-1], -1)
        return weight

    return read


def delta_of(
    record: ParameterRecord, lora: LoraConfig, factor: Callable[[str, tuple[int, ...]], Tensor]
) -> Tensor:
    """The product B A of the adapters of a weight of transformers, in its stored layout. `factor`:
    (name, shape) -> an adapter parameter, or its rows of some experts."""
    shapes = {adapter.name: adapter.shape for adapter in record.adapters(lora)}
    products: list[Tensor | None] = []
    for part in record.parts:
        names = [f"{record.module}.{factor_name(part.target, letter)}" for letter in "AB"]
        if names[0] not in shapes:
            products.append(None)
            continue
        a, b = (factor(name, shapes[name]) for name in names)
        product = b.flatten(int(record.is_expert), -2) @ a
        products.append(product.view(*b.shape[:-1], -1))
    zeros = torch.zeros_like(next(product for product in products if product is not None))
    # Only stacks of experts [E, parts, ...] have several parts: gate and up.
    whole = torch.cat([zeros if product is None else product for product in products], 1)
    # The piece is used for its layout alone: it needs no name.
    return table_piece(record.module, ["", record.layout], tuple(whole.shape)).store(whole)


def equivalent(weights: Read, model: ModelConfig, other: ModelConfig) -> Read:
    """The weights of `model` for `other`, one of its :func:`~moemesh.config.huggingface.export.
    equivalents`: models that differ only in the pairs of channels that RoPE rotates, and in a
    selection bias of the router, which is zero."""
    adds_bias = other.router_selection_bias and not model.router_selection_bias
    reorders = other.rope_interleave != model.rope_interleave
    # Channel of a head of `other` -> channel of a head of `model`: the pair (i, i + rotary_dim / 2)
    # of one form is (2i, 2i + 1) in the interleaved form.
    order, rotary = torch.arange(model.head_dim), model.rotary_dim
    pairs = order[:rotary].view(2, -1) if other.rope_interleave else order[:rotary].view(-1, 2)
    order[:rotary] = pairs.T.reshape(-1)
    kv_heads = model.num_kv_heads
    value_head = model.num_heads // kv_heads + 1  # a group holds query heads, key, value

    def reordered(qkv: Tensor, heads: range) -> Tensor:
        """Queries, keys and values [groups, heads, channels, inputs], with the channels of
        queries and keys in the order of `other`."""
        is_rotated = torch.tensor([head != value_head for head in heads])
        return torch.where(is_rotated[None, :, None, None], qkv[:, :, order], qkv)

    def read(name: str, box: Sequence[range]) -> Tensor:
        leaf = name.rpartition(".")[2]
        if adds_bias and name.endswith("router.selection_bias"):
            return torch.zeros([len(part) for part in box])
        if reorders and leaf == "qkv":
            # The third dim, the channels of a head, is read in full.
            groups, heads, channels, inputs = box
            qkv = weights(name, [groups, heads, range(model.head_dim), inputs])
            return reordered(qkv, heads)[:, :, channels.start : channels.stop]
        if reorders and leaf == "qkv_bias":
            (part,), size = box, (model.num_heads + 2 * kv_heads) * model.head_dim
            bias = weights(name, [range(size)]).view(kv_heads, -1, model.head_dim, 1)
            bias = reordered(bias, range(bias.shape[1])).reshape(-1)
            return bias[part.start : part.stop]
        return weights(name, box)

    return read


def upcycled(
    dense: Read, model: ModelConfig, *, noise: float = 0.0, drop: float = 0.0, seed: int = 0
) -> Read:
    """Weights of `model`, a mixture of experts that differs from a dense model only in its MLPs.

    Legend: E experts, F width of the dense MLP and of every expert, H hidden.

    Sparse upcycling (Komatsuzaki et al., 2022, arXiv:2212.05055): every expert is a copy of the
    dense MLP, and the router is initialised with small weights. If the weights of the chosen
    experts sum to one, the mixture computes the same as the dense model. Two options make the
    experts differ: `noise`, the standard deviation of normal noise on every weight, in units of
    the dense weight's standard deviation; and drop-upcycling (Nakamura et al., 2025,
    arXiv:2502.19261), which reinitialises the fraction `drop` of each expert's F channels with
    mean and standard deviation of the dense weights. All draws follow from `seed`.
    """
    shapes, statistics = logical_shapes(model), dict[str, tuple[float, float]]()

    def read(name: str, box: Sequence[range]) -> Tensor:
        if (match := EXPERT.fullmatch(name)) is not None:
            expert = int(match[2])
            return read(f"{match[1]}.{match[3]}", [range(expert, expert + 1), *box])[0]
        block, _, leaf = name.rpartition(".")
        if block.endswith(".router"):
            return normal_slice(seed, name, shapes[name], box) * model.init_std
        if not block.endswith(".experts"):
            return dense(name, box)
        source, (experts, *box) = f"{block.removesuffix('.experts')}.{leaf}", box
        copied = dense(source, box)
        if not (noise or drop):
            return torch.stack([copied] * len(experts))
        wide, shape = torch.promote_types(copied.dtype, torch.float32), shapes[name][1:]
        if source not in statistics:
            numbers = dense(source, [range(size) for size in shape]).double()
            statistics[source] = float(numbers.mean()), float(numbers.std())
        mean, deviation = statistics[source]
        stack: list[Tensor] = []
        for expert in experts:
            drawn = normal_slice(seed, f"{name}.{expert}", shape, box).to(wide)
            weight = copied.to(wide) + noise * deviation * drawn
            if drop:
                # The same channels of gate, up and down: rows of [2, F, H], columns of [H, F].
                dim = -2 if len(shape) == 3 else -1
                text = f"{seed}/{block}.{expert}/channels".encode()
                key = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), "<u8")
                order = np.random.Generator(np.random.Philox(key=key)).permutation(shape[dim])
                chosen = order < round(drop * shape[dim])
                fresh = torch.from_numpy(chosen[box[dim].start : box[dim].stop])
                fresh = fresh[:, None] if dim == -2 else fresh
                weight = torch.where(fresh, mean + deviation * drawn, weight)
            stack.append(weight)
        return torch.stack(stack)

    return read
