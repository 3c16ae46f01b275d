"""The step: bubbles against the simulator, cuts, lower bounds, columns against rows."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.cluster import load_cluster
from moemesh.config.conditions import ScheduleConditionError
from moemesh.config.devices import ACCELERATORS
from moemesh.config.errors import UserError
from moemesh.config.plan import Plan
from moemesh.config.sources import preset_names
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import from_arch_table, load_model
from moemesh.planner.shapes.shape import ModelShape, from_model_config
from moemesh.planner.stage_cut import Stages, cut_by_weight, default_cut
from moemesh.planner.timing.calibration import Constants
from moemesh.planner.timing.columns import Software, hardware_row, layout_row, model_row, stacked
from moemesh.planner.timing.compute import (
    LayerTime,
    PricedStep,
    attended,
    core_seconds,
    layer_transfers,
    model_ends,
    product_seconds,
)
from moemesh.planner.timing.price import pricing, software_of
from moemesh.planner.timing.step_time import (
    StepTime,
    compute_floor,
    data_seconds,
    overlapped,
    sharded_unit,
    step_seconds,
    step_time,
)
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.schedule.step import duration
from moemesh.sharding.load_run import load_run
from moemesh.sharding.stages import cut_layers
from tests.planner.published_rows import ARCHS

DENSE = from_arch_table("llama-13B", ARCHS)
MOE = from_arch_table("moe-30B", ARCHS)


def work_of(
    shape: ModelShape,
    layout: PlannedLayout,
    software: Software | None = None,
    device: str = "A100-80G",
    constants: Constants | None = None,
) -> PricedStep:
    return PricedStep(
        model_row(shape),
        layout_row(shape, layout, software or Software()),
        hardware_row(ACCELERATORS[device], layout.precision),
        constants or Constants(),
    )


def priced(shape: ModelShape = DENSE, software: Software | None = None, **layout) -> PricedStep:
    return work_of(shape, PlannedLayout(seq_len=2048, global_batch=64, **layout), software)


def simulated(shape: ModelShape, layout: PlannedLayout, *work) -> StepTime:
    return step_time(work_of(shape, layout, *work), stages=[Stages.of(shape, layout)])


def price(
    shape: ModelShape = DENSE,
    software: Software | None = None,
    constants: Constants | None = None,
    device: str = "A100-80G",
    **layout,
) -> StepTime:
    planned = PlannedLayout(**{"seq_len": 2048, "global_batch": 256} | layout)
    return simulated(shape, planned, software, device, constants)


def test_parts_add_up_to_the_step():
    for times in (price(tp=4, pp=4, dp=4), price(MOE, ep=8, dp=16), price(dp=64, zero=3)):
        parts = [float(getattr(times, item.name)) for item in fields(times)]
        assert parts[0] == pytest.approx(sum(parts[1:]), rel=0.02)
        assert min(parts) >= 0


def test_low_rank_adapters_skip_weight_gradients_and_optimizer():
    shares = {"trained_dense": 0.01, "trained_experts": 0.01}
    whole, adapters = price(dp=8), price(dp=8, adapters=True, **shares)
    assert adapters.optimizer == pytest.approx(whole.optimizer / 100)
    assert 0.6 < adapters.compute / whole.compute < 0.75


def test_adapters_read_and_write_beside_their_products_and_reduce_nothing():
    """Forward and backward move 3 x 2 (inputs + outputs) numbers of 2 bytes a token. Queries, keys
    and values are one product where they alone have adapters, else three."""
    every = price(dp=8, adapters=True)
    alone = price(software=Software(adapts_qkv_alone=True), dp=8, adapters=True)
    hidden, width, constants = DENSE.hidden_size, DENSE.intermediate_size, Constants()
    others = 2 * hidden + 2 * hidden + (2 * hidden + 2 * width) + (width + hidden)
    passed = 3 * DENSE.num_layers * 256 / 8 * 2048 * 2 * 2 * others
    rate = ACCELERATORS["A100-80G"].memory_bandwidth * constants.memory_efficiency
    seconds = passed * constants.elementwise_traffic / rate
    assert every.elementwise - alone.elementwise == pytest.approx(seconds)
    slow = {"dp": 64, "zero": 3, "global_batch": 64, "microbatch": 1}
    whole, frozen = price(**slow), price(**slow, adapters=True)
    # Two gathers of 2 bytes remain of 2 x 2 + `reduce_bytes`.
    assert frozen.data < 0.7 * whole.data


def test_frozen_weights_need_neither_their_gradient_nor_the_input_of_a_block_again():
    """Two products of the head remain of three, and two collectives of a block."""
    whole, frozen = model_ends(priced(dp=8)), model_ends(priced(dp=8, adapters=True))
    assert frozen.head_weight_gradient == 0
    assert frozen.head == pytest.approx(whole.head - whole.head_weight_gradient)
    cut = {"tp": 8, "sequence_parallel": True}
    again = Constants().sequence_parallel_regather
    assert price(**cut).tensor == pytest.approx(
        price(**cut, adapters=True).tensor * (2 + again) / 2
    )


def test_shards_inside_a_node_leave_only_gradients_to_the_network():
    """Frozen weights have none: 16 nodes of 8 then cost what one node does."""
    exact = replace(Constants(), collective_latency_us=1e-9)
    frozen = {"zero": 3, "zero_group": 8, "seq_len": 512, "device": "V100", "constants": exact}
    adapters = frozen | {"adapters": True}
    node = price(dp=8, global_batch=8, **adapters)
    assert price(dp=128, global_batch=128, **adapters).data == pytest.approx(node.data)
    assert price(dp=128, global_batch=128, **frozen).data > 4 * node.data
    whole = {**frozen, "zero_group": 0}
    assert price(dp=8, global_batch=8, **whole) == price(dp=8, global_batch=8, **frozen)


def test_listed_gathers_are_not_hidden_and_grow_with_the_ranks():
    """Five matrices of a gated layer, 20 us for each rank's shard of each."""
    layer, ranks, weights = LayerTime(1.0, 2.0, 0.5), 64, 317e6
    work = priced(DENSE, dp=ranks, zero=3)
    listed = replace(work, layout=replace(work.layout, fsdp=1, listed_gathers=1))
    shards = (ranks - 1) / ranks * weights / listed.links.bandwidth(ranks, 1)
    each = 5 * ranks * 20e-6
    unit = sharded_unit(listed, layer, weights, 0.0)
    assert unit.forward == pytest.approx(1.0 + 2 * shards + each)
    both = (2 + Constants().reduce_bytes) * shards + 2 * each
    assert unit.backward == pytest.approx(2.0 + both)


