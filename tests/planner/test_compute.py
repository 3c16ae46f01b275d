"""Roofline of products, attention cores, expert rows: what must be equal and what must grow."""

from __future__ import annotations

import pytest

from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import from_arch_table, gpt
from moemesh.planner.timing import compute
from moemesh.planner.timing.calibration import Constants
from moemesh.planner.timing.columns import (
    Software,
    hardware_row,
    layout_row,
    model_row,
)
from moemesh.planner.timing.hardware import ACCELERATORS
from tests.planner.published_rows import ARCHS

MOE = from_arch_table("moe-30B", ARCHS)
DENSE = from_arch_table("llama-13B", ARCHS)


def workload(shape=DENSE, software: Software | None = None, device="A100-80G", **layout):
    planned = PlannedLayout(**{"seq_len": 2048, "global_batch": 64} | layout)
    return compute.PricedStep(
        model=model_row(shape),
        layout=layout_row(shape, planned, software or Software()),
        hardware=hardware_row(ACCELERATORS[device]),
        constants=Constants(),
    )


def test_large_product_approaches_best_efficiency():
    work = workload()
    size = 2**20
    seconds = compute.product_seconds(work, size, size, size)
    best = 2 * size**3 / (312e12 * work.constants.gemm_efficiency)
    assert best < seconds < best * 1.001


@pytest.mark.parametrize("side", [0, 1, 2])
def test_product_loses_efficiency_in_each_side(side):
    work = workload()
    sides = [4096.0, 4096.0, 4096.0]
    whole = compute.product_seconds(work, *sides)
    sides[side] /= 64
    assert compute.product_seconds(work, *sides) > whole / 64 * 1.2


def test_faster_device_needs_more_rows():
    """Rows that fill an A100 leave an H100 bound by weights: its ridge point is farther right."""
    few, many = 128, 8192
    shares = []
    for device in ("A100-80G", "H100-80G"):
        work = workload(device=device)
        shares.append(
            compute.product_seconds(work, many, 4096, 4096)
            / compute.product_seconds(work, few, 4096, 4096)
            / (many / few)
        )
    assert shares[1] < shares[0] < 1


def test_flash_skips_the_upper_triangle_and_windows_cap():
    work = workload()
    assert compute.attended(work) == 1024
    written = workload(software=Software(kernel="eager"))
    assert compute.attended(written) == 2048
    assert compute.core_seconds(written) > 2 * compute.core_seconds(work)
    windowed = workload(DENSE.changed(windows=(128,) * 40))
    assert compute.attended(windowed) == 128
    every_second = workload(DENSE.changed(windows=(128, 0) * 20))
    assert compute.attended(every_second) == pytest.approx((128 + 1024) / 2)


def test_expert_parallelism_does_not_divide_rows_but_weights():
    one, eight = workload(MOE, ep=1, dp=8), workload(MOE, ep=8, dp=8)
    assert one.routed_rows == eight.routed_rows == 2048 * 8
    weights = [compute.expert_block(work).expert_weights for work in (one, eight)]
    assert weights[0] == 8 * weights[1] == 3 * 128 * 2048 * 768


def test_experts_with_few_rows_cost_more_per_row():
    """128 local experts with 128 rows each are slower than 16 with 1024: same operations."""
    alone = compute.expert_block(workload(MOE, ep=1, dp=8)).products
    spread = compute.expert_block(workload(MOE, ep=8, dp=8)).products
    assert alone > 1.2 * spread


def test_expert_tensor_parallelism_keeps_operations():
    """Rows times x, width over x."""
    plain = compute.expert_block(workload(MOE, dp=8, ep=2))
    cut = compute.expert_block(workload(MOE, dp=8, ep=2, etp=4))
    assert cut.expert_weights * 4 == plain.expert_weights
    assert cut.products == pytest.approx(plain.products, rel=0.25)


def test_weights_of_a_gpt_block_are_the_exact_matrices():
    work = workload(gpt(4, 1024, 16), tp=2, dp=4)
    assert compute.attention_block(work).weights == 4 * 1024**2 / 2
    assert compute.mlp_block(work).weights == 8 * 1024**2 / 2
