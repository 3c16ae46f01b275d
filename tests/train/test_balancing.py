"""Replicas and moved experts from the command line: the losses of the plain run; clear refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from moemesh.config.load import load_run
from moemesh.train.preflight import untrainable
from tests.train.runs import losses, train

KEYS: dict[str, Any] = {
    "plan__dp": 2,
    "plan__ep": 2,
    "train__steps": 6,
    "train__dtype": "float64",
    "model__router_score": "softmax",
}


def loads(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "loads.jsonl").read_text().splitlines()]


def imbalance(rows: list[dict[str, Any]]) -> float:
    return sum(row["rank_max_over_mean"] for row in rows) / len(rows)


def test_replicas_train_to_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    plain = losses(train(tmp_path / "plain", **KEYS))
    got = losses(train(tmp_path / "replicas", **KEYS, plan__spare_slots=1))
    assert got == pytest.approx(plain, rel=1e-12)
    before, after = loads(tmp_path / "plain"), loads(tmp_path / "replicas")
    # What ranks really computed: nearly the same on all; experts keep their logical loads.
    assert [row["tokens_per_expert"] for row in after] == [
        row["tokens_per_expert"] for row in before
    ]
    assert imbalance(after) < 1.01 < imbalance(before)
    ledger = json.loads((tmp_path / "replicas" / "ledger.json").read_text())
    callers = {entry["caller"] for rank in ledger["ranks"] for entry in rank["entries"]}
    assert "moe.replicas" in callers


def test_moved_experts_train_to_the_same_losses_also_after_a_resume(tmp_path: Path) -> None:
    plain = losses(train(tmp_path / "plain", **KEYS))
    moving = KEYS | {"train__rebalance_every": 2}
    whole = losses(train(tmp_path / "whole", **moving))
    assert whole == pytest.approx(plain, rel=1e-12)
    assert loads(tmp_path / "whole")[-1]["tokens_per_rank"] != [
        sum(loads(tmp_path / "whole")[-1]["tokens_per_expert"][half * 4 :][:4]) for half in (0, 1)
    ]
    # Stopped when experts have moved: the same layout goes on bit by bit, another one as it should.
    half = tmp_path / "half"
    train(half, **moving | {"train__checkpoint_every": 4})
    (half / "checkpoints" / "step-6").rename(half / "away")
    assert losses(train(half, **moving | {"train__checkpoint_every": 4})) == whole


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
