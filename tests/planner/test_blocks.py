"""Operator graphs of models: exact parameters, and the known strategies are the solutions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.model import ModelConfig
from moemesh.config.sources import read_preset_table
from moemesh.planner.operators.blocks import TransformerBlocks
from moemesh.planner.operators.graph import OperatorGraph, solve
from moemesh.planner.operators.resharding import MeshAxis
from moemesh.planner.operators.strategies import (
    RECOMPUTE,
    CostModel,
    OperatorSpec,
    cost_model,
    operator_of,
)
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.shape import ModelShape, from_model_config
from moemesh.planner.stages.placement import branching_network


def roofline(flops: float, moved_bytes: float) -> float:
    return max(flops / 500e12, moved_bytes / 3e12)


MODELS = ("tiny", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def shape_of(name: str) -> ModelShape:
    return from_model_config(ModelConfig.model_validate(read_preset_table(name)), name)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("dgx_h100")


@pytest.mark.parametrize("name", MODELS)
def test_one_device_holds_every_parameter(name: str, cluster: Cluster) -> None:
    shape = shape_of(name)
    costs = cost_model(cluster, {"tensor": 1})
    solution = solve(TransformerBlocks(shape=shape, batch=1, sequence=64, costs=costs).graph)
    counted = solution.cost.state_bytes / costs.state_bytes
    # Norms of queries and keys, and of latents, are part of other operators.
    assert counted == pytest.approx(count_parameters(shape).total, rel=1e-6)


def strategies_of(graph: OperatorGraph, choices: Sequence[int]) -> dict[str, str]:
    """Operator name -> name of the chosen strategy."""
    chosen = zip(graph.operators, choices, strict=True)
    return {operator.name: operator.strategies[choice].name for operator, choice in chosen}


def names_of(blocks: TransformerBlocks) -> dict[str, str]:
    """The strategies of embedding, layer, head and the residual stream."""
    graph = blocks.graph
    return strategies_of(graph, solve(graph).choices)


def test_tensor_parallelism_with_sequence_parallelism_comes_out() -> None:
    """Megatron's layer, where one sequence leaves nothing else to cut and gradients are dear."""
    shape = shape_of("llama3-8b")
    axes = (MeshAxis(name="t", size=8, latency=1e-6, seconds_per_byte=1 / 450e9),)
    costs = CostModel(axes=axes, compute_seconds=roofline)
    names = names_of(TransformerBlocks(shape=shape, batch=1, sequence=1024, costs=costs))
    assert names["up"] == names["activation"] == "t=width"
    assert names["down"] == "t=width"
    assert names["qkv"] == names["attention core"] == names["output"] == "t=heads"
    assert names["attention norm"] == names["mlp norm"] == "t=sequence"
    assert names["stream"] == "S1"


def test_expert_parallelism_comes_out(cluster: Cluster) -> None:
    """GShard's layer: everything by batch, experts by expert, the exchange between two layouts."""
    costs = cost_model(cluster, {"devices": 8})
    blocks = TransformerBlocks(
        shape=shape_of("qwen3-30b-a3b"), batch=16, sequence=4096, costs=costs
    )
    names = names_of(blocks)
    assert {names[f"expert {part}"] for part in ("up", "activation", "down")} == {"devices=experts"}
    layer = {"qkv", "attention core", "output", "router", "dispatch", "combine", "add mlp"}
    assert {names[name] for name in layer} == {"devices=batch"}


def test_one_weird_trick_comes_out(cluster: Cluster) -> None:
    """Two branches: convolutions by batch, the wide dense layers by channels."""
    graph = branching_network(1024, cost_model(cluster, {"devices": 8}))
    names = strategies_of(graph, solve(graph).choices)
    convolutions = {way for name, way in names.items() if name.startswith("conv")}
    assert convolutions == {"devices=batch"}
    assert names["dense1"] == "devices=out"
    assert names["dense2"] == "devices=in"


def test_recomputation_is_a_strategy_and_memory_buys_time(cluster: Cluster) -> None:
    shape = shape_of("llama3-8b")
    costs = cost_model(cluster, {"devices": 8}, microbatches=4, recompute=True)
    graph = TransformerBlocks(shape=shape, batch=8, sequence=4096, costs=costs).graph
    free = solve(graph)
    per_byte = free.cost.seconds / free.cost.memory_bytes()
    points = [solve(graph, byte_price=price * per_byte) for price in (0.0, 0.3, 30.0)]
    seconds = [point.cost.seconds for point in points]
    held = [point.cost.memory_bytes() for point in points]
    assert seconds == sorted(set(seconds))
    assert held == sorted(set(held), reverse=True)
    names = strategies_of(graph, points[-1].choices)
    assert names["attention core"].endswith(RECOMPUTE)
    # Recomputation starts at the output of the layer before.
    assert not names["add mlp"].endswith(RECOMPUTE)


def test_a_layer_counts_as_often_as_it_occurs(cluster: Cluster) -> None:
    costs = cost_model(cluster, {"devices": 8})
    shape = shape_of("deepseek-v3")
    graph = TransformerBlocks(shape=shape, batch=8, sequence=4096, costs=costs).graph
    choices = solve(graph).choices
    groups = graph.group_costs(choices)
    by_hand = sum(
        cost.seconds * {"dense layer": 3, "MoE layer": 58}.get(group, 1)
        for group, cost in groups.items()
    )
    assert graph.cost(choices).seconds == pytest.approx(by_hand)


def test_links_follow_the_shape_of_the_group(cluster: Cluster) -> None:
    two_nodes = cluster.model_copy(update={"nodes": 2})
    outer, inner = cost_model(two_nodes, {"data": 2, "tensor": 8}).axes
    assert inner.seconds_per_byte == 1 / cluster.intra_node_bandwidth
    assert outer.seconds_per_byte == 1 / cluster.inter_node_bandwidth
    # All 16 in one group leave a node over eight cards.
    (whole,) = cost_model(two_nodes, {"all": 16}).axes
    assert whole.seconds_per_byte == 1 / min(
        cluster.intra_node_bandwidth, 8 * cluster.inter_node_bandwidth
    )


def test_sizes_that_do_not_divide_are_not_cut() -> None:
    axes = (MeshAxis(name="t", size=4, seconds_per_byte=1.0),)
    costs = CostModel(axes=axes, compute_seconds=lambda flops, moved: flops)
    spec = OperatorSpec(
        name="product",
        sizes={"rows": 6, "inner": 8, "columns": 4},
        inputs=(("rows", "inner"),),
        output=("rows", "columns"),
        cut=("rows", "inner", "columns"),
        weight=("inner", "columns"),
        weight_elements=32,
        flops=1.0,
    )
    ways = {strategy.name: strategy for strategy in operator_of(spec, costs).strategies}
    assert set(ways) == {"whole", "t=inner", "t=columns"}
    assert (ways["t=inner"].inputs, ways["t=inner"].output) == ((("S1",),), ("P",))
    assert (ways["t=columns"].inputs, ways["t=columns"].output) == ((("B",),), ("S1",))
    assert ways["t=inner"].state_bytes == ways["whole"].state_bytes / 4
