"""The step: pipeline closed forms, balanced stages, lower bounds, columns against rows."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moemesh.config.cluster import load_cluster
from moemesh.config.errors import UserError
from moemesh.config.sources import preset_names
from moemesh.planner.accuracy.predict import price_layouts
from moemesh.planner.layout import PlannedLayout
from moemesh.planner.peak_memory import balanced_stages
from moemesh.planner.shapes.architectures import from_arch_entry
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.timing.columns import (
    Software,
    fill_share,
    hardware_columns,
    hardware_row,
    layout_columns,
    layout_row,
    model_columns,
    model_row,
)
from moemesh.planner.timing.constants import Constants
from moemesh.planner.timing.hardware import ACCELERATORS
from moemesh.planner.timing.layer_time import longer
from moemesh.planner.timing.overlap import overlapped
from moemesh.planner.timing.step_time import StepTime, balanced_layers, compute_floor, step_time
from tests.planner.published_rows import ARCHS

DENSE = from_arch_entry("llama-13B", ARCHS["llama-13B"])
MOE = from_arch_entry("moe-30B", ARCHS["moe-30B"])


def price(
    shape: ModelShape = DENSE,
    software: Software | None = None,
    constants: Constants | None = None,
    device: str = "A100-80G",
    **layout,
) -> StepTime:
    planned = PlannedLayout(**{"seq_len": 2048, "global_batch": 256} | layout)
    return step_time(
        model_row(shape),
        layout_row(planned, software or Software()),
        hardware_row(ACCELERATORS[device]),
        constants or Constants(),
    )


def test_parts_add_up_to_the_step():
    for found in (price(tp=4, pp=4, dp=4), price(MOE, ep=8, dp=16), price(dp=64, zero=3)):
        parts = [float(getattr(found, item.name)) for item in fields(found)]
        assert parts[0] == pytest.approx(sum(parts[1:]), rel=0.02)
        assert min(parts) >= 0


def test_more_microbatches_fill_the_pipeline_better():
    few, many = price(pp=8, dp=2, global_batch=32), price(pp=8, dp=2, global_batch=512)
    assert few.total / 32 > 1.1 * many.total / 512


def test_interleaving_divides_the_bubble():
    plain = price(pp=8, dp=1, global_batch=16)
    chunks = price(pp=8, dp=1, global_batch=16, stages_per_rank=5, schedule="interleaved_1f1b")
    assert chunks.bubble < plain.bubble / 4


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("1f1b", 1.0), ("gpipe", 1.0), ("zb_h1", 1 / 3), ("zb_v", 0.0), ("dualpipe", 2 / 7)],
)
def test_bubbles_of_schedules(schedule, share):
    """F = I = W: 1F1B waits 3(p-1), ZB1P p-1, DualPipe 2(p/2-1), of p = 8."""
    assert fill_share(schedule, 8) == pytest.approx(share)


def test_shape_of_the_group_decides_data_parallel_time():
    """The same bytes with 8, then 1 member a node."""
    dense = price(tp=1, dp=64, zero=1, global_batch=512)
    strided = price(tp=8, dp=64, zero=1, global_batch=512)
    assert strided.data > 0.9 * dense.data


def test_sequence_parallelism_shares_norms():
    with_sp = price(tp=8, dp=1)
    without = price(tp=8, dp=1, sequence_parallel=False)
    assert with_sp.elementwise < without.elementwise
    assert with_sp.tensor == without.tensor


def test_full_recompute_costs_a_forward():
    plain, again = price(dp=8), price(dp=8, recompute=frozenset({"full"}))
    assert 1.2 < again.total / plain.total < 1.35


def test_low_rank_adapters_skip_weight_gradients_and_optimizer():
    whole, adapters = price(dp=8), price(dp=8, software=Software(adapters=True))
    assert adapters.optimizer == 0
    assert 0.6 < adapters.compute / whole.compute < 0.75


def test_deduplicated_dispatch_crosses_less():
    """DeepSeek-like routing over 8 nodes: 4.6 copies of a token instead of 7."""
    plain = price(MOE, device="H100-80G", ep=64, dp=64)
    fewer = price(MOE, Software(deduplicated=True), device="H100-80G", ep=64, dp=64)
    assert fewer.experts < 0.75 * plain.experts


def test_simulated_pipeline_replaces_the_closed_form():
    shape, layout = DENSE, PlannedLayout(seq_len=2048, global_batch=64, pp=4, dp=2)
    arguments = (model_row(shape), layout_row(layout, Software()))
    device, constants = hardware_row(ACCELERATORS["A100-80G"]), Constants()
    seen = []

    def simulate(slowest, first, last, microbatches):
        seen.append((slowest, first, last, microbatches))
        return 100.0

    found = step_time(*arguments, device, constants, simulate)
    assert found.total > 100
    slowest, first, last, m = seen[0]
    assert m == 32
    assert slowest == max(first, last)


@given(
    layers=st.integers(1, 130),
    stages=st.integers(1, 16),
    share=st.floats(0, 6, allow_nan=False),
)
def test_balanced_stages_minimise_the_heaviest(layers, stages, share):
    if layers < 2 * stages or layers < 2 * share * stages:
        return
    found = balanced_stages(layers, stages, share)
    if not found:
        return
    assert sum(found) == layers
    assert len(found) == stages
    if stages > 2:
        weights = [n + (share if i in (0, stages - 1) else 0) for i, n in enumerate(found)]
        # No stage could be lighter than the mean, whole layers apart.
        assert max(weights) <= (layers + 2 * share) / stages + 2
    outer, inner = balanced_layers(layers, stages, share)
    assert float(outer) == pytest.approx(found[-1] if stages != 2 else layers / 2)
    if stages > 2:
        assert float(inner) == max(found[1:-1])


def test_balanced_stages_of_a_published_cut():
    """LLaMA-30B with a vocabulary of 128k over 16 stages: the table weighs 1.6 layers."""
    assert balanced_stages(60, 16, 1.6) == (2, *[4] * 14, 2)


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
@given(values=layouts, moe=st.booleans(), precision=st.sampled_from(["bfloat16", "float8"]))
def test_compute_floor_is_a_lower_bound(values, moe, precision):
    world = 64
    dp = world // (values["tp"] * values["pp"] * values["cp"])
    if dp < 1:
        return
    shape = MOE if moe else DENSE
    layout = PlannedLayout(dp=dp, global_batch=256 * dp, precision=precision, **values)
    arguments = (
        model_row(shape),
        layout_row(layout, Software()),
        hardware_row(ACCELERATORS["H100-80G"], int(precision == "float8")),
        Constants(),
    )
    assert float(compute_floor(*arguments)) <= float(step_time(*arguments).total)


def test_columns_give_what_single_rows_give():
    cases = [
        (shape, PlannedLayout(tp=tp, pp=pp, dp=64 // tp // pp, seq_len=2048, global_batch=512))
        for shape, tp, pp in itertools.product((DENSE, MOE), (1, 4), (1, 4, 8))
    ]
    software = [Software(balanced_stages=index % 2 == 1) for index in range(len(cases))]
    device = ACCELERATORS["H100-80G"]
    planned = [layout for _, layout in cases]
    together = step_time(
        model_columns([shape for shape, _ in cases]),
        layout_columns(planned, software),
        hardware_columns([device] * len(cases), planned),
        Constants(),
    )
    for index, ((shape, layout), traits) in enumerate(zip(cases, software, strict=True)):
        alone = step_time(
            model_row(shape), layout_row(layout, traits), hardware_row(device), Constants()
        )
        assert together.row(index) == pytest.approx(alone.row(0), rel=1e-12)


def test_overlap_is_never_free_and_never_slower_than_a_sum():
    compute, transfer = np.array([1.0, 2.0, 5.0]), np.array([2.0, 2.0, 1.0])
    found = overlapped(compute, transfer, 0.2)
    assert (found > np.maximum(compute, transfer)).all()
    assert (found < compute + transfer).all()
    assert overlapped(3.0, 2.0, 0.0) == 3.0


def test_natural_routing_costs_more_than_forced_balance():
    even = price(MOE, dp=8, ep=8)
    natural = price(MOE, Software(natural_routing=True), dp=8, ep=8)
    assert natural.compute > even.compute
    same = price(MOE, Software(natural_routing=True), replace(Constants(), routing_imbalance=1e-12))
    assert same.compute == pytest.approx(price(MOE).compute)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_cluster_preset_prices_a_step(name):
    layouts = [PlannedLayout(tp=t, dp=8 // t, seq_len=2048, global_batch=64) for t in (1, 2, 8)]
    found = price_layouts(DENSE, layouts, load_cluster(name))
    assert found.total.shape == (3,)
    assert (found.total > 0).all()


def test_constants_of_a_cluster_file_win():
    cluster = load_cluster("dgx_h100")
    layouts = [PlannedLayout(dp=8, seq_len=2048, global_batch=64)]
    usual = price_layouts(DENSE, layouts, cluster).total[0]
    slow = cluster.model_copy(update={"constants": {"gemm_efficiency": 0.2}})
    assert price_layouts(DENSE, layouts, slow).total[0] > 2 * usual
    wrong = cluster.model_copy(update={"constants": {"speed": 0.2}})
    with pytest.raises(UserError, match="speed"):
        price_layouts(DENSE, layouts, wrong)


def test_small_moe_layers_wait_for_the_host_large_ones_hide_it():
    assert longer(1.0, 0.0) == 1.0
    assert longer(3.0, 4.0) == pytest.approx(5.0)
    assert longer(10.0, 1.0) < 10.1
