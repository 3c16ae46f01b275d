"""`moemesh doctor`: each finding on a machine that has the fault, and on this one."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moemesh.bench import examination
from moemesh.bench.examination import CHECKS, Diagnosis
from tests import commands
from tests.test_cli import run_guarded

FACTS: dict[str, Any] = {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.0", "devices": [],
                         "experts": {"liger": "0.8.5"}}  # fmt: skip
LINK = {"bytes": 4 << 20, "seconds": 0.01}
GPU = {"name": "H100", "free": 79 << 30, "total": 80 << 30}


def of(findings: Any) -> dict[str, tuple[str, str, str]]:
    return {one.name: (one.verdict, one.text, one.fix) for one in findings}


def test_this_machine_is_examined_without_torch_in_the_process(tmp_path: Path) -> None:
    for _ in range(5):  # a busy machine may not load torch in the time that doctor gives it
        words = ("doctor", "--json", "--out", str(tmp_path / "runs"))
        done = run_guarded({"torch"}, *words, python=commands.python())
        assert done.returncode in (0, 1), done.stderr
        findings = {one["name"]: one for one in json.loads(done.stdout)}
        if "no end in" not in findings["torch"]["text"]:
            break
    assert findings["torch"]["verdict"] == "pass" and findings["links"]["verdict"] != "fail", (
        findings
    )
    assert {"python", "packages", "disk", "file locks", "clock", "open files", "ports"} <= set(
        findings
    )
    assert all(one["fix"] for one in findings.values() if one["verdict"] != "pass")
    assert done.returncode == any(one["verdict"] == "fail" for one in findings.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("version", "wanted", "keeps"),
    [
        ("2.10.1", ">=2.10", True),
        ("2.9.9", ">=2.10", False),
        ("2.13.0+cpu", ">=2.10", True),
        ("3.0", ">=2.10,<3", False),
        ("2.11", ">=2.10,<3", True),
    ],
)
def test_versions(version: str, wanted: str, keeps: bool) -> None:
    assert examination._keeps(version, wanted) == keeps


@pytest.mark.parametrize(
    ("free", "verdict"), [(1 << 29, "fail"), (5 << 30, "warn"), (1 << 40, "pass")]
)
def test_disk(free: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=1 << 45))
    assert of(CHECKS["folder"](tmp_path / "runs", {}))["disk"][0] == verdict


def test_locks_that_do_not_exclude_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examination._locks(tmp_path / "a").verdict == "pass"
    monkeypatch.setattr(examination.fcntl, "flock", lambda *_: None)
    finding = examination._locks(tmp_path / "a")
    assert finding.verdict == "fail" and "would not be refused" in finding.text


def test_a_clock_that_is_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = examination.time.time()
    monkeypatch.setattr(examination.time, "time", lambda: now + 60)
    verdict, text, _ = of(CHECKS["folder"](tmp_path, {}))["clock"]
    assert verdict == "warn" and "-60" in text


def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    verdict, _, fix = of(CHECKS["folder"](tmp_path / "file", {}))["run folder"]
    assert verdict == "fail" and "--out" in fix


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    findings = of(CHECKS["limits"](Path(), {}))
    assert findings["open files"][0] == "warn" and "ulimit -n" in findings["open files"][2]
    assert findings["processes"][0] == "warn"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert of(CHECKS["limits"](Path(), {}))["open files"][0] == "fail"


def test_shared_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    monkeypatch.setattr(examination, "SHARED_MEMORY", tmp_path)
    ((_, verdict, text, fix),) = CHECKS["shared memory"](Path(), {})
    assert verdict in ("warn", "fail") and "64.0 MiB" in text and "--shm-size" in fix
    monkeypatch.setattr(examination, "SHARED_MEMORY", tmp_path / "none")
    assert not list(CHECKS["shared memory"](Path(), {}))


def test_names_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        taken = str(server.getsockname()[1])
        assert of(CHECKS["names and ports"](Path(), {"MASTER_PORT": taken}))["ports"][0] == "warn"
    assert of(CHECKS["names and ports"](Path(), {"MASTER_PORT": taken}))["ports"][0] == "pass"
    assert of(CHECKS["names and ports"](Path(), {"MASTER_PORT": "http"}))["ports"][0] == "fail"

    def unknown(_: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert of(CHECKS["names and ports"](Path(), {}))["host name"][0] == "fail"


@pytest.mark.parametrize(
    ("environ", "verdict", "words"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", "nothing overlaps"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "pass", "no variable that hurts"),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "through the host"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warn", "checked by another"),
        ({"OMP_NUM_THREADS": "100000"}, "warn", "threads wait"),
        ({"GLOO_SOCKET_IFNAME": "none0"}, "fail", "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker0"}, "pass", ""),
        ({"MOEMESH__plan__ep": "2"}, "warn", "set keys of every run"),
        ({"MOEMESH_plan_ep": "2"}, "fail", "two underscores"),
        ({"RANK": "0"}, "fail", "WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
          "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a"}, "warn", "task 1 of 2"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
          "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "fail", "follow each other"),
    ],
)  # fmt: skip
def test_environment(environ: Mapping[str, str], verdict: str, words: str) -> None:
    (finding,) = CHECKS["environment"](Path(), environ)
    assert finding.verdict == verdict and words in finding.text
    assert finding.fix or verdict == "pass"


@pytest.mark.parametrize(
    ("answers", "signs", "verdicts", "words"),
    [
        ([FACTS, LINK], [], {"devices": "pass", "links": "pass"}, "no GPU"),
        ([FACTS, LINK], ["/dev/nvidia0"], {"devices": "fail"}, "torch sees no GPU"),
        ([FACTS | {"cuda": None}, LINK], ["/dev/nvidia0"], {"devices": "fail"}, "/dev/nvidia0"),
        ([FACTS | {"devices": [GPU, GPU]}, LINK], ["x"], {"devices": "pass"}, "2 x H100"),
        ([FACTS | {"devices": [GPU]}, LINK], ["x"], {"experts": "pass"}, "torch; liger 0.8.5"),
        ([FACTS | {"devices": [GPU, GPU | {"free": 1}]}, LINK], ["x"], {"devices": "warn"}, "[1]"),
        ([FACTS | {"devices": [GPU, GPU | {"name": "A"}]}, LINK], [], {"devices": "warn"}, "A, H"),
        ([FACTS], [], {"links": "fail"}, "do not meet"),
        ([FACTS, LINK | {"seconds": 9.0}], [], {"links": "warn"}, "0.00 GB/s"),
        ([], [], {"torch": "fail"}, "no answer (boom)"),
    ],
)
def test_what_torch_says(
    answers: list[dict[str, Any]],
    signs: list[str],
    verdicts: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "_run_ranks", lambda _: (answers, "boom"))
    monkeypatch.setattr(examination, "signs_of_gpus", lambda: signs)
    findings: list[Diagnosis] = list(CHECKS["torch"](Path(), {}))
    by_name = of(findings)
    assert {name: by_name[name][0] for name in verdicts} == verdicts
    assert any(words in one.text for one in findings)
    assert all(one.fix for one in findings if one.verdict != "pass")


def test_a_source_folder_without_its_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.metadata", missing)
    findings = of(CHECKS["versions"](Path(), {}))
    assert findings["python"][0] == "pass"
    assert findings["packages"][0] == "warn" and "pip install -e ." in findings["packages"][2]
