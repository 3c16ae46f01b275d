"""Block builders: exact parameters, and the known strategies come out by themselves."""

from __future__ import annotations

import pytest

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import UserError
from moemesh.config.model import ModelConfig
from moemesh.config.sources import read_preset_table
from moemesh.planner.operators.blocks import TransformerBlocks
from moemesh.planner.operators.convolution import two_branch_network
from moemesh.planner.operators.elimination import solve, solve_chain
from moemesh.planner.operators.graph import join
from moemesh.planner.operators.operator_program import solve_program
from moemesh.planner.operators.pareto import solve_chain_under_memory
from moemesh.planner.operators.resharding import LayoutError, MeshAxis
from moemesh.planner.operators.strategies import CostModel, OperatorSpec, cost_model, operator_of
from moemesh.planner.parameters import count_parameters
from moemesh.planner.shapes.shape import ModelShape, from_model_config


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
    found = solve_chain(TransformerBlocks(shape=shape, batch=1, sequence=64, costs=costs).model())
    counted = found.assignment.state_bytes / costs.state_bytes
    # Norms of queries and keys, and of latents, are no operators of their own.
    assert counted == pytest.approx(count_parameters(shape).total, rel=1e-6)


def names_of_layer(blocks: TransformerBlocks, kind: int = -1) -> dict[str, str]:
    """The strategies of the middle one of three layers."""
    layer = blocks.layer(blocks.shape.kinds[kind])
    found = solve_chain([layer] * 3)
    return layer.graph.names(found.choices[1])


def test_tensor_parallelism_with_sequence_parallelism_comes_out() -> None:
    """Megatron's layer, where one sequence leaves nothing else to cut and gradients are dear."""
    shape = shape_of("llama3-8b")
    axes = (MeshAxis(name="t", size=8, latency=1e-6, seconds_per_byte=1 / 450e9),)
    costs = CostModel(axes=axes, compute_seconds=roofline)
    names = names_of_layer(TransformerBlocks(shape=shape, batch=1, sequence=1024, costs=costs))
    assert names["up"] == names["activation"] == "t=width"
    assert names["down"] == "t=width"
    assert names["qkv"] == names["attention core"] == names["output"] == "t=heads"
    assert names["attention norm"] == names["mlp norm"] == "t=sequence"
    assert names["entry"] == names["exit"] == "S1"


def test_expert_parallelism_comes_out(cluster: Cluster) -> None:
    """GShard's layer: everything by batch, experts by expert, the exchange between two layouts."""
    costs = cost_model(cluster, {"devices": 8})
    blocks = TransformerBlocks(
        shape=shape_of("qwen3-30b-a3b"), batch=16, sequence=4096, costs=costs
    )
    names = names_of_layer(blocks)
    assert {names[f"expert {part}"] for part in ("up", "activation", "down")} == {"devices=experts"}
    rest = {name: way for name, way in names.items() if not name.startswith("expert ")}
    assert {way for name, way in rest.items() if name not in ("entry", "exit")} == {"devices=batch"}


def test_one_weird_trick_comes_out(cluster: Cluster) -> None:
    """Two branches: convolutions by batch, the wide dense layers by channels."""
    graph = two_branch_network(1024, cost_model(cluster, {"devices": 8}))
    names = graph.names(solve(graph).choices)
    convolutions = {way for name, way in names.items() if name.startswith("conv")}
    assert convolutions == {"devices=batch"}
    assert names["dense1"] == "devices=out"
    assert names["dense2"] == "devices=in"


@pytest.mark.parametrize("batch", [64, 1024])
def test_the_convolutional_network_equals_the_integer_program(batch: int, cluster: Cluster) -> None:
    graph = two_branch_network(batch, cost_model(cluster, {"a": 2, "b": 2}))
    program = solve_program(graph)
    assert solve(graph).seconds == pytest.approx(program.assignment.seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["tiny", "deepseek-v3"])
def test_layers_of_models_equal_the_integer_program(name: str, cluster: Cluster) -> None:
    shape = shape_of(name)
    costs = cost_model(cluster, {"devices": 4})
    blocks = TransformerBlocks(shape=shape, batch=4, sequence=512, costs=costs)
    row = [blocks.layer(shape.kinds[0]), blocks.layer(shape.kinds[-1])]
    program = solve_program(join(row))
    assert solve_chain(row).assignment.seconds == pytest.approx(
        program.assignment.seconds, rel=1e-9
    )


def test_recomputation_is_a_strategy_and_memory_buys_time(cluster: Cluster) -> None:
    shape = shape_of("llama3-8b")
    costs = cost_model(cluster, {"devices": 8}, microbatches=4, recompute=True)
    model = TransformerBlocks(shape=shape, batch=8, sequence=4096, costs=costs).model()
    free = solve_chain(model).assignment
    tight = solve_chain_under_memory(model, 0.2 * free.memory_bytes(2), in_flight=2)
    loose = solve_chain_under_memory(model, 0.4 * free.memory_bytes(2), in_flight=2)
    assert free.seconds < loose.assignment.seconds < tight.assignment.seconds
    assert tight.gap < 1e-3


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
    with pytest.raises(UserError, match="need 32 devices; cluster dgx_h100 has 16"):
        cost_model(two_nodes, {"data": 4, "tensor": 8})


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


def test_empty_inputs_are_refused(cluster: Cluster) -> None:
    costs = cost_model(cluster, {"devices": 2})
    with pytest.raises(LayoutError, match="0 sequences"):
        TransformerBlocks(shape=shape_of("tiny"), batch=0, sequence=8, costs=costs)
    with pytest.raises(LayoutError, match="crossing at 9"):
        two_branch_network(8, costs, crossing=9)