@pytest.mark.parametrize(("degrees", "is_cut"), [({"tp": 8, "ep": 8}, 0), ({"tp": 8}, 1)])
def test_zero3_of_one_replica_is_the_step_without_it(degrees, is_cut):
    """Without expert parallelism eight ranks hold the same experts, and cut them."""
    layout = PlannedLayout(**degrees, seq_len=1024, global_batch=1)
    known, shape = pricing(load_cluster("dgx_h100")), load_model("qwen3-30b-a3b").shape
    plain, cut = (known.seconds(shape, layout.changed(zero=zero)) for zero in (0, 3))
    assert (plain != cut) == bool(is_cut)


def test_zero2_reduces_for_every_microbatch_and_costs_zero1_with_one():
    """Its transfers are those of the ledger: the same with one microbatch."""
    software, free = Software(sums_each=True), replace(Constants(), gradient_exposed=1e-9)
    assert software_of(PlannedLayout(seq_len=2048, global_batch=8, dp=8, zero=2)) == software
    gathered = price(dp=8, zero=1, constants=free).data
    for sums in (1, 4):
        once = price(dp=8, zero=1, global_batch=8 * sums).data - gathered
        each = price(DENSE, software, dp=8, zero=2, global_batch=8 * sums).data - gathered
        assert each == pytest.approx(sums * once)


