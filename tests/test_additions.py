"""One row adds a dispatcher, a schedule, an optimizer, a rate schedule, a check and a verb."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import moemesh as mm
from moemesh.bench import examination
from moemesh.comm.mesh import Mesh
from moemesh.config import learning_rate
from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.errors import ConfigError
from moemesh.config.model import ModelConfig
from moemesh.config.optimizer_table import OPTIMIZERS
from moemesh.config.plan import Plan
from moemesh.config.suggest import choices_of
from moemesh.config.train import TrainConfig
from moemesh.parallel.expert import build
from moemesh.schedule.plan_schedule import build_step
from moemesh.sharding.dispatchers import rows_moved
from tests import toys
from tests.parity.models import MODEL, TRAIN
from tests.parity.training import alone, assert_same, train
from tests.train.runs import sets, settings, small, text_file


@pytest.fixture(autouse=True)
def _toys() -> Generator[None]:
    with toys.added():
        yield


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_legal_values_and_are_listed_in_messages(invoke: Any) -> None:
    for section, key in ((Plan, "dispatcher"), (Plan, "schedule"), (TrainConfig, "optimizer")):
        assert "toy" in choices_of(section.model_fields[key].annotation)
    code, _, text = invoke("config", "check", *sets("plan.dispatcher=toi", "train.optimizer=toi"))
    assert code == 2
    assert f"did you mean toy? (choices: {', '.join(DISPATCHERS)}, auto" in text
    assert f"did you mean toy? (choices: {', '.join(OPTIMIZERS)})" in text
    # A word of another trainer: a sentence that lists the names.
    wrong = sets("train.lr_schedule=exponential", "train.optimizer=lion")
    _, _, text = invoke("config", "check", *wrong)
    for key, table in (("optimizer", OPTIMIZERS), ("lr_schedule", learning_rate.SCHEDULES)):
        assert f"train.{key} is one of {', '.join([*table][:-1])} and toy\n" in text
    # A word of another trainer: a sentence that lists the names.
    wrong = sets("train.lr_schedule=exponential", "train.optimizer=lion")
    _, _, text = invoke("config", "check", *wrong)
    for key, table in (("optimizer", OPTIMIZERS), ("lr_schedule", learning_rate.SCHEDULES)):
        assert f"train.{key} is one of {', '.join([*table][:-1])} and toy\n" in text
    _, schema, _ = invoke("config", "schema")
    keys = json.loads(schema)["properties"]["train"]["properties"]
    assert keys["lr_schedule"]["enum"] == [*learning_rate.SCHEDULES]


def test_the_ranks_of_a_plain_program_lack_the_row(tmp_path: Path) -> None:
    config = mm.load(None, ["train.optimizer=toy", "train.lr_schedule=toy", "plan.dp=2"])
    with pytest.raises(ConfigError, match="fix: torchrun --nproc-per-node 2 ") as refused:
        mm.train(config, tmp_path / "run")
    problems = refused.value.problems
    assert [problem.key for problem in problems] == ["train.lr_schedule", "train.optimizer"]
    assert not (tmp_path / "run").exists()


@pytest.mark.representative("exact", "schedule")
@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "dp": 2, "ep": 4, "dispatcher": "toy", "dispatch_chunks": 2},
        {"dp": 2, "ep": 2, "dispatcher": "toy", "combine": "exact"},
        {"pp": 2, "microbatches": 3, "schedule": "toy"},
    ],
    ids=["dispatcher", "exact", "schedule"],
)
def test_a_row_trains_as_one_device_and_its_bytes_are_predicted(plan: dict[str, Any]) -> None:
    got = train(MODEL, plan, TRAIN, on_rank=toys.train_with_toys)
    assert_same(got, alone(MODEL, TRAIN))


def test_a_dispatcher_is_priced_printed_and_compared(invoke: Any) -> None:
    sizes = {"chosen": 2, "experts": 8, "ranks": 4, "ranks_per_node": 4}
    table = rows_moved(tokens=64, **sizes)
    assert table["toy"] == table["all_to_all"]
    code, text, _ = invoke("dispatch", "--dispatcher", "toy", "--json")
    assert code == 0 and list(json.loads(text)["dispatchers"]) == ["toy"]
    words = ("estimate", "--model", "tiny", "--cluster", "dgx_h100", "--plan")
    sizes = ("--seq-len", "64", "--global-batch", "8", "--json")
    code, text, _ = invoke(*words, "dp=4,ep=4,dispatcher=toy", *sizes)
    assert code == 0 and json.loads(text)["seconds"]
    # Experts have replicas only where rows can go to them, and an fp8 payload needs `encodes`.
    for setting, words in {
        "plan.spare_slots=1": "sends rows to the homes of experts",
        "plan.payload=fp8": "sends rows in the dtype of the run: it cannot be trained with payload",
    }.items():
        plan = sets("plan.dp=2", "plan.ep=2", setting, "plan.dispatcher=toy")
        code, _, text = invoke("config", "check", *plan)
        assert code == 2 and words in text


@pytest.mark.parametrize(("payload", "is_considered"), [("same", True), ("fp8", False)])
def test_auto_considers_dispatchers_that_can_carry_the_payload(
    payload: Any, is_considered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build, "choose", lambda site, _: ("all_to_all", dict.fromkeys(site.rows, 0))
    )
    plan = Plan(dp=2, ep=2, dispatcher="auto", payload=payload)
    arguments = plan, Mesh.single("cpu"), torch.float32, 64
    _, note = build.choose_dispatcher(ModelConfig(), *arguments)
    assert ("toy" in note) is is_considered and "hierarchical" in note


def test_a_schedule_is_planned_and_drawn(invoke: Any, tmp_path: Path) -> None:
    drawn = tmp_path / "toy.svg"
    words = ("schedule", "toy", "--ranks", "2", "--microbatches", "3")
    code, text, _ = invoke(*words, "--svg", str(drawn), "--json")
    answer = json.loads(text)
    # Each microbatch is forward (1), input and weight gradient (1 + 1) on one rank after another.
    assert code == 0 and answer["makespan"] == 3 * 2 * 3
    assert answer["peak_activation"] == [1, 1] and drawn.exists()
    assert answer["closed_form"]["bubble"] == 9
    assert build_step(Plan(pp=2, microbatches=3, schedule="toy")).name == "toy"
    words = ("estimate", "--model", "tiny", "--cluster", "dgx_h100", "--seq-len", "64", "--json")
    seconds: dict[str, float] = {}
    for name in ("1f1b", "toy"):
        layout = f"pp=2,microbatches=4,schedule={name}"
        code, text, _ = invoke(*words, "--global-batch", "8", "--plan", layout)
        assert code == 0
        seconds[name] = json.loads(text)["seconds"]["total"]
    assert seconds["toy"] > seconds["1f1b"]


def test_an_optimizer_trains_and_resumes_from_a_checkpoint(invoke: Any, tmp_path: Path) -> None:
    keys = small(
        train__optimizer="toy", train__lr_schedule="toy", train__lr=1e-3, train__final_lr_ratio=0.0
    )
    keys |= {"data.path": str(text_file(tmp_path)), "train.warmup_steps": 1}
    given = sets(*settings(keys))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert invoke("train", *given, "--out", str(whole))[0] == 0
    assert invoke("train", *given, "--out", str(parts), "--stop-after", "2")[0] == 0
    assert len(_lines(parts)) == 2
    assert invoke("train", *given, "--out", str(parts))[0] == 0
    lines = _lines(whole)
    assert [line["loss"] for line in _lines(parts)] == [line["loss"] for line in lines]
    # The square of what is left of three steps after the warm-up.
    rates = [line["lr"] / 1e-3 for line in lines]
    assert rates == pytest.approx([1, (2 / 3) ** 2, (1 / 3) ** 2, 0])
    memory = json.loads((whole / "memory.json").read_text())
    (rank,) = memory["measured"] if "measured" in memory else memory["ranks"]
    assert rank["optimizer"] > 0


def test_a_check_of_doctor_is_run(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*examination.CHECKS} - {"toy"}:
        monkeypatch.delitem(examination.CHECKS, name)
    _, text, _ = invoke("doctor", "--json")
    assert "the toys are in their box" in text


def test_a_verb_is_called_helped_and_suggested() -> None:
    start = f"import sys; sys.path.insert(0, {str(toys.ROOT)!r}); "
    start += "from moemesh.cli import main; from moemesh.cli.verbs import VERBS, VerbRow; "
    start += "VERBS['toy'] = VerbRow('tests.toy_verb', 'plaything'); main()"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", start, *words]
        return subprocess.run(command, capture_output=True, text=True)

    assert call("toy", "--times", "2").stdout == "played 2 times\n"
    assert "  toy         Play." in call("--help").stdout.splitlines()
    done = call("plaything")
    assert done.returncode == 2 and "fix: moemesh toy" in done.stderr
