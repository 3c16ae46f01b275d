"""Alarms on loads: after enough steps in a row, once per layer, with the numbers."""

import json
from functools import reduce
from pathlib import Path

from moemesh.report.explain import explain
from moemesh.trace.loads import LayerLoads, collapse_text
from moemesh.trace.run import Run
from moemesh.train.records.expert_loads import AlarmLimits, LoadAlarms
from tests.train.runs import arguments, moemesh


def run(
    steps: list[list[int]], dropped: int = 0, layer: int = 3, told: list[str] | None = None
) -> list[str]:
    told = [] if told is None else told
    alarms = LoadAlarms(
        lambda text, kind: told.append(text), AlarmLimits(num_steps=3, entropy=0.5, dropped=0.1)
    )
    for step, experts in enumerate(steps, start=1):
        alarms.look(
            LayerLoads(step=step, layer=layer, tokens_per_expert=tuple(experts), dropped=dropped)
        )
    return told


def test_dead_experts() -> None:
    dying = [[5, 5, 5, 5]] * 2 + [[5, 0, 5, 5]] * 2
    assert run(dying) == []
    (line,) = run([*dying, [5, 0, 9, 5], [5, 0, 0, 5]])
    assert line == "alarm: step 5, layer 3: 1 expert (1) received no token for 3 steps"
    # A token in between starts the count again.
    assert run([*dying, [5, 1, 5, 5], [5, 0, 5, 5], [5, 0, 5, 5]]) == []
    # Different experts, each for less than three steps.
    assert run([[0, 5, 5], [5, 0, 5], [5, 5, 0], [0, 5, 5]]) == []


def test_collapse() -> None:
    assert run([[5, 5, 5, 5], *[[97, 1, 1, 1]] * 2, [5, 5, 5, 5], *[[97, 1, 1, 1]] * 2]) == []
    (line,) = run([[97, 1, 1, 1]] * 5)
    assert "step 3, layer 3: routing collapses: entropy of the loads 0.1" in line
    assert "below 0.5 for 3 steps; expert 0 holds 97%" in line


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


def test_the_end_of_a_run_tells_a_collapse(tmp_path: Path) -> None:
    keys = {"model__aux_loss_coefficient": 0.0, "model__experts_per_token": 1, "train__lr": 0.3}
    done = moemesh(*arguments(tmp_path / "run", train__steps=26, **keys))
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()[-1]
    assert told.startswith("note: The router has collapsed in layer 1: "), done.stdout
    found = explain(Run.load(tmp_path / "run"))
    assert told.removeprefix("note: ") in found.text
    assert found.command.endswith("-model-aux_loss_coefficient-0-01")


def test_drops() -> None:
    assert run([[20, 20]] * 5, dropped=4) == []
    (line,) = run([[20, 20]] * 5, dropped=10)
    assert "step 3, layer 3: 20.0% of the choices found their expert full (10 in" in line


def test_layers_ring_by_themselves_and_empty_steps_do_not() -> None:
    told: list[str] = []
    alarms = LoadAlarms(lambda text, kind: told.append(text), AlarmLimits(num_steps=2))
    for step in range(1, 6):
        for layer in (1, 2):
            alarms.look(LayerLoads(step=step, layer=layer, tokens_per_expert=(7, 0, 7, 7)))
    assert [line.split(":")[1] for line in told] == [" step 2, layer 1", " step 2, layer 2"]
    assert run([[0, 0, 0]] * 9) == []


def test_a_run_rings_warns_and_writes_the_numbers(tmp_path: Path) -> None:
    """Every expert takes a quarter of its share: more than 10 % of the choices are dropped."""
    out = tmp_path / "run"
    keys = {
        "model__capacity_factor": 0.25,
        "model__aux_loss_scope": "microbatch",
        "model__router_jitter": 0.1,
        "train__steps": 21,
        "plan__tp": 2,
        "plan__ep": 2,
    }
    done = moemesh(*arguments(out, **keys))
    assert done.returncode == 0, done.stderr
    alarms = [line for line in done.stdout.splitlines() if line.startswith("alarm: ")]
    assert len(alarms) == 1 and "step 20, layer 1:" in alarms[0], done.stdout
    assert done.stdout.count('warning: with aux_loss_scope = "microbatch"') == 1
    rows = [json.loads(line) for line in (out / "loads.jsonl").read_text().splitlines()]
    assert len(rows) == 21
    for row in rows:
        tokens = row["tokens_per_expert"]
        assert sum(tokens) + row["dropped"] == 6 * 16 * 2
        assert max(tokens) <= 6  # six sequences, ceil(16 * 2 * 0.25 / 8) = 1 token of each
        assert row["max_over_mean"] == max(tokens) * 8 / sum(tokens)
        assert row["dead_experts"] == tokens.count(0) and 0 <= row["entropy"] <= 1
