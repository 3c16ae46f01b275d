"""Expert loads of a run: alarms, the log in bins of steps, rows above the bound."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from unittest import mock

import pytest

from moemesh.balance.load_files import load_table
from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.report.explain import explain
from moemesh.trace.loads import LayerLoads, collapse_text, read_loads
from moemesh.trace.run import Run
from moemesh.train.records import expert_loads
from moemesh.train.records import rows as row_log
from moemesh.train.records.expert_loads import LoadAlarms, LoadLog, RowBounds
from moemesh.train.records.rows import RowLog, cut_after
from tests.parity.training import build, gradients
from tests.ranks import mesh_on_ranks
from tests.trace.test_load_bins import step_loads
from tests.train.runs import arguments, rows_of, said
from tests.train.test_numerical_faults import MODEL, SHAPE

DYING = [[5, 5, 5, 5]] * 2 + [[5, 0, 5, 5]] * 2
SKEWED = [97, 1, 1, 1]


@pytest.mark.parametrize(
    ("steps", "dropped", "alarm"),
    [
        (DYING, 0, ""),
        ([*DYING, [5, 0, 9, 5], [5, 0, 0, 5]], 0,
         "step 5, layer 3: 1 expert (1) received no token for 3 steps"),
        # A token in between resets the count; different experts, each for less than three steps.
        ([*DYING, [5, 1, 5, 5], [5, 0, 5, 5], [5, 0, 5, 5]], 0, ""),
        ([[0, 5, 5], [5, 0, 5], [5, 5, 0], [0, 5, 5]], 0, ""),
        ([[5, 5, 5, 5], SKEWED, SKEWED, [5, 5, 5, 5], SKEWED, SKEWED], 0, ""),
        ([SKEWED] * 5, 0, "step 3, layer 3: routing collapses: entropy of the loads 0.121, below "
         "0.5 for 3 steps; expert 0 holds 97%"),
        ([[20, 20]] * 5, 4, ""),
        ([[20, 20]] * 5, 10, "step 3, layer 3: 20.0% of the choices found their expert full (10 in "
         "this step), above 10% for 3 steps"),
        ([[0, 0, 0]] * 9, 0, ""),
    ],
)  # fmt: skip
def test_an_alarm_rings_once(steps: list[list[int]], dropped: int, alarm: str) -> None:
    """After three steps in a row; "": none."""
    lines: list[str] = []
    alarms = LoadAlarms(lambda text, kind: lines.append(text))
    with mock.patch.multiple(expert_loads, COLLAPSE_STEPS=3, COLLAPSE_ENTROPY=0.5):
        for step, experts in enumerate(map(tuple, steps), start=1):
            alarms.check(LayerLoads(step=step, layer=3, tokens_per_expert=experts, dropped=dropped))
    assert lines == [f"alarm: {alarm}"] * bool(alarm)


def test_a_collapse_of_the_last_steps_is_one_sentence() -> None:
    def loads(layer: int, experts: list[int], steps: range) -> list[LayerLoads]:
        return [LayerLoads(step=s, layer=layer, tokens_per_expert=tuple(experts)) for s in steps]

    collapsed = loads(1, [400, 30, 560, 5, 5, 0], range(1, 21))
    text = collapse_text(collapsed)
    assert text.startswith("The router has collapsed in layer 1: 96% of its choices go to 2 of 6 ")
    assert "raise model.aux_loss_coefficient, or set model.router_selection_bias = true" in text
    worse = loads(4, [0, 99, 0, 0, 0, 1], range(1, 21))
    assert "2 routers have collapsed, the worst in layer 4: 99%" in collapse_text(collapsed + worse)
    # Too short a time, a step that is better, loads that were summed.
    assert not collapse_text(collapsed[1:])
    assert not collapse_text([*collapsed, *loads(1, [9, 9, 9, 9, 9, 9], range(21, 22))])
    assert collapse_text([reduce(LayerLoads.plus, collapsed)])
    assert not collapse_text(loads(1, [0, 0], range(1, 30))) and not collapse_text([])


@pytest.mark.slow
def test_the_end_of_a_run_tells_a_collapse(tmp_path: Path) -> None:
    keys = {"model__aux_loss_coefficient": 0.0, "model__experts_per_token": 1, "train__lr": 0.3}
    printed = said(*arguments(tmp_path / "run", train__steps=26, **keys))
    note = printed.splitlines()[-1]
    assert note.startswith("note: The router has collapsed in layer 1: "), printed
    explanation = explain(Run.load(tmp_path / "run"))
    assert note.removeprefix("note: ") in explanation.text
    assert explanation.command.endswith("-model-aux_loss_coefficient-0-01")


def test_layers_ring_by_themselves() -> None:
    lines: list[str] = []
    alarms = LoadAlarms(lambda text, kind: lines.append(text))
    for step in range(1, 25):
        for layer in (1, 2):
            alarms.check(LayerLoads(step=step, layer=layer, tokens_per_expert=(7, 0, 7, 7)))
    assert [line.split(":")[1] for line in lines] == [" step 20, layer 1", " step 20, layer 2"]


def test_a_run_rings_warns_and_writes_the_numbers(tmp_path: Path) -> None:
    """Every expert takes a quarter of its share: more than 10 % of the choices are dropped."""
    out = tmp_path / "run"
    keys = {
        "model__capacity_factor": 0.25,
        "model__aux_loss_scope": "microbatch",
        "model__router_jitter": 0.1,
        "train__steps": 21,
    }
    printed = said(*arguments(out, **keys))
    alarms = [line for line in printed.splitlines() if line.startswith("alarm: ")]
    assert len(alarms) == 1 and "step 20, layer 1:" in alarms[0], printed
    assert printed.count('warning: with aux_loss_scope = "microbatch"') == 1
    rows = rows_of(out / "loads.jsonl")
    assert len(rows) == 21
    for row in rows:
        tokens = row["tokens_per_expert"]
        assert sum(tokens) + row["dropped"] == 6 * 16 * 2
        assert max(tokens) <= 6  # six sequences, ceil(16 * 2 * 0.25 / 8) = 1 token of each
        assert row["max_over_mean"] == max(tokens) * 8 / sum(tokens)
        assert row["dead_experts"] == tokens.count(0) and 0 <= row["entropy"] <= 1


def write(
    folder: Path, steps: range, bins: int, *, save_every: int = 0, saved: set[int] | None = None
) -> LoadLog:
    checkpoints = set[int]() if saved is None else saved
    log = LoadLog(RowLog(folder / "loads.jsonl"), bins, lambda: checkpoints)
    log.resume()
    for step in steps:
        log.add([step_loads(step, layer) for layer in (1, 2)])
        if save_every and step % save_every == 0:
            log.flush()
            checkpoints.add(step)
    log.flush()
    return log


def read(folder: Path) -> list[LayerLoads]:
    with (folder / "loads.jsonl").open() as file:
        return [loads for loads in read_loads(file) if loads.layer == 1]


def expected(num_steps: int) -> list[list[int]]:
    every = range(1, num_steps + 1)
    return [
        [sum(step_loads(s, layer).tokens_per_expert[expert] for s in every) for expert in range(4)]
        for layer in (1, 2)
    ]


@pytest.mark.representative("5-0", "16-7", "300-100", "3000-7")
@pytest.mark.parametrize("save_every", [0, 7, 100])
@pytest.mark.parametrize("num_steps", [5, 16, 300, 3000])
def test_any_number_of_steps_is_few_rows_with_exact_sums(
    tmp_path: Path, num_steps: int, save_every: int
) -> None:
    saved: set[int] = set()
    write(tmp_path, range(1, num_steps + 1), bins=8, save_every=save_every, saved=saved)
    rows = read(tmp_path)
    assert min(num_steps, 8) <= len(rows) <= 16 + min(len(saved), 8)
    assert [one.first_step for one in rows] == [1, *(one.step + 1 for one in rows[:-1])]
    assert rows[-1].step == num_steps
    assert load_table(tmp_path).tolist() == expected(num_steps)


def test_bins_of_all_steps_are_about_equally_wide(tmp_path: Path) -> None:
    saved: set[int] = set()
    log = LoadLog(RowLog(tmp_path / "loads.jsonl"), 16, lambda: set(sorted(saved)[-2:]))
    for step in range(1, 4001):
        log.add([step_loads(step)])
        if step % 7 == 0:  # a checkpoint: its bin ends early
            log.flush()
            saved.add(step)
    log.flush()
    with (tmp_path / "loads.jsonl").open() as file:
        widths = [loads.steps for loads in read_loads(file)]
    assert len(widths) <= 2 * 16 + 2 and sum(widths) == 4000
    assert max(widths) <= 4 * 4000 / 16


def test_without_bins_every_step_is_a_row(tmp_path: Path) -> None:
    write(tmp_path, range(1, 101), bins=0)
    assert [one.step for one in read(tmp_path)] == list(range(1, 101))


def test_a_run_goes_on_from_any_checkpoint_with_exact_sums(tmp_path: Path) -> None:
    saved: set[int] = set()
    for end, back in ((250, 240), (700, 690), (1000, 980)):
        first = max((one.step for one in read(tmp_path)), default=0) + 1 if saved else 1
        write(tmp_path, range(first, end + 1), bins=8, save_every=10, saved=saved)
        saved = {step for step in saved if end - 30 <= step <= end}  # the others were removed
        cut = cut_after(tmp_path / "loads.jsonl", back)
        assert not cut.lost, cut
        saved = {step for step in saved if step <= back}
        assert load_table(tmp_path).tolist() == expected(back)
        assert len(read(tmp_path)) <= 16 + 100


def test_a_full_disk_loses_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write(tmp_path, range(1, 4), bins=8)

    def refuse(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_log.os, "write", refuse)
        for step in range(4, 10):
            log.add([step_loads(step, layer) for layer in (1, 2)])
    log.add([step_loads(10, layer) for layer in (1, 2)])
    assert [(one.step, one.steps) for one in read(tmp_path)] == [(1, 1), (2, 1), (3, 1), (10, 7)]
    assert load_table(tmp_path).tolist() == expected(10)


def test_damaged_rows_are_left_out_when_bins_are_summed(tmp_path: Path) -> None:
    write(tmp_path, range(1, 10), bins=8)
    file = tmp_path / "loads.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:4], '{"step": 3, "lay\n', *lines[4:]]))
    write(tmp_path, range(10, 40), bins=8)
    assert load_table(tmp_path).tolist() == expected(39)


PLAN = Plan(dp=4, ep=4)


def adversarial_on_rank(mesh: Mesh) -> tuple[list[tuple[str, str]], list[str]]:
    config = ModelConfig(
        **MODEL | {"router_selection_bias": True, "experts_per_token": 1, "num_layers": 2}
    )
    parallel = build(mesh, config, PLAN, SHAPE, "float32", seed=1)
    kept: list[tuple[str, str]] = []
    logged: list[str] = []
    bounds = RowBounds(
        parallel, 1, -100, keep=lambda text, kind: kept.append((text, kind)), log=logged.append
    )
    for step in (1, 2, 3):
        if step == 2:
            for moe in parallel.model.moe_layers().values():
                assert moe.router.selection_bias is not None
                moe.router.selection_bias[2] = 100.0
        gradients(parallel, PLAN, SHAPE, step)
        if step == 3:
            bounds.report(step)
    bounds.report(4)
    assert not logged, "two forwards of a hundred are too few to report"
    for step in (5, 6):
        for moe in parallel.model.moe_layers().values():
            moe.experts.num_bounded = int(mesh.rank == 2)
        bounds.report(step)
    return kept, logged


def test_the_rank_with_all_rows_is_named() -> None:
    for kept, logged in mesh_on_ranks(PLAN.layout, adversarial_on_rank):
        text, kind = kept[0]
        bound = 2 * PLAN.tokens_per_rank(SHAPE.seq_len, SHAPE.global_batch)
        assert kind == "rows" and text.startswith(
            f"step 3: more than {bound} rows were sent to rank 2 in 2 forwards of layers 1 since"
        )
        assert len(kept) == 3 and len(logged) == 1 and "100% of its forwards" in logged[0]
