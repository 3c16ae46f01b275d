"""Replicas and moved experts from the command line: the losses of the plain run; clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moemesh.sharding.load_run import load_run
from moemesh.train.preparation import untrainable
from tests.train.runs import losses, metrics, train

KEYS: dict[str, Any] = {
    "plan__dp": 2,
    "plan__ep": 2,
    "train__steps": 6,
    "train__dtype": "float64",
}
MOVING = KEYS | {"train__rebalance_every": 2}


def loads(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "loads.jsonl").read_text().splitlines()]


def imbalance(rows: list[dict[str, Any]]) -> float:
    return sum(row["rank_max_over_mean"] for row in rows) / len(rows)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without any balancing."""
    out = tmp_path_factory.mktemp("balancing") / "plain"
    train(out, **KEYS)
    return out


def test_replicas_train_to_the_losses_of_the_plain_run(plain: Path, tmp_path: Path) -> None:
    got = losses(train(tmp_path / "replicas", **KEYS, plan__spare_slots=1))
    assert got == pytest.approx(losses(metrics(plain)), rel=1e-12)
    before, after = loads(plain), loads(tmp_path / "replicas")
    # What ranks really computed: nearly the same on all; experts keep their logical loads.
    for row, expected in zip(after, before, strict=True):
        assert row["tokens_per_expert"] == expected["tokens_per_expert"]
    assert imbalance(after) < 1.02 < imbalance(before)
    ledger = json.loads((tmp_path / "replicas" / "ledger.json").read_text())
    callers = {entry["caller"] for rank in ledger["ranks"] for entry in rank["entries"]}
    assert "moe.replicas" in callers


@pytest.mark.representative("pipedream")
@pytest.mark.parametrize("schedule", ["pipedream", "ampnet"])
def test_a_run_that_never_drains_counts_what_replicas_computed(
    tmp_path: Path, schedule: str
) -> None:
    keys = KEYS | {"plan__pp": 2, "plan__schedule": schedule, "plan__microbatches": 4}
    train(tmp_path, **keys, plan__spare_slots=1, train__validate_every=2)
    rows = loads(tmp_path)
    for row in rows:
        assert sum(row["tokens_per_rank"]) == sum(row["tokens_per_expert"])
    assert imbalance(rows) < 1.02


@pytest.mark.slow
def test_moved_experts_train_to_the_losses_of_the_plain_run(plain: Path, tmp_path: Path) -> None:
    got = losses(train(tmp_path / "moving", **MOVING))
    assert got == pytest.approx(losses(metrics(plain)), rel=1e-12)
    last = loads(tmp_path / "moving")[-1]
    experts, half = last["tokens_per_expert"], len(last["tokens_per_expert"]) // 2
    assert sum(last["tokens_per_rank"]) == sum(experts)
    assert last["tokens_per_rank"] != [sum(experts[:half]), sum(experts[half:])]


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [{}, {"plan__ep": 1}, {"plan__dp": 4, "plan__ep": 4}])
def test_a_run_goes_on_with_experts_where_they_were(
    tmp_path: Path, resumed: dict[str, Any]
) -> None:
    keys = MOVING | {"train__checkpoint_every": 4}
    whole = losses(train(tmp_path / "run", **keys))
    # As if it had been killed behind step 4, when experts have moved.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    again = losses(train(tmp_path / "run", **keys | resumed))
    if resumed:
        assert again == pytest.approx(whole, rel=1e-12)
    else:
        assert again == whole  # bit by bit


CLASHES: list[tuple[list[str], str, str]] = [
    (["plan.spare_slots=1", "plan.dispatcher=all_gather"], "plan.dispatcher", "all_to_all"),
    (["plan.spare_slots=1", "plan.combine=exact"], "plan.combine", "spare_slots = 0"),
    (["train.rebalance_every=3", "plan.combine=exact"], "plan.combine", "rebalance_every = 0"),
    (
        ["train.rebalance_every=3", "plan.schedule=pipedream", "plan.pp=2"],
        "plan.schedule",
        "rebalance_every = 0",
    ),
    (
        ["train.rebalance_every=3", "plan.optimizer_validation=after", "plan.pp=2"],
        "plan.optimizer_validation",
        "before",
    ),
]


@pytest.mark.parametrize(("settings", "key", "fix"), CLASHES)
def test_what_cannot_be_combined_is_refused(settings: list[str], key: str, fix: str) -> None:
    found = untrainable(load_run([], settings))
    assert [problem.key for problem in found] == [key]
    assert fix in found[0].fix


def test_what_can_be_combined_is_not_refused() -> None:
    settings = ["plan.spare_slots=2", "plan.dispatcher=auto", "train.rebalance_every=3"]
    assert untrainable(load_run([], settings)) == []
