"""The verb launch: files for clusters, and mistakes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from moemesh.config.jobs import ClusterJob
from moemesh.sharding.load_run import load_run
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
    directives = {line.removeprefix("#SBATCH ") for line in out.splitlines() if "#SBATCH" in line}
    assert {
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=1:30:00",
        "--partition=gpu",
        "--job-name=a-first-one",
    } <= directives
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--slurm", "--ranks-per-node", "8"),
            "--ranks-per-node 4, or --set plan.ranks_per_node=8",
        ),
        (("--local", "--ranks-per-node", "4"), "--ranks-per-node is for a file"),
        (("--local", "--file", "job"), "--file is for a file"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: tuple[str, ...], reason: str, invoke: Invoke
) -> None:
    given = ("--set", "plan.dp=8", "--set", "plan.ranks_per_node=4")
    code, _, err = invoke("launch", *given, *arguments, "--dry-run")
    assert code == 2 and reason in err
    assert invoke("launch", *given, "--slurm", "--ranks-per-node", "4", "--dry-run")[0] == 0


def test_local_trains_here(invoke: Invoke) -> None:
    _, out, _ = invoke("launch", "--out", "/tmp/x", "--local", "--dry-run")
    assert out == "moemesh train --out /tmp/x\n"


HOSTILE = [
    "data.path=/a b/'quoted' \"twice\" $HOME `id` $(id) $$(id) # no comment",
    "data.path=two\nlines\n  and: yaml\n- item",
    "data.path=ü 漢字 \U0001f600 \u2028 \x85 \x1b]0;x\x07 \u202e",
    "-x.y=--leading {dash: [a, b]}  two  blanks ",
    "data.path=back\\slash\\n 'and\nboth' \udcff",
]


@pytest.mark.parametrize("word", HOSTILE)
def test_every_word_arrives_as_it_was_given(word: str, tmp_path: Path) -> None:
    out = Path(f"/shared/{word.partition('=')[2]}/no")
    arguments = ("train", "--set", word, "--out", str(out))
    directory = tmp_path / "a\nfolder's $x"
    directory.mkdir()
    stub = tmp_path / "stub"
    stub.write_text('#!/bin/bash\nprintf \'%s\\0\' "$@" > "$SEEN"\n')
    stub.chmod(0o755)
    for name in ("srun", "torchrun"):
        (tmp_path / name).hardlink_to(stub)
    job = ClusterJob.of(
        load_run([], ["plan.dp=2"], {}).config, arguments, out, 2, directory=str(directory)
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(tmp_path / "seen")}
    environment |= {"NODE_RANK": "0", "MASTER_ADDR": "host", "SKYPILOT_NODE_IPS": "host"}
    for launcher in ("slurm", "torchrun", "k8s", "sky"):
        text = job.text(launcher)
        script = text
        if launcher == "k8s":
            (container,) = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"][
                "containers"
            ]
            # As Kubernetes replaces variables in arguments.
            script = re.sub(
                r"\$(\$|\([^)]*\))", lambda m: "$" * (m[1] == "$"), container["args"][0]
            )
            assert container["volumeMounts"][0]["mountPath"] == str(out.parent)
        elif launcher == "sky":
            task = yaml.safe_load(text)
            script = task["run"]
            assert task["name"] == "no" and str(out.parent) in task["file_mounts"]
        (tmp_path / "seen").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True)
        seen = (tmp_path / "seen").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        assert seen[seen.index("moemesh") + 1 :] == list(arguments), launcher