@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_a_backward_hides_at_most_its_own_length_of_a_gradient_sum(share):
    work = priced(DENSE, dp=64)
    work = replace(work, constants=replace(Constants(), gradient_exposed=share))
    reduced = float(data_seconds(work, 1e9, 0.0, 0.0))
    for backward in (reduced / 1000, reduced / 2, reduced, 3 * reduced, 1000 * reduced):
        exposed = float(data_seconds(work, 1e9, 0.0, backward))
        assert max(reduced - backward, share * reduced) <= exposed * (1 + 1e-9)
        assert exposed <= reduced * (1 + 1e-9)
        # A longer backward never makes the step shorter.
        longer = float(data_seconds(work, 1e9, 0.0, 1.5 * backward))
        assert longer + 0.5 * backward >= exposed * (1 - 1e-9)
    assert exposed == pytest.approx(share * reduced, rel=0.01)


def test_interleaved_stages_hide_the_sums_of_those_that_finish_before():
    """Four stages a rank on two ranks of a pipeline: the sums of the stages that are complete first
    run beside 3 x 2 more backwards of a quarter of the layers; that of the last beside its own."""
    layout = {"pp": 2, "dp": 16, "microbatch": 1, "zero": 0}
    constants = replace(Constants(), gradient_exposed=1e-9)

    def exposed(backward, **more):
        work = replace(priced(DENSE, **layout, **more), constants=constants)
        return float(data_seconds(work, 1e9, 0.0, backward))

    chunks = {"schedule": "interleaved_1f1b", "stages_per_rank": 4}
    reduced = exposed(0.0)
    assert exposed(0.0, **chunks) == pytest.approx(reduced)
    for backward in (0.1 * reduced, 0.5 * reduced, 0.6 * reduced):
        assert exposed(backward) == pytest.approx(reduced - backward)
        hidden = backward * (1 + 2 * 3) / 4
        left = max(reduced - hidden, (reduced - backward) / 4)
        assert exposed(backward, **chunks) == pytest.approx(left, rel=1e-3)


def test_gradients_of_two_bytes_take_half_the_time_and_serial_gathers_more_than_a_ring():
    constants = replace(Constants(), gradient_exposed=1.0, weight_exposed=1.5)
    usual, half, serial = (
        float(data_seconds(replace(priced(DENSE, software, dp=64, zero=1), constants=constants),
                           1e9, 0.0, 0.0))
        for software in (
            Software(), Software(wire_gradient_bytes=2.0), Software(serial_gather=True)
        )
    )  # fmt: skip
    # 4 bytes of a gradient and 2 of a weight: 6, 4, and 4 + 1.5 x 2.
    assert half / usual == pytest.approx(4 / 6)
    assert serial / usual == pytest.approx(7 / 6)


def test_every_second_product_runs_twice():
    plain, op = price(dp=8), price(dp=8, recompute=frozenset({"operators"}))
    assert op.compute / plain.compute == pytest.approx(3.5 / 3)


@pytest.mark.parametrize(
    ("software", "values", "load", "kept"),
    [
        (Software(), {"imbalance": 3.0}, 3.0, 1.0),
        (Software(natural_routing=True), {}, 1 + Constants().routing_imbalance, 1.0),
        (Software(), {"capacity_factor": 0.75}, 1.0, 0.75),
        (Software(), {"capacity_factor": 2.0}, 1.0, 1.0),
        (Software(token_drop=True), {}, 1.0, Constants().capacity_kept),
    ],
)
def test_rows_of_the_fullest_expert_rank(software, values, load, kept):
    work = priced(MOE, software, **values)
    assert (work.load, work.kept_choices) == pytest.approx((load, kept))


@pytest.mark.parametrize("shape", [DENSE, MOE])
@pytest.mark.parametrize("values", [{}, {"recompute": frozenset({"full"})}, {"zero": 3}])
def test_tensor_traffic_is_that_of_the_blocks_that_have_it(shape, values):
    """An expert layer without shared experts has one tensor-parallel block. Parts that count two
    leave less than nothing for element-wise kernels on slow links."""
    slow = replace(Constants(), intra_node_efficiency=0.01)
    times = price(shape, constants=slow, tp=8, dp=8, ep=shape.is_moe * 7 + 1, **values)
    fast = price(shape, tp=8, dp=8, ep=shape.is_moe * 7 + 1, **values)
    if not values.get("zero"):
        assert times.elementwise == pytest.approx(fast.elementwise, rel=0.3)
    assert min(times.row(0).values()) >= 0


