"""`moemesh estimate`: the JSON of the contract, the table, and everything that can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moemesh.planner.estimate import estimate_named
from moemesh.planner.layout_sources import read_plan
from tests.test_cli import Invoke

PLAN = "tp=2,dp=4,ep=8,data=zero1,microbatch=1"


def estimated(model: str = "qwen3-30b-a3b", plan: str = PLAN, **keys: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"cluster": "dgx_h100", "seq_len": 4096, "global_batch": 64} | keys
    return json.loads(json.dumps(estimate_named(model, plan=plan, **settings).to_json()))


def test_a_parameter_server_shows_what_a_worker_sends() -> None:
    plan = "dp=4,data=parameter_server,microbatch=1"
    document = estimated("tiny", plan, cluster="laptop_cpu", seq_len=128, global_batch=4)
    number = document["parameters"]["total"]
    # The server sends weights in bf16 to three workers, a worker its gradients in fp32.
    (note,) = [note for note in document["notes"] if note.startswith("traffic")]
    match = re.search(r"gradients ([0-9.]+) MiB are sent by it, ([0-9.]+) MiB by rank 3", note)
    assert match is not None, note
    sent = [float(size) * 2**20 for size in match.groups()]
    assert sent == pytest.approx([3 * 2 * number, 4 * number], rel=0.01)


@pytest.mark.parametrize("dtype", ["float16", "float8"])
def test_traffic_in_a_number_type_that_no_run_has_comes_from_closed_forms(dtype: str) -> None:
    plan = f"dp=2,ep=2,dtype={dtype}"
    document = estimated("tiny", plan, cluster="laptop_cpu", seq_len=64, global_batch=8)
    (note,) = [note for note in document["notes"] if note.startswith("traffic")]
    assert note.endswith(f"`moemesh train` does not train in {dtype}")
    counts = document["parameters"]
    (sums,) = [row for row in document["traffic"] if row["caller"] == "gradients"]
    assert sums["wire_bytes"] == 4 * (counts["total"] - counts["experts"])


def test_more_devices_than_the_cluster_has_are_noted() -> None:
    document = estimated(plan="tp=2,dp=16,ep=8,microbatch=1", global_batch=64)
    assert any("32 devices" in note for note in document["notes"])


def test_keys_of_both_worlds() -> None:
    batch: dict[str, Any] = {"seq_len": 128, "global_batch": 32}
    parsed = read_plan("tp=2,dp=2,microbatch=2,recompute=norm+moe,zero=1,zero_group=2", **batch)
    assert parsed.plan is None
    assert parsed.layout.recompute == {"norm", "moe"}
    assert (parsed.layout.microbatch, parsed.layout.microbatches) == (2, 8)
    plain = read_plan("tp=2,dp=2,microbatch=2,data=zero1", **batch)
    assert plain.plan is not None and plain.plan.microbatches == 8
    assert plain.layout.zero == 1
    layers = read_plan("pp=2,microbatches=4,layers_per_stage=[3,1]", **batch)
    assert layers.layout.layers_per_stage == (3, 1)


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\ntp = 2\nmicrobatch = 4\n")
    assert read_plan(str(file), seq_len=8, global_batch=8).layout.microbatches == 2


def test_a_plan_with_another_end_of_a_step_is_not_called_exact_by_mistake() -> None:
    """Post-validation sums one vector over the stage and sends it along the pipeline: its lines are
    not those of a step that reduces first."""
    keys: dict[str, Any] = {"cluster": "laptop_cpu", "seq_len": 32, "global_batch": 8}
    plan = "pp=2,schedule=zb_h2,microbatches=4"
    before = estimated("tiny", plan, **keys)
    after = estimated("tiny", f"{plan},optimizer_validation=after", **keys)
    assert "enters on rank" in before["notes"][-1]
    callers = {row["caller"] for row in after["traffic"]}
    if "enters on rank" in after["notes"][-1]:
        assert {"step.report", "validation"} & callers
    assert not {"step.losses", "gradient_norm"} & callers


EXACT = "enters on rank"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dp=2,ep=2,dispatcher=deepep", "dispatcher = deepep has no prediction of its bytes"),
        ("dp=2,ep=2,dispatcher=auto", "chosen on the ranks themselves"),
        ("dp=2,recompute=norm+moe", "no [plan] of `moemesh train` describes this layout"),
        ("dp=2,microbatches=4,ep=2,spare_slots=1,combine=exact", "cannot be trained with spare"),
        ("dp=2,ep=2,recompute=full", EXACT),
        ("dp=2,ep=2,dispatcher=auto,spare_slots=1", EXACT),
        ("pp=2,schedule=terapipe,slices=3,microbatches=2", EXACT),
        ("pp=2,schedule=ampnet,microbatches=4", EXACT),
        ("pp=2,schedule=zb_h2,microbatches=4,optimizer_validation=after", EXACT),
    ],
)
def test_what_training_does_is_exact_and_closed_forms_say_why_not(plan: str, reason: str) -> None:
    note = estimated("tiny", plan, cluster="laptop_cpu", seq_len=32, global_batch=8)["notes"][-1]
    assert reason in note and ("not to the byte" in note) == (reason != EXACT)


def test_a_missing_batch_is_named(invoke: Invoke) -> None:
    words = "--model tiny --cluster laptop_cpu --plan tp=2 --seq-len 32"
    code, _, err = invoke("estimate", *words.split())
    assert code == 2 and "global_batch" in err
