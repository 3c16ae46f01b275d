"""The verb launch: files for clusters, and mistakes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.test_cli import Invoke

yaml = pytest.importorskip("yaml")
PLAN = ("--set", "plan.dp=16", "--set", "plan.ep=8", "--out", "/shared/runs/A first one")


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_scripts_are_valid_bash(launcher: str, tmp_path: Path, invoke: Invoke) -> None:
    target = tmp_path / "job"
    _, out, _ = invoke("launch", *PLAN, f"--{launcher}", "--file", str(target))
    assert out.startswith("2 node(s) of 8 ranks: wrote ")
    checked = subprocess.run(["bash", "-n", target], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "--out '/shared/runs/A first one'" in target.read_text()


def test_a_batch_script_asks_for_what_the_plan_needs(invoke: Invoke) -> None:
    given = ("--slurm", "--hours", "1.5", "--partition", "gpu", "--dry-run")
    _, out, _ = invoke("launch", *PLAN, *given)
    asked = {line.removeprefix("#SBATCH ") for line in out.splitlines() if "#SBATCH" in line}
    assert {
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=1:30:00",
        "--partition=gpu",
        "--job-name=a-first-one",
    } <= asked
    cpu = invoke("launch", *PLAN, "--set", "train.device=cpu", *given)[1]
    assert "gpus" not in cpu


def test_kubernetes_and_skypilot(invoke: Invoke) -> None:
    _, out, _ = invoke("launch", *PLAN, "--k8s", "--dry-run", "--image", "a/b:1")
    service, job = yaml.safe_load_all(out)
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["completions"], service["metadata"]["name"]) == (2, "a-first-one")
    assert pod["containers"][0]["image"] == "a/b:1"
    assert "--nnodes=2 --nproc-per-node=8" in pod["containers"][0]["args"][0]
    _, out, _ = invoke("launch", *PLAN, "--sky", "--dry-run")
    task = yaml.safe_load(out)
    assert task["num_nodes"] == 2 and "file_mounts" not in task
    assert "MOUNT_SHARED_DISK" in task["setup"]


def test_a_failure_of_one_pod_leaves_room_for_more(invoke: Invoke) -> None:
    """Each of the pods that it ends counts, except those that were evicted."""
    _, out, _ = invoke("launch", *PLAN, "--ranks-per-node", "1", "--k8s",
                    "--dry-run")  # fmt: skip
    service, job = yaml.safe_load_all(out)
    assert job["spec"]["completions"] == 16 and job["spec"]["backoffLimit"] == 6 * 16
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    ]
    assert service["spec"]["publishNotReadyAddresses"] is True
    pod = job["spec"]["template"]["spec"]
    # torchrun waits almost as long as the pod may live on.
    (patience,) = pod["containers"][0]["env"]
    assert 0 < pod["terminationGracePeriodSeconds"] - int(patience["value"]) <= 30


def test_one_machine_of_skypilot_has_the_configuration_and_a_bucket(
    invoke: Invoke, tmp_path: Path
) -> None:
    file = tmp_path / "a file.toml"
    file.write_text("[plan]\ndp = 4\n")
    arguments = (str(file), "--out", "/r/2026-1", "--dry-run")
    _, out, _ = invoke("launch", *arguments, "--sky")
    task = yaml.safe_load(out)
    assert task["file_mounts"][str(file)] == str(file)
    assert task["file_mounts"]["/r"] == {"source": "BUCKET_URL", "mode": "MOUNT_CACHED"}
    assert task["name"] == "moemesh-2026-1"


def test_local_trains_here(invoke: Invoke) -> None:
    _, out, _ = invoke("launch", "--out", "/tmp/x", "--local", "--dry-run")
    assert out == "moemesh train --out /tmp/x\n"