def test_without_a_pipeline_all_schedules_take_the_same_time():
    model, cluster = load_model("qwen3-30b-a3b").shape, pricing(load_cluster("dgx_h100"))
    layout = PlannedLayout(dp=8, ep=8, seq_len=4096, global_batch=64)
    seconds = [
        cluster.seconds(model, layout.changed(schedule=name))["total"]
        for name in ("1f1b", "gpipe", "zb_h1", "zb_v", "dualpipe_v")
    ]
    assert seconds == pytest.approx([seconds[0]] * 5, rel=1e-12)


@pytest.mark.parametrize("name", ["imbalance", "capacity_factor"])
def test_seconds_and_memory_follow_the_same_rows(name):
    """A layout with more rows on its fullest expert rank takes longer and needs more memory."""
    model, cluster = load_model("qwen3-30b-a3b").shape, pricing(load_cluster("dgx_h100"))
    layout = PlannedLayout(dp=8, ep=8, seq_len=4096, global_batch=64, microbatch=8)
    few, many = (layout.changed(**{name: value}) for value in (1.0, 1.5))
    if name == "capacity_factor":
        few, many = layout.changed(capacity_factor=0.5), layout
    fewer, more = (cluster.price(model, one) for one in (few, many))
    assert fewer[0].needed < more[0].needed
    assert fewer[1]["compute"] < 0.9 * more[1]["compute"]
    assert fewer[1]["experts"] < 0.9 * more[1]["experts"]


def test_products_that_stay_in_16_bit_take_their_share():
    planned = PlannedLayout(seq_len=2048, global_batch=8, precision="float4")

    def seconds(share: float) -> float:
        work = work_of(DENSE, planned, Software(wide_share=share), "B200")
        return float(product_seconds(work, 4096, 4096, 4096))

    assert seconds(0.25) == pytest.approx(0.75 * seconds(0) + 0.25 * seconds(1))
    assert seconds(1) / seconds(0) == pytest.approx(4 * 0.48 / 0.78)


def test_heads_for_tokens_move_less_than_all_keys_of_a_multi_head_model():
    """Ulysses moves 2 u (h + h_kv), a ring gathers 2 u c h_kv."""
    long = {"cp": 8, "seq_len": 65536, "global_batch": 8}
    exposed = replace(Constants(), context_exposed=1.0, collective_latency_us=1e-9)
    ring = price(**long, constants=exposed).context
    swapped = price(**long, constants=exposed, context="all_to_all").context
    assert swapped / ring == pytest.approx(2 / 8)


def test_a_device_below_its_data_sheet_is_slower():
    plain = ACCELERATORS["MI300X"]
    assert plain.sustained == 0.65
    assert hardware_row(plain, "float8").peak == pytest.approx(0.65 * 2615e12)


@pytest.mark.parametrize("name", ["8xMI300X", "dgx_h100", "8xB200", "16xL40S"])
def test_a_cluster_has_the_rates_of_its_device(name):
    """Rates of `plan` and `estimate` are those of a row of a table of runs on the device."""
    device = pricing(load_cluster(name)).device
    sheet = hardware_row(ACCELERATORS[device.name], "float8")
    assert vars(hardware_row(device, "float8")) == pytest.approx(vars(sheet), rel=1e-3)


@pytest.mark.parametrize(
    ("device", "precision", "as_slow_as"),
    [
        ("A100-80G", "float8", "bfloat16"),
        ("A100-80G", "float4", "bfloat16"),
        ("H100-80G", "float4", "float8"),
        ("B200", "float16", "bfloat16"),
    ],
)
def test_a_format_that_a_device_lacks_is_the_next_wider_one(device, precision, as_slow_as):
    """No cast to it either: the product runs in the wider format."""
    sheet = ACCELERATORS[device]
    assert hardware_row(sheet, precision) == hardware_row(sheet, as_slow_as)
    works = (priced(dp=8, precision=name) for name in (precision, as_slow_as))
    same, wider = (step_seconds(replace(work, hardware=hardware_row(sheet, name)))
                   for work, name in zip(works, (precision, as_slow_as), strict=True))  # fmt: skip
    assert same == wider


