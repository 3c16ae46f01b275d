"""The file of `moemesh launch --torchrun` runs on two nodes: network namespaces of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moemesh.bench import hosts
from tests.waiting import PATIENCE

REASON = hosts.why_not()
SMALL = (
    *("plan.dp=2", "plan.ep=2", "train.device=cpu", "train.validate_every=0"),
    *("model.num_layers=2", "model.hidden_size=32", "data.seq_len=16", "data.global_batch=4"),
    *("data.path=a.txt", "train.validation_batches=1"),
)


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"cannot emulate hosts: {REASON}")
def test_two_nodes_train_together_and_go_on(tmp_path: Path) -> None:
    """The same file on both nodes, as in docs/cluster.md; a second call with more steps resumes
    from the checkpoint."""
    (tmp_path / "a.txt").write_text("some text of a node\n" * 200)
    # What pip installs as torchrun; the environment of the tests may have torch from elsewhere.
    torchrun = tmp_path / "bin/torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    search_path = f"{torchrun.parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": search_path, "MASTER_ADDR": "10.117.0.1"}
    for steps in (2, 4):
        settings = [word for one in SMALL for word in ("--set", one)]
        settings += ["--set", f"train.steps={steps}", "--out", "run", "--ranks-per-node", "1"]
        # A file with other settings is not written over.
        (tmp_path / "torchrun.sh").unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-m", "moemesh", "launch", "--torchrun", *settings],
            cwd=tmp_path,
            check=True,
            timeout=PATIENCE,
        )
        with hosts.hosts(2, "1gbit") as names:
            nodes = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "bash", "torchrun.sh"],
                    cwd=tmp_path,
                    env={
                        **environ,
                        "NODE_RANK": str(number),
                        "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for number, name in enumerate(names)
            ]
            said = [node.communicate(timeout=PATIENCE) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
        rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, steps + 1))
    assert "resumed from step 2" in said[0][0]
    # The second node printed nothing itself: rank 0 prints for all.
    assert "resumed" not in said[1][0]
