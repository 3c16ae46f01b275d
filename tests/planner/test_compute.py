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


def test_weights_of_a_gpt_block_are_the_exact_matrices():
    work = workload(gpt(4, 1024, 16), tp=2, dp=4)
    assert compute.attention_block(work).weights == 4 * 1024**2 / 2
    assert compute.mlp_block(work).weights == 8 * 1024**2 / 2