def test_products_in_32_bit_have_their_own_peak():
    """67 TFLOP/s on an H100 where 16 bit has 989: products of many rows take 15 times, those of few
    rows less, because they wait for memory."""
    planned = PlannedLayout(dp=8, seq_len=2048, global_batch=64, precision="float32")
    known = pricing(load_cluster("dgx_h100"))
    wide, half = (
        known.seconds(DENSE, planned.changed(precision=name)) for name in ("float32", "bfloat16")
    )
    assert 0.8 * 989.4 / 66.9 < wide["compute"] / half["compute"] < 989.4 / 66.9
    assert wide["optimizer"] == half["optimizer"]


def test_deduplicated_dispatch_crosses_less():
    """DeepSeek-like routing over 8 nodes: 4.6 copies of a token instead of 7."""
    plain = price(MOE, device="H100-80G", ep=64, dp=64)
    fewer = price(MOE, Software(deduplicated=True), device="H100-80G", ep=64, dp=64)
    assert fewer.experts < 0.75 * plain.experts


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "low_latency", "hierarchical"])
@pytest.mark.parametrize("degrees", [{"ep": 4, "dp": 4}, {"ep": 2, "etp": 2, "tp": 2, "dp": 2}])
def test_the_exchange_of_a_dispatcher_takes_the_bytes_of_its_ledger(dispatcher, degrees):
    """Inside a node, rows alone: the seconds leave out headers and weights."""
    model = load_run([], ["model.num_experts=8", "model.experts_per_token=3"], {}).config.model
    shape, world = from_model_config(model, "model"), degrees["dp"] * degrees.get("tp", 1)
    planned = PlannedLayout(
        seq_len=1024, global_batch=8, microbatch=8 // degrees["dp"], dispatcher=dispatcher,
        sequence_parallel=True, **degrees,
    )  # fmt: skip
    work = work_of(shape, planned, software_of(planned), "H100-80G")
    links, seconds = work.links, layer_transfers(work)
    ledger = predict_ledger(
        model, Plan(dispatcher=dispatcher, ranks_per_node=world, **degrees), rank=0, seq_len=1024,
        global_batch=8, dtype="bfloat16",
    )  # fmt: skip
    rows = [
        entry
        for entry in ledger.entries()
        if entry.phase == "forward" and entry.caller in ("moe.dispatch", "moe.combine")
    ]
    one_way = sum(entry.wire_bytes for entry in rows) / 2 / model.num_moe_layers
    taken = (seconds.exchange - 2 * links.latency + seconds.expert_tensor / 2) * links.intra
    assert taken == pytest.approx(one_way, rel=0.01)


@pytest.mark.parametrize("zero", [0, 1])
def test_two_pipes_pay_for_two_stages_on_every_rank(zero):
    """A rank of DualPipe reduces and updates twice the weights, and sums them with their other
    holder: with two ranks no less than copies of the whole model do."""
    sizes = {"microbatch": 1, "zero": zero, "device": "H100-80G"}
    once, twice = (price(pp=2, dp=32, schedule=name, **sizes) for name in ("zb_h1", "dualpipe"))
    whole = price(pp=1, dp=64, **sizes)
    assert twice.optimizer == pytest.approx(2 * once.optimizer, rel=0.05)
    assert twice.data > 2 * once.data * 0.97 and twice.data > whole.data * 0.97
    pairs = price(pp=2, dp=1, schedule="dualpipe", **sizes)
    assert pairs.data > 0 == price(pp=2, dp=1, schedule="zb_h1", **sizes).data


SCHEDULES = (
    "1f1b", "gpipe", "interleaved_1f1b", "terapipe", "chimera", "zb_h1", "zb_h2", "zb_v",
    "dualpipe", "dualpipe_v",
)  # fmt: skip
ASYNCHRONOUS = ("pipedream", "pipedream_2bw", "ampnet")


