"""A small convolutional network with two branches, as AlexNet (2012), as an operator graph.

Five convolutions in two branches that exchange their maps before the third, then three dense
layers. It is here so that the planner is one of graphs: nothing in it is a transformer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moemesh.planner.operators.graph import OperatorGraph
from moemesh.planner.operators.strategies import CostModel, GraphBuilder, OperatorSpec


class Convolution(NamedTuple):
    """Channels of one branch behind a layer, kernel side, side of the map before pooling and behind
    it."""

    channels: int
    kernel: int
    side: int
    pooled_side: int


#: Channels are those of one branch (A. Krizhevsky, I. Sutskever, G. Hinton, 2012).
ALEXNET = (
    Convolution(48, 11, 55, 27),
    Convolution(128, 5, 27, 13),
    Convolution(192, 3, 13, 13),
    Convolution(192, 3, 13, 13),
    Convolution(128, 3, 13, 6),
)
_DENSE = (4096, 4096, 1000)
_IMAGE_CHANNELS, _IMAGE_SIDE, _ELEMENT_BYTES = 3, 224, 2


def two_branch_network(
    batch: int,
    costs: CostModel,
    *,
    layers: tuple[Convolution, ...] = ALEXNET,
    dense: tuple[int, ...] = _DENSE,
    crossing: int = 2,
) -> OperatorGraph:
    """Two branches of convolutions; layer number `crossing` reads both, then dense layers.

    The crossing is a layer behind the first.
    """
    builder = GraphBuilder(costs)
    image_bytes = float(batch * _IMAGE_CHANNELS * _IMAGE_SIDE**2 * _ELEMENT_BYTES)
    images = builder.port("images", {0: batch}, image_bytes, constant=True)
    ends = [images, images]
    for index, layer in enumerate(layers):
        before = layers[index - 1].channels if index else _IMAGE_CHANNELS
        sources = [ends, ends] if index == crossing else [[end] for end in ends]
        # Convolution, activation and pooling, over one branch's maps or both.
        read = len(sources[0])
        elements = float(layer.channels * before * read * layer.kernel**2)
        computed = float(batch * layer.channels * layer.side**2)
        convolution = OperatorSpec(
            name=f"conv{index + 1}",
            sizes={"batch": batch, "in": before, "out": layer.channels},
            inputs=(("batch", "in"),) * read,
            output=("batch", "out"),
            # Two inputs have channels of their own, which no single cut divides.
            cut=("batch", "in", "out") if read == 1 else ("batch", "out"),
            weight=("in", "out"),
            weight_elements=elements,
            flops=2.0 * computed * elements / layer.channels,
            moved_bytes=2.0 * computed * _ELEMENT_BYTES,
            output_bytes=float(batch * layer.channels * layer.pooled_side**2 * _ELEMENT_BYTES),
            kept_bytes=computed * _ELEMENT_BYTES,
        )
        ends = [
            builder.add(replace(convolution, name=convolution.name + branch), *inputs)
            for branch, inputs in zip("ab", sources, strict=True)
        ]
    last = layers[-1]
    width = 2 * last.channels * last.pooled_side**2
    # Both branches as one row an image; a cut of channels would mix the branches' orders.
    num_bytes = float(batch * width * _ELEMENT_BYTES)
    joined = builder.add(
        OperatorSpec(
            name="concatenate",
            sizes={"batch": batch},
            inputs=(("batch", "branch"),) * 2,
            output=("batch", "channels"),
            cut=("batch",),
            moved_bytes=2 * num_bytes,
            output_bytes=num_bytes,
            kept_bytes=num_bytes,
        ),
        *ends,
    )
    for index, out in enumerate(dense):
        elements = float(width * out)
        dense_bytes = float(batch * out * _ELEMENT_BYTES)
        spec = OperatorSpec(
            name=f"dense{index + 1}",
            sizes={"batch": batch, "in": width, "out": out},
            inputs=(("batch", "in"),),
            output=("batch", "out"),
            cut=("batch", "in", "out"),
            weight=("in", "out"),
            weight_elements=elements,
            flops=2.0 * batch * elements,
            moved_bytes=dense_bytes,
            output_bytes=dense_bytes,
            kept_bytes=dense_bytes,
        )
        joined, width = builder.add(spec, joined), out
    loss = OperatorSpec(
        name="loss",
        sizes={"batch": batch, "out": width},
        inputs=(("batch", "out"),),
        output=("batch",),
        cut=("batch", "out"),
        moved_bytes=4.0 * batch * width,
        output_bytes=4.0 * batch,
    )
    builder.add(loss, joined)
    return builder.graph()
