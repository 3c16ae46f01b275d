"""Peak of the allocator: published measurements, and what each habit of a framework costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moemesh.config.devices import GIB
from moemesh.planner import memory as module
from moemesh.planner.memory import (
    Allocation,
    estimate_memory,
    needed_bytes,
    peak_memory,
    rank_memory,
)
from moemesh.planner.parameters import count_parameters
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import from_arch_table, gpt, load_model
from moemesh.planner.stage_cut import with_values
from tests.planner.published_rows import ARCHS

LLAMA = from_arch_table("llama3-70b#L12", ARCHS)


def layout(**values) -> PlannedLayout:
    return PlannedLayout(
        **{"seq_len": 4096, "global_batch": 16, "zero": 1, "loss": "fused"} | values
    )


@pytest.mark.parametrize(
    ("degrees", "gib"),
    [
        ({"pp": 2, "dp": 4, "layers_per_stage": (6, 6)}, 66.55),
        ({"tp": 2, "dp": 4}, 60.68),
        ({"tp": 4, "dp": 2}, 39.07),
        ({"tp": 8, "dp": 1}, 28.29),
        ({"tp": 2, "cp": 4, "seq_len": 32768, "context": "all_to_all"}, 68.43),
        ({"cp": 8, "seq_len": 32768, "context": "all_to_all"}, 104.51),
        ({"tp": 2, "cp": 4, "seq_len": 131072, "context": "all_to_all"}, 112.67),
        ({"cp": 8, "seq_len": 131072, "context": "all_to_all"}, 147.99),
    ],
)
def test_measured_bytes_of_a_truncated_llama(degrees, gib):
    """max_memory_allocated on 8 B200 (SimuMax release notes), Megatron with fused kernels."""
    peak = peak_memory(LLAMA, layout(**degrees), Allocation())
    assert peak.allocated / GIB == pytest.approx(gib, rel=0.01)


def test_states_are_the_exact_ones():
    planned = layout(tp=2, dp=4)
    assert peak_memory(LLAMA, planned, Allocation()).states == rank_memory(LLAMA, planned, 0).states


def test_every_habit_costs():
    planned = layout(tp=2, pp=2, dp=2, attention_kernel="eager", fused_norm=False)
    plain = peak_memory(LLAMA, planned, Allocation()).needed
    for name, value in (
        ("gradient_bytes", 8),
        ("activation_scale", 1.1),
        ("extra_in_flight", 1.0),
        ("working_layers", 1.0),
        ("gathered_norms", 1.0),
        ("unfused_norm_bytes", 8.0),
        ("eager_score_bytes", 8.0),
        ("eager_score_work", 4.0),
        ("workspace_bytes", 4 * GIB),
    ):
        assert peak_memory(LLAMA, planned, replace(Allocation(), **{name: value})).needed > plain
    head = layout(tp=2, dp=4)
    plain = peak_memory(LLAMA, head, Allocation()).needed
    for name in ("logit_bytes", "gathered_logit_bytes", "head_gradient_bytes"):
        more = replace(Allocation(), **{name: 20.0})
        assert peak_memory(LLAMA, head, more).needed > plain


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("attention", "eager_score_bytes"),
        ("operators", "eager_score_bytes"),
        ("norm", "gathered_norms"),
        ("norm", "unfused_norm_bytes"),
        ("operators", "gathered_norms"),
    ],
)
def test_recomputed_tensors_have_no_overhead(part, name):
    planned = layout(tp=2, dp=4, attention_kernel="eager", fused_norm=False)
    habit = replace(Allocation(), **{name: 40.0})
    for parts, more in (({part}, 0), (set(), 1)):
        changed = planned.changed(recompute=frozenset(parts))
        plain, costly = (peak_memory(LLAMA, changed, one) for one in (Allocation(), habit))
        assert (costly.activations > plain.activations) == more


def test_first_stage_holds_most_microbatches_the_last_the_logits():
    even = layout(pp=4, dp=2, microbatch=1, layers_per_stage=(3, 3, 3, 3))
    assert peak_memory(LLAMA, even, Allocation()).rank == 0
    loss = replace(Allocation(), logit_bytes=60.0)
    assert peak_memory(LLAMA, even, loss).rank == 3


def test_fits_counts_what_no_allocator_sees():
    peak = peak_memory(LLAMA, layout(tp=8), Allocation(workspace_bytes=3.0 * GIB))
    assert peak.needed == peak.allocated + 3 * GIB
    assert peak.fits(peak.needed)
    assert not peak.fits(peak.needed, usable_share=0.99)


def test_what_is_needed_is_never_less_than_what_a_step_must_hold():
    shape, planned = load_model("deepseek-v3").shape, PlannedLayout(
        pp=16, dp=32, ep=32, schedule="dualpipe", zero=1, seq_len=4096, global_batch=15360,
        recompute=frozenset({"attention", "activation"}),
    )  # fmt: skip
    exact = estimate_memory(shape, planned).worst
    assert peak_memory(shape, planned, Allocation()).needed >= exact.total
    small = load_model("qwen3-30b-a3b").shape
    planned = PlannedLayout(
        dp=2, tp=4, ep=8, microbatch=8, seq_len=4096, global_batch=256,
        recompute=frozenset({"full"}),
    )  # fmt: skip
    assert peak_memory(small, planned, Allocation()).needed >= rank_memory(small, planned, 0).total


def test_the_worst_rank_is_the_worst_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are skipped if another rank holds at least the same amount of everything."""
    cases = [("deepseek-v3", name, 8, 24) for name in ("1f1b", "zb_h2", "zb_v", "dualpipe")]
    cases += [("llama3-8b", name, 4, 3) for name in ("zb_h1", "zb_h2", "zb_v", "pipedream")]
    cases += [("qwen3-30b-a3b", "interleaved_1f1b", 4, 8)]
    for model, name, ranks, batch in cases:
        shape = load_model(model).shape
        planned = PlannedLayout(
            pp=ranks, schedule=name, seq_len=256, global_batch=batch,
            stages_per_rank=3 if name.startswith("inter") else 1,
        )  # fmt: skip
        needed = peak_memory(shape, planned, Allocation()).needed
        with monkeypatch.context() as patch:
            patch.setattr(module, "worst_ranks", lambda *_, every=range(ranks): every)
            assert peak_memory(shape, planned, Allocation()).needed == needed


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_server_holds_its_share_of_the_optimizer(servers: int) -> None:
    layout = PlannedLayout(dp=4, seq_len=512, global_batch=4)
    server = layout.changed(parameter_server=True, servers=servers)
    saved = peak_memory(LLAMA, layout, Allocation()).states
    saved -= peak_memory(LLAMA, server, Allocation()).states
    weights = count_parameters(LLAMA).total
    assert saved == pytest.approx(12 * weights * (1 - 1 / servers), rel=1e-12)


def test_a_rank_may_have_more_chunks_than_numpy_takes_arrays() -> None:
    shape = gpt(140, 64, 4)
    one = layout(pp=2, stages_per_rank=70, schedule="interleaved_1f1b")
    both = with_values(one, microbatch=np.array([1, 2]))
    (columns,) = needed_bytes(shape, [both], Allocation())
    each = [peak_memory(shape, one.changed(microbatch=n), Allocation()).needed for n in (1, 2)]
    assert columns.tolist() == each