def pipelined(name: str, ranks: int, microbatches: int, **keys) -> PlannedLayout:
    chunks = {"stages_per_rank": 2} if name == "interleaved_1f1b" else {}
    slices = {"slices": 3} if name == "terapipe" else {}
    sizes = {"seq_len": 2048, "global_batch": microbatches, "pp": ranks}
    return PlannedLayout(schedule=name, **(sizes | chunks | slices | keys))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bubble_is_the_simulators(name, ranks):
    """Every schedule, m = 1 ... 4p, stages as they are cut (uneven, with a head), messages."""
    for microbatches in range(1, 4 * ranks + 1):
        layout = pipelined(name, ranks, microbatches)
        stages = Stages.of(MOE, layout)
        try:
            schedule = build(
                name, ranks, microbatches, stages_per_rank=layout.stages_per_rank,
                num_slices=layout.slices or None,
            )  # fmt: skip
        except ScheduleConditionError:
            continue
        seen = []

        def remember(*arguments, seen=seen):
            seen.append(arguments[1:])
            return duration(*arguments)

        with mock.patch("moemesh.planner.timing.step_time.duration", remember):
            times = simulated(MOE, layout)
        forward, inputs, weights, message = seen[0]
        assert len(set(forward)) > 1 and message > 0
        costs = Costs(
            forward=forward, input_gradient=inputs, weight_gradient=weights, message=message
        )
        truth = simulate(schedule, costs, transport="blocking")
        pipeline = times.total - times.data - times.optimizer - 1e-3 * Constants().step_overhead_ms
        assert pipeline == pytest.approx(truth.makespan, rel=1e-9)
        sent = message * stages.step.share * layout.microbatches * stages.step.slices
        own = [busy + sent * stages.step.messages_of(rank) for rank, busy in enumerate(truth.busy)]
        assert times.bubble == pytest.approx(truth.makespan - max(own), rel=1e-6, abs=1e-9)
        assert step_seconds(work_of(MOE, layout)) <= times.total * (1 + 1e-9)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_streams_do_not_wait(name):
    times = simulated(MOE, pipelined(name, 4, 4))
    assert times.bubble == 0
    assert times.total < simulated(MOE, pipelined("1f1b", 4, 4)).total


def test_rounding_is_no_bubble():
    """One rank never waits, for any order of the sum of its time."""
    for microbatch, batch in ((1, 64), (2, 96), (4, 96), (1, 100), (3, 66)):
        times = price(dp=2, microbatch=microbatch, global_batch=batch)
        assert times.bubble == 0
        assert sum(
            getattr(times, item.name) for item in fields(times) if item.name != "total"
        ) == pytest.approx(times.total, rel=1e-12)


def test_a_cut_by_weight_of_a_published_run():
    """LLaMA-30B with a vocabulary of 128k over 16 stages: the table weighs 1.6 layers."""
    shape = DENSE.changed(num_layers=60, hidden_size=6656, intermediate_size=17920, num_heads=52,
                    num_kv_heads=52, vocab_size=128_000)  # fmt: skip
    assert cut_by_weight(shape, 16) == (2, *[4] * 14, 2)
    for stages in (1, 2, 3, 7, 16):
        cut = cut_by_weight(shape, stages)
        assert len(cut) == stages and sum(cut) == 60


@pytest.mark.parametrize("name", preset_names())
def test_the_default_cut_is_that_of_a_run(name):
    model = load_model(name)
    if model.config is None:
        return
    for stages in range(1, min(model.config.num_layers, 12) + 1):
        cut = tuple(len(layers) for layers in cut_layers(model.config, stages))
        assert default_cut(model.shape, stages) == cut


layouts = st.builds(
    dict,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    microbatch=st.sampled_from([1, 2, 4]),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from([frozenset(), frozenset({"full"})]),
    sequence_parallel=st.booleans(),
    seq_len=st.sampled_from([512, 4096, 32768]),
)


