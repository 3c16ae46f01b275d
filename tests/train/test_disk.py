"""Room for checkpoints: predicted to the size of real ones, and refused with numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.saver import SaveOutcome
from moemesh.checkpoint.stored import candidates, open_stored
from moemesh.comm.mesh import Mesh
from moemesh.config.train import TrainConfig
from moemesh.sharding.load_run import load_run
from moemesh.train import preflight
from moemesh.train.console import Console
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.weights.saving import Checkpoints
from tests.train import runs


def overrides(keys: dict[str, Any]) -> list[str]:
    settings = runs.SMALL | {key.replace("__", "."): value for key, value in keys.items()}
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]


@pytest.mark.representative("adamw")
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"train__optimizer": "sgd"}, id="sgd"),
        pytest.param({"train__optimizer": "sgd", "train__momentum": 0.9}, id="momentum"),
        pytest.param({"train__dtype": "float64"}, id="float64"),
        pytest.param({"train__dtype": "bfloat16", "train__freeze": "layers.0.*"}, id="frozen"),
        pytest.param({"lora__rank": 4, "train__train_only": "layers.0.*"}, id="lora"),
    ],
)
def test_predicted_and_written_bytes_agree(tmp_path: Path, keys: dict[str, Any]) -> None:
    run = tmp_path / "run"
    done = runs.moemesh(*runs.arguments(run, **keys | {"train__steps": 1}))
    assert done.returncode == 0, done.stderr
    (step,) = candidates(run / "checkpoints")
    stored = open_stored(run / "checkpoints", step)
    # Without headers and the routers' biases.
    sizes = (
        sum(piece.num_bytes for piece in stored.slices(file) if "selection_bias" not in piece.name)
        for file in stored.manifest.files
    )
    predicted = preflight.checkpoint_bytes(load_run([], overrides(keys)).config)
    assert predicted == sum(sizes)


def test_a_full_disk_is_refused_and_a_small_one_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run([], overrides({"train__checkpoints_kept": 3})).config
    size = preflight.checkpoint_bytes(config)
    present = tmp_path / "step-1"
    present.mkdir()
    (present / "rank-00000.safetensors").write_bytes(b"x" * 1000)
    for free, refused, warned in (
        (size - 1, True, True),
        (size, False, True),
        (4 * size - 1001, False, True),
        (4 * size - 1000, False, False),
    ):
        monkeypatch.setattr(preflight, "free_bytes", lambda _, free=free: free)
        assert (preflight.disk_warning(config, tmp_path) is not None) == warned
        if refused:
            with pytest.raises(
                preflight.DiskError, match=rf"{size:,} bytes\).*\({free:,} bytes\) are"
            ):
                preflight.refuse_full_disk(config, tmp_path)
        else:
            assert preflight.refuse_full_disk(config, tmp_path).free == free
    for limit in (size - 1, size):
        monkeypatch.setattr(preflight, "file_limit", lambda limit=limit: limit)
        if limit == size:
            assert preflight.refuse_full_disk(config, tmp_path).checkpoint == size
        else:
            with pytest.raises(preflight.DiskError, match=rf"{size:,} .*of {limit:,} .*ulimit -f"):
                preflight.refuse_full_disk(config, tmp_path)


def test_advice_speaks_of_a_checkpoint_only_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moemesh", "train"])
    folder, console = RunFolder.open(tmp_path / "run"), Console(silent=False)
    parallel: Any = SimpleNamespace(mesh=Mesh.single("cpu"))
    own = Checkpoints(folder, parallel, cast("Any", None), TrainConfig(), console)
    outcome = SaveOutcome(2, "the disk is full", 0.1)
    monkeypatch.setattr(own._saver, "finish", lambda hurry: outcome)
    for step, words in ((None, "no checkpoint was written yet"), (1, "goes on from step 1: moe")):
        if step is not None:
            (folder.checkpoints / f"step-{step}").mkdir()
        with pytest.raises(CheckpointError, match="the disk is full") as caught:
            own.finish(raises=True)
        assert words in str(caught.value.facts["advice"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_cannot_write_its_last_files_has_ended_well(tmp_path: Path, ranks: int) -> None:
    """What it was started for is saved; that it trains again would help nobody."""
    run = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__restarts": 0}
    assert runs.moemesh(*runs.arguments(run, **keys), "--stop-after", "2").returncode == 0
    (run / "ledger.json").unlink()
    (run / "ledger.json").mkdir()
    done = runs.moemesh(*runs.arguments(run, **keys))
    assert done.returncode == 0 and f"{run}/ledger.json cannot be written" in done.stdout
    assert candidates(run / "checkpoints")[0] == 4 and not (run / "failure.json").exists()
