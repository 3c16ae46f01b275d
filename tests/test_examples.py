"""Every example is short and runs; the runs that they make are read back."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import commands
from tests.documents import SMALL_RUN
from tests.waiting import ended

pytestmark = pytest.mark.documents

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {
    "checkpoint.py",
    "compare_plans.py",
    "mixtral.py",
    "moe_layer.py",
    "own_loop.py",
    "partition_a_model.py",
    "pipelines.py",
    "plan_a_cluster.py",
    "read_a_run.py",
    "rebalance.py",
    "train_tiny.toml",
    "vllm_policy.py",
    "first_hour.ipynb",
    "fsdp2.py",
    "torchtitan_moe.py",
    "trainer.py",
    "trainer_experts.py",
}


def run(*arguments: str | Path) -> str:
    done = ended([commands.python(), *arguments], env=os.environ | SMALL_RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_short_and_tested() -> None:
    files = {path.name: path for path in EXAMPLES.iterdir() if path.is_file()}
    assert files.keys() == TESTED
    for path in files.values():
        if path.suffix == ".ipynb":
            continue
        assert len(path.read_text().splitlines()) <= 40, path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of train_tiny.toml."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    printed = run("-m", "moemesh", "train", EXAMPLES / "train_tiny.toml", "--out", out)
    assert "16 experts, top 4" in printed and "dispatcher=all_gather" in printed
    return out


def test_read_a_run(tiny: Path) -> None:
    printed = run(EXAMPLES / "read_a_run.py", tiny)
    assert "step     2  loss" in printed and printed.endswith("\nwarnings:\n")
    for axis in ("tp", "ep_etp", "stage"):
        assert re.search(rf"^rank [01] sends +\d+\.\d+ MiB a step over {axis} ", printed, re.M)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


TRAIN_SLOWLY_WRITTEN = """
import sys, time
from pathlib import Path
import moemesh as mm
from moemesh.report import page
write = page.write
page.write = lambda folder: (time.sleep(1.5), write(folder))
run = mm.train(mm.load(None, {"plan.tp": 2}), out=sys.argv[1])
print("report there:", (Path(sys.argv[1]) / "report.html").is_file(), len(run.metrics), flush=True)
"""


def test_train_under_torchrun_returns_when_the_run_is_written(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(TRAIN_SLOWLY_WRITTEN)
    printed = run(*TORCHRUN, script, tmp_path / "run")
    assert printed.count("report there: True 2") == 2


def test_moe_layer() -> None:
    printed = run(*TORCHRUN, EXAMPLES / "moe_layer.py")
    results = re.findall(r"rank ([01]) holds 4 of 8 experts; loss of the last step (\S+)", printed)
    assert {rank for rank, _ in results} == {"0", "1"}
    assert all(float(loss) < 0.5 for _, loss in results)  # about 2 at the start


def test_mixtral() -> None:
    pytest.importorskip("transformers")
    assert "largest difference of logits" in run(EXAMPLES / "mixtral.py")


def test_fsdp2() -> None:
    pytest.importorskip("transformers")
    printed = run(*TORCHRUN, EXAMPLES / "fsdp2.py")
    results = re.findall(r"rank ([01]) holds 4 of 8 experts; loss of the last step (\S+)", printed)
    assert {rank for rank, _ in results} == {"0", "1"}
    assert all(float(loss) < 3 for _, loss in results)  # 4.2 at the start


@pytest.mark.parametrize("example", ["trainer.py", "trainer_experts.py"])
def test_trainer(example: str, tmp_path: Path) -> None:
    """The saved model is that of the ranks: what was trained there, under transformers' names."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run(*TORCHRUN, EXAMPLES / example, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(64 * 16).view(-1, 16) % 61
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss < 3.5  # 4.2 at the start


def test_torchtitan() -> None:
    pytest.importorskip("torchtitan")
    printed = run(EXAMPLES / "torchtitan_moe.py")
    assert float(printed.split("largest difference: ")[1].split()[0]) < 0.03


def test_own_loop(tmp_path: Path) -> None:
    printed = run(*TORCHRUN, EXAMPLES / "own_loop.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 1
    assert (tmp_path / "step-5" / "manifest.json").is_file()


def test_checkpoint(tmp_path: Path) -> None:
    run(*TORCHRUN, EXAMPLES / "checkpoint.py", tmp_path)
    printed = run(EXAMPLES / "checkpoint.py", tmp_path)
    assert "'step': 7" in printed and "[6., 7.]" in printed


def test_plan_a_cluster() -> None:
    printed = run(EXAMPLES / "plan_a_cluster.py")
    assert printed.count("GiB: {'pp'") == 3 and "moemesh train --set model.preset=qwen3" in printed


def test_partition_a_model() -> None:
    printed = run(EXAMPLES / "partition_a_model.py")
    dp, random = (float(seconds) for seconds in re.findall(r"(\S+) s a step", printed))
    assert dp <= random


def test_pipelines() -> None:
    printed = run(EXAMPLES / "pipelines.py")
    assert re.search(r"^zb_h1  takes \d+ ticks, bubble \d", printed, re.M)
    assert "rank 1: 1F0 1I0" in printed


def test_rebalance() -> None:
    assert re.findall(r"most loaded GPU (1\.\d+) of the mean", run(EXAMPLES / "rebalance.py"))


def test_the_policy_of_vllm_answers_in_both_signatures() -> None:
    policy: Any = runpy.run_path(str(EXAMPLES / "vllm_policy.py"))
    loads = torch.randint(1, 100, (3, 16), generator=torch.Generator().manual_seed(0))
    first = policy["MoemeshPolicy"].rebalance_experts(loads, 24, 4, 2, 8)
    assert first.shape == (3, 24) and all(set(row.tolist()) == set(range(16)) for row in first)

    drifted = loads + torch.arange(16)
    second = policy["MoemeshPolicy"].rebalance_experts(drifted, 24, 4, 2, 8, first)
    anew = policy["MoemeshPolicy"].rebalance_experts(drifted, 24, 4, 2, 8)
    assert (second != first).sum() < (anew != first).sum(), "few replicas move"
    context = SimpleNamespace(
        load_window_cpu=torch.stack([drifted // 2, drifted - drifted // 2]),
        physical_to_logical_map_cpu=first,
        topology=SimpleNamespace(num_groups=4, num_nodes=2, num_ranks=8),
        num_replicas=24,
    )
    assert torch.equal(policy["plan_of"](context), second)


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_notebook_runs(steps: int, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "kept without outputs"
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert "STEPS = 20" in cells[0]
    code = "\n".join(cells).replace("STEPS = 20", f"STEPS = {steps}")
    (tmp_path / "notebook.py").write_text(code)
    assert "moemesh train --set model.preset=deepseek-v2-lite" in run(tmp_path / "notebook.py")


def test_compare_plans(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "compare_plans.py", tmp_path)
    assert "step 3: loss" in printed
    assert (tmp_path / "spread" / "report.html").is_file()