@settings(max_examples=150)
@given(
    values=layouts,
    moe=st.booleans(),
    precision=st.sampled_from(["bfloat16", "float8"]),
    adapters=st.booleans(),
    capacity=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_compute_floor_is_a_lower_bound(values, moe, precision, adapters, capacity):
    world = 64
    dp = world // (values["tp"] * values["pp"] * values["cp"])
    if dp < 1:
        return
    shape = MOE if moe else DENSE
    layout = PlannedLayout(dp=dp, global_batch=256 * dp, precision=precision, **values)
    layout = layout.changed(adapters=adapters, capacity_factor=capacity)
    work = work_of(shape, layout, device="H100-80G")
    assert float(compute_floor(work)) <= float(step_seconds(work))


@pytest.mark.parametrize("mixer", [0.05, 1.0, 3.0])
def test_compute_floor_of_counted_mixers(mixer):
    """Whose products may cost less than those of attention."""
    layout = PlannedLayout(dp=8, microbatch=2, seq_len=4096, global_batch=256)
    work = work_of(DENSE.changed(intermediate_size=512), layout, device="H100-80G")
    work = replace(work, model=replace(work.model, mixer_factor=mixer))
    floor, seconds = float(compute_floor(work)), float(step_seconds(work))
    assert floor <= seconds < 5 * floor


def test_columns_give_what_single_rows_give():
    cases = [
        (shape, PlannedLayout(tp=tp, pp=pp, dp=64 // tp // pp, seq_len=2048, global_batch=512))
        for shape, tp, pp in itertools.product((DENSE, MOE), (1, 4), (1, 4, 8))
    ]
    software = [Software(native_kernel=index % 2 == 1) for index in range(len(cases))]
    device = ACCELERATORS["H100-80G"]
    rows = zip(cases, software, strict=True)
    columns = PricedStep(
        stacked([model_row(shape) for shape, _ in cases]),
        stacked([layout_row(shape, layout, traits) for (shape, layout), traits in rows]),
        stacked([hardware_row(device, layout.precision) for _, layout in cases]),
        Constants(),
    )
    together = step_time(columns, [Stages.of(*case) for case in cases])
    bounds = step_seconds(columns)
    for index, ((shape, layout), traits) in enumerate(zip(cases, software, strict=True)):
        alone = simulated(shape, layout, traits, "H100-80G")
        assert together.row(index) == pytest.approx(alone.row(0), rel=1e-12)
        bound = step_seconds(work_of(shape, layout, traits, "H100-80G"))
        assert bounds[index] == pytest.approx(bound, rel=1e-12)


def test_overlap_is_never_free_and_never_slower_than_a_sum():
    compute, transfer = np.array([1.0, 2.0, 5.0]), np.array([2.0, 2.0, 1.0])
    seconds = overlapped(compute, transfer, 0.2)
    assert (seconds > np.maximum(compute, transfer)).all()
    assert (seconds < compute + transfer).all()
    assert overlapped(3.0, 2.0, 0.0) == 3.0


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_cluster_preset_prices_a_step(name):
    known = pricing(load_cluster(name))
    for tp in (1, 2, 8):
        layout = PlannedLayout(tp=tp, dp=8 // tp, seq_len=2048, global_batch=64)
        assert known.seconds(DENSE, layout)["total"] > 0


def test_constants_of_a_cluster_file_win():
    cluster = load_cluster("dgx_h100")
    layout = PlannedLayout(dp=8, seq_len=2048, global_batch=64)
    usual = pricing(cluster).seconds(DENSE, layout)["total"]
    slow = cluster.model_copy(update={"constants": {"gemm_efficiency": 0.2}})
    assert pricing(slow).seconds(DENSE, layout)["total"] > 2 * usual
    wrong = cluster.model_copy(update={"constants": {"speed": 0.2}})
    with pytest.raises(UserError, match="speed"):
        pricing(wrong)


# Roofline of products and attention cores.


def test_large_product_approaches_best_efficiency():
    work, size = priced(), 2**20
    best = 2 * size**3 / (312e12 * work.constants.gemm_efficiency)
    assert best < product_seconds(work, size, size, size) < best * 1.001


def test_flash_skips_the_upper_triangle_and_windows_cap():
    work, written = priced(), priced(attention_kernel="eager")
    assert (attended(work), attended(written)) == (1024, 2048)
    assert core_seconds(written) > 2 * core_seconds(work)
    assert attended(priced(DENSE.changed(windows=(128,) * 40))) == 128
    every_second = priced(DENSE.changed(windows=(128, 0) * 20))
    assert attended(every_second) == pytest.approx((128 + 1024) / 2)
