"""The first screen of `moemesh plan`, and the way from it to a job."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moemesh import cli
from moemesh.cli.application import app
from moemesh.cli.plan_text import plan_text, published, risk_of_memory
from moemesh.config.cluster import load_cluster
from moemesh.planner.estimate import estimate
from moemesh.planner.layout_sources import from_plan, plan_of, untrained
from moemesh.planner.requests import PlanRequest
from moemesh.planner.search.command import (
    PLAN_FILE,
    PlannedAnswer,
    known_runs,
    plan_file,
    plan_named,
    to_json,
)
from moemesh.planner.shapes.load_shape import load_model
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import format_bytes
from tests.huggingface.tiny import save

PLAN = (
    *["plan", "--model", "tiny", "--cluster", "laptop_cpu", "--seq-len", "64", "--global-batch"],
    "8",
)


def run(*words: str) -> Result:
    cli.import_verbs()
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def planned() -> PlannedAnswer:
    return plan_named(PlanRequest("mixtral-8x7b", "dgx_h100", 4096, 256, nodes=2))


def test_the_first_screen_has_twenty_lines(planned: PlannedAnswer) -> None:
    with_role = tuple(one for one in planned.candidates if one.roles)
    assert len(with_role) >= 2
    lines = plan_text(replace(planned, candidates=with_role), "").splitlines()
    assert len(lines) <= 20
    text = "\n".join(lines)
    for word in ("recommended", "fastest", "simplest", "risk: ", "certificate: ", "--write"):
        assert word in text
    assert "  moemesh train plan.toml\n  moemesh launch --slurm plan.toml" in text
    # The keys of the configuration and no words of our own.
    for word in ("microbatches=", "data=zero1", "schedule="):
        assert word in text
    longer = plan_text(planned, "", explain=True)
    for part in (
        "a step of the first",
        "binding: ",
        "left out: ",
        " x ZeRO-2 or 3 with",
        "assumed: ",
    ):
        assert part in " ".join(longer.split())


def test_a_narrow_terminal_breaks_no_row(
    planned: PlannedAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan_text(planned, "", explain=True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert plan_text(planned, "", explain=True).split("\n\n")[0] == whole.split("\n\n")[0]


def test_the_risk_is_measured_against_the_device_not_the_headroom(planned: PlannedAnswer) -> None:
    """The advice is one that can be taken: the layout that it names is safe."""
    # A first layout that is not the fastest gives the disadvantage of the faster one.
    number, fastest = min(enumerate(planned.candidates, 1), key=lambda entry: entry[1].seconds)
    high = format_bytes(round(planned.memory_interval(fastest).high))
    assert f"that of {number}, which is faster, ends at {high}" in risk_of_memory(planned)
    assert f"of the fastest ({fastest.seconds:.3f} s): +" in planned.advice.binding
    small = planned.cluster.model_copy(update={"nodes": 2, "memory_bytes": 40 * 2**30})
    risky = plan_named(PlanRequest("qwen3-30b-a3b", small, 4096, 256, top=5))
    risk = risk_of_memory(risky)
    number = risk.split("; ")[1].split()[0]
    assert "may run out" in risk and risky.is_safe(risky.candidates[int(number) - 1])


@pytest.mark.slow
def test_more_headroom_makes_no_layout_riskier_and_no_layout_may_be_safe() -> None:
    tight = plan_named(
        PlanRequest("mixtral-8x7b", "dgx_h100", 4096, 256, nodes=4, headroom="33GiB")
    )
    assert tight.memory_interval(tight.candidates[0]).high > 47 * 2**30
    pattern = r"risk: the worst routing needs [\d.]+ GiB; the 80 % interval of 1 ends at "
    assert re.match(pattern, risk_of_memory(tight))
    update = {"nodes": 2, "memory_bytes": 36 * 2**30}
    tiny = load_cluster("dgx_h100").model_copy(update=update)
    none = plan_named(PlanRequest("qwen3-30b-a3b", tiny, 4096, 256, top=5))
    assert "no layout's fits" in risk_of_memory(none) and not none.has_safe


def test_the_risk_names_the_worst_routing_as_estimate_does(planned: PlannedAnswer) -> None:
    best = planned.candidates[0]
    exact = None if untrained(best.layout, planned.model) else plan_of(best.layout)
    priced = estimate(planned.model, best.layout, planned.cluster, exact)
    assert not priced.fits(priced.crowded_bytes) and planned.is_safe(best)
    reason = f"the worst routing needs {format_bytes(round(priced.crowded_bytes))}"
    assert risk_of_memory(planned).startswith(f"risk: {reason}; the 80 % interval of 1 ends at ")
    small = plan_named(PlanRequest("tiny", "laptop_cpu", 64, 8))
    assert risk_of_memory(small).startswith("risk: none seen; ")


def test_the_file_names_the_rate_of_its_run(tmp_path: Path) -> None:
    """Loaded weights have another default than a model from scratch, and adapters a third."""
    folder = save("qwen3_moe", tmp_path / "model")
    words = ["plan", "--model", str(folder), *PLAN[3:], "--trainable"]
    for settings in ([], ["--set", "lora.rank=4"]):
        out = tmp_path / f"{len(settings)}.toml"
        assert run(*words, *settings, "--write", str(out)).exit_code == 0
        rate = load_run([out], []).config.train.lr
        assert f"train.lr (now {rate:g}), data.path" in out.read_text()
        assert rate == (1e-4 if settings else 1e-5)


@pytest.mark.representative("1B")
@pytest.mark.parametrize("tokens", [None, "1B"])
def test_the_file_is_the_answer(
    tokens: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ("--set", "lora.rank=4") if tokens is None else ("--tokens", tokens)
    said = run(*PLAN, "--trainable", "--write", "plan.toml", *more)
    assert said.exit_code == 0, said.output
    assert "wrote plan.toml:\n  moemesh train plan.toml\n" in said.output
    text = Path("plan.toml").read_text()
    assert text.startswith(PLAN_FILE) and "# Predicted: " in text and "(80 %: " in text
    assert tomllib.loads(text)["plan"]
    config = load_run([Path("plan.toml")], []).config
    settings = ["lora.rank=4"] if tokens is None else []
    best = plan_named(
        PlanRequest("tiny", "laptop_cpu", 64, 8, trainable=True, settings=settings)
    ).candidates[0]
    again = from_plan(config.plan, seq_len=config.data.seq_len, global_batch=8)
    assert (
        again.text
        == best.layout.changed(
            ranks_per_node=0, trained_dense=1.0, trained_experts=1.0, adapters=False
        ).text
    )
    assert config.lora.rank == (4 if tokens is None else 0)
    if tokens is not None:
        assert config.train.steps * 64 * 8 >= 1e9
    # Adapters need weights, which a preset lacks: a comment in the file names the key to set.
    assert ("model.path in place of model.preset" in text) == (tokens is None)
    assert (run("config", "check", "plan.toml").exit_code == 0) == (tokens is not None)
    for form in ("slurm", "torchrun", "k8s", "sky"):
        script = run("launch", f"--{form}", "plan.toml", "--dry-run")
        assert script.exit_code == 0 and str(tmp_path / "plan.toml") in script.output


def test_another_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("own.toml")
    own.write_text("[train]\nsteps = 3\n")
    monkeypatch.setattr("moemesh.planner.search.command.plan_named", lambda *_, **__: pytest.fail())
    for target in ("own.toml", "nowhere/plan.toml", "."):
        refused = run(*PLAN, "--write", target)
        assert isinstance(refused.exception, ValueError) and target in str(refused.exception)
    assert own.read_text() == "[train]\nsteps = 3\n" and [
        path.name for path in tmp_path.iterdir()
    ] == ["own.toml"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # its own it does
        assert run(*PLAN, "--write", "plan.toml").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml", "plan.toml"]


def test_what_is_not_trained_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "plan --model gpt-22b --cluster dgx_a100 --seq-len 2k --global-batch 8"
    refused = run(*words.split(), "--write", "plan.toml")
    assert "recommended" in refused.output and "launch" not in refused.output
    assert "plan.toml is not written" in str(refused.exception)
    assert not list(tmp_path.iterdir())


def test_published_runs_stand_beside_the_prediction() -> None:
    """The published time is met in the number type of the run, and GPU-hours are those reported."""
    machine = load_cluster("hgx_h800").model_copy(update={"nodes": 256})
    (run,) = known_runs(load_model("deepseek-v3"), machine, "bfloat16")
    assert run.speed.gpu_hours(14.8e12) == pytest.approx(2.664e6, rel=0.002)
    assert run.predicted == pytest.approx(run.seconds, rel=0.12) and run.here > run.predicted
    small = plan_named(PlanRequest("qwen3-30b-a3b", "dgx_h100", 4096, 64, tokens="1T"))
    (sentence,) = published(small)
    hours = 1e12 / (512 * 4096) * 21.773 * 8 / 3600
    assert (
        f"{hours:,.0f} GPU-hours" in sentence
        and "512 x 4,096 tokens on 8 x H100-80G in 21.77 s" in sentence
    )
    assert " ".join(sentence.split()) in " ".join(plan_text(small, "").split())
    assert to_json(small)["published"][0]["speed"]["gpu_hours"] == pytest.approx(hours)
    assert not published(plan_named(PlanRequest("tiny", "dgx_h100", 64, 8)))


def test_the_cheapest_is_the_one_that_a_search_of_its_nodes_finds() -> None:
    """A small batch on many nodes waits more than it computes; on one node nothing is cheaper."""
    batch = {"model": "qwen3-30b-a3b", "cluster": "dgx_h100", "seq_len": 4096, "global_batch": 8}
    wide = plan_named(PlanRequest(**batch, nodes=2, tokens="1T"))  # type: ignore[arg-type]
    assert wide.cheapest is not None
    nodes = wide.cheapest.layout.world_size // 8
    alone = plan_named(PlanRequest(**batch, nodes=1))  # type: ignore[arg-type]
    costs = {n: one.fastest_first[0].seconds * n for n, one in ((1, alone), (2, wide))}
    assert wide.cheapest.seconds * nodes == pytest.approx(costs[nodes])
    assert min(costs, key=lambda n: costs[n]) == nodes == 1
    (cheapest,) = [line for line in plan_text(wide, "").splitlines() if line.startswith("cheapest")]
    hours = 1e12 / (8 * 4096) * costs[nodes] * 8 / 3600
    assert cheapest.startswith(f"cheapest: --nodes {nodes}: {hours:,.0f} GPU-hours (-")
    answer = to_json(wide)["cheapest"]
    assert answer["speed"]["gpu_hours"] == pytest.approx(hours) and answer["plan"]["dp"]
    alone = plan_named(PlanRequest("tiny", "dgx_h100", 64, 8, tokens="1B"))
    assert to_json(alone)["cheapest"] is None and "fewer nodes save no" in plan_text(alone, "")


def test_text_of_comments_is_one_line_each(planned: PlannedAnswer) -> None:
    heads = [line for line in plan_file(planned).splitlines() if line.startswith("#")]
    assert len(heads) == 4 and "16 devices of dgx_h100" in heads[0]
