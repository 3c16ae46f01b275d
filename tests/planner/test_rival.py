"""Why not X: layouts that are illegal, too large or slower, with numbers to check by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cache

import pytest

from moemesh.cli.plan_text import plan_text, step_parts
from moemesh.cli.terminal import WIDTH, folded
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import ConfigError
from moemesh.config.model import ModelConfig
from moemesh.planner.layout_sources import read_plan
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search import command
from moemesh.planner.search.command import PlannedAnswer, plan_named, to_json
from moemesh.planner.search.rival import Rival, why_not
from moemesh.planner.search.search import SearchSpace
from moemesh.planner.search.space import Space
from moemesh.planner.shapes.load_shape import load_model


@cache
def searched() -> tuple[SearchSpace, PlannedAnswer]:
    machine = load_cluster("dgx_h100")
    space = Space(num_devices=8, node_size=8, seq_len=4096, global_batch=64)
    search = SearchSpace(load_model("deepseek-v2-lite").shape, machine, space)
    return search, plan_named(PlanRequest("deepseek-v2-lite", machine, 4096, 64, top=30))


def judged(text: str) -> Rival:
    search, planned = searched()
    return why_not(search, planned.model, planned.candidates[0], text)


def test_the_best_layout_is_the_one_that_was_chosen() -> None:
    _, planned = searched()
    assert judged(planned.candidates[0].layout.text).verdict == "chosen"


def test_the_parts_of_what_is_slower_add_up_to_the_difference() -> None:
    _, planned = searched()
    rival = judged("tp=8")
    assert rival.verdict == "slower"
    assert rival.candidate is not None
    assert rival.slower == pytest.approx(rival.candidate.seconds - planned.candidates[0].seconds)
    assert sum(more for _, more in rival.parts) == pytest.approx(rival.slower)
    assert rival.parts[0][0] == "tensor"


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    search, _ = searched()
    rival = judged("dp=8,pp=1,tp=1,cp=1,ep=1,etp=1,data=replicate,recompute=full")
    assert rival.verdict == "does not fit"
    assert rival.candidate is not None and rival.nearest is not None
    assert rival.short == pytest.approx(rival.candidate.memory.needed - search.capacity)
    assert rival.memory[0][0] == "states"
    assert rival.nearest.memory.needed <= search.capacity


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("tp=7", "tp 7 does not divide the 8 devices", "tp = 4 or 8"),
        ("tp=4,dp=8", "dp 8 x tp 4 = 32 does not divide the 8 devices", "dp = 2"),
        ("pp=2,dp=1,tp=2,cp=1", "= 4 is not the 8 devices", "dp = 2"),
        ("ep=48", "ep*etp (48) must divide dp*cp*tp (8)", "ep = 8"),
        ("ep=48,dp=4", "ep*etp (48) must divide dp*cp*tp (8)", "ep = 8"),
        ("pp=8,ep=8", "ep*etp (8) must divide dp*cp*tp (1)", "ep = 1"),
        ("pp=8,stages_per_rank=4", "stages need at least as many layers", "stages_per_rank = 3"),
    ],
)
def test_what_is_illegal_names_the_rule_and_the_nearest_legal(
    text: str, message: str, fix: str
) -> None:
    rival = judged(text)
    assert rival.verdict == "illegal"
    assert any(message in problem.message for problem in rival.problems)
    # The fix is legal on the same devices, with the other keys unchanged.
    fixed = [problem.fix for problem in rival.problems if problem.fix]
    assert fix in fixed
    for name, _, values in (one.partition(" = ") for one in fixed):
        for value in values.split(" or "):
            pairs = dict(pair.split("=") for pair in text.split(",")) | {name: value}
            again = judged(",".join(f"{key}={number}" for key, number in pairs.items()))
            assert again.verdict != "illegal"


def test_words_of_what_is_asked_are_read_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moemesh.planner.search.command.plan", lambda *_, **__: pytest.fail())
    with pytest.raises(ConfigError) as error:
        plan_named(
            PlanRequest("tiny", "laptop_cpu", 64, 8, why=["tp=2,dota=zero1", "schedule=1f2b"])
        )
    assert [one.key for one in error.value.problems] == ["plan.dota", "plan.schedule"]
    assert error.value.problems[0].fix == "did you mean data?"


def test_assumptions_of_the_search_may_be_broken_by_name() -> None:
    search, planned = searched()
    narrow = SearchSpace(search.shape, search.cluster, replace(search.space, node_size=4))
    rival = why_not(narrow, planned.model, planned.candidates[0], "tp=8")
    assert rival.beyond == ("tensor groups across nodes",)
    sharded = judged("pp=2,data=zero3")
    assert sharded.beyond == ("ZeRO-2 or 3 with a pipeline",)
    assert sharded.candidate is not None and sharded.candidate.layout.zero == 3


def test_keys_that_no_search_varies_are_set_on_the_best() -> None:
    rival = judged("ep=8,dispatcher=all_gather")
    assert rival.candidate is not None
    assert rival.candidate.layout.dispatcher == "all_gather"
    assert rival.beyond == ("dispatcher = all_gather",)
    served = judged("data=parameter_server,servers=3")
    assert served.candidate is not None
    assert served.candidate.layout.parameter_server and served.candidate.layout.servers == 3
    assert served.verdict == "slower"
    asynchronous = judged("schedule=gpipe")
    assert asynchronous.candidate is not None
    assert asynchronous.candidate.layout.schedule == "gpipe"
    assert asynchronous.candidate.layout.pp > 1
    assert asynchronous.beyond == ("schedule = gpipe",)
    assert judged("microbatch=32").beyond == ("microbatch above 16",)


def test_a_rival_of_a_trainable_plan_is_trainable_where_one_is() -> None:
    """Other trainers copy key/value heads over tensor ranks, ours does not: with two heads, tp = 4
    is priced as a layout of other trainers and marked as one."""
    model = load_model(ModelConfig(num_heads=4, num_kv_heads=2))
    space = Space(num_devices=4, node_size=4, seq_len=512, global_batch=4, trainable=True)
    search = SearchSpace(model.shape, load_cluster("laptop_cpu"), space)
    best = search.candidate(search.fitting(search.capacity, 1)[0])
    within, without = (why_not(search, model, best, f"tp={tp}") for tp in (2, 4))
    assert within.candidate is not None and within.candidate.layout.tp == 2 and not within.beyond
    assert without.candidate is not None and without.candidate.layout.tp == 4
    assert without.beyond == ("only what `moemesh train` carries out",)


def test_a_rival_in_json_can_be_read_back() -> None:
    search, planned = searched()
    said = judged("tp=2,ep=8").to_json()
    layout = read_plan(said["plan"], seq_len=4096, global_batch=64, model=planned.model).layout
    assert search.pricing.seconds(search.shape, layout)["total"] == pytest.approx(said["seconds"])


def test_no_line_is_wider_than_a_terminal() -> None:
    """Thirty layouts differ in nearly every column."""
    _, planned = searched()
    why = ["tp=8,ep=8,data=zero3", "tp=3", "pp=2,dispatcher=hierarchical"]
    assert len(planned.candidates) == 30
    planned = replace(planned, rivals=tuple(map(judged, why)), tokens=1e12)
    arguments = "--model m --cluster c --seq-len 4096 --global-batch 64"
    text = plan_text(planned, arguments, explain=True)
    assert [line for line in text.split("\n") if len(line) > WIDTH] == []
    assert [line for line in text.split("\n") if line != line.rstrip()] == []


def test_percents_of_the_parts_add_up_to_100() -> None:
    thirds = {"total": 3.0, "a": 1.0, "b": 1.0, "c": 0.9999, "d": 0.0001}
    assert sum(percent for _, _, percent in step_parts(thirds)) == pytest.approx(100.0)
    _, planned = searched()
    for candidate in planned.candidates[:5]:
        parts = step_parts(candidate.breakdown)
        assert round(sum(percent for _, _, percent in parts), 6) == 100.0
        assert sum(seconds for _, seconds, _ in parts) == pytest.approx(candidate.seconds)


def test_a_folded_command_is_one_command() -> None:
    command = "moemesh train " + " ".join(f"--set plan.key_{n}='a b'" for n in range(20))
    lines = folded(command)
    assert all(len(line) <= WIDTH for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)


def test_headroom_leaves_memory_free() -> None:
    _, planned = searched()
    tight = plan_named(PlanRequest("deepseek-v2-lite", planned.cluster, 4096, 64, headroom="40GiB"))
    capacity = planned.cluster.memory_bytes - 40 * 2**30
    assert tight.candidates[0].memory.needed <= capacity
    assert tight.candidates[0].seconds > planned.candidates[0].seconds
    said = to_json(tight)
    assert said["usable_share"] * said["device_bytes"] == pytest.approx(capacity)


def test_a_shorter_sequence_is_advised_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "remedies", lambda *_: ())  # searches with other options
    with pytest.raises(ValueError, match="fits") as states:
        plan_named(PlanRequest("llama3-8b", "laptop_cpu", 128, 8))
    assert "--seq-len" not in str(states.value)
    with pytest.raises(ValueError, match="fits") as length:
        plan_named(PlanRequest("llama3-8b", "dgx_h100", 2**23, 1))
    assert "a shorter --seq-len" in str(length.value)
