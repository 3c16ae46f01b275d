"""Warnings before a run starts, runs that cannot fit, and disks that are full or fill up."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moemesh.checkpoint import retention
from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.saver import SaveOutcome
from moemesh.checkpoint.stored import candidates, open_stored
from moemesh.comm.mesh import Mesh
from moemesh.config.train import TrainConfig
from moemesh.planner.machine_memory import (
    TooLargeError,
    memory_warning,
    refuse_too_large,
)
from moemesh.planner.traffic.own_memory import predicted_memory
from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import format_bytes
from moemesh.train.console import Console
from moemesh.train.preparation import preflight_warnings, untrainable
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.weights.saving import Checkpoints
from tests.mistakes.files import MODEL
from tests.train import runs


def said(*overrides: str) -> list[str]:
    return list(preflight_warnings(load_run([], overrides, {}).config))


def test_a_sensible_plan_needs_no_remark() -> None:
    assert said() == [] == said("train.steps=8")  # a trial of a few steps
    assert said("plan.pp=4", "plan.microbatches=8", "plan.schedule=zb_h1") == []
    assert said("plan.dp=2", "plan.ep=2", "plan.spare_slots=1") == []
    assert said("plan.dp=4", "plan.microbatches=8") == []
    # Streams that never drain have no bubble of a step.
    assert said("plan.pp=4", "plan.schedule=pipedream") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.schedule=gpipe"], "plan.schedule = gpipe has no effect"),
        (["plan.spare_slots=1"], "plan.spare_slots = 1 has no effect"),
        (["train.rebalance_every=2"], "rebalance_every = 2 has no effect: it needs plan.ep > 1"),
        (["plan.dispatcher=hierarchical"], "plan.dispatcher = hierarchical has no effect"),
        (["train.momentum=0.9"], "momentum = 0.9 has no effect: it needs train.optimizer = sgd"),
        (["train.optimizer=sgd", "train.epsilon=1e-6"], "train.epsilon = 1e-06 has no effect"),
        (["train.steps=8", "train.warmup_steps=10"], "= 8: the learning rate ends at 2.4e-03"),
        (["plan.pp=4"], "plan.microbatches = 1 keeps 4 pipeline ranks waiting for 75% of a step"),
        (["plan.dp=4", "plan.microbatches=9"], "= 32 sequences into 36 parts: 4 are empty"),
    ],
)
def test_what_was_probably_not_meant_gets_one_remark(overrides: list[str], words: str) -> None:
    (remark,) = said(*overrides)
    assert words in remark


#: Models of transformers' code have notes of their own on dropout and jitter.
OWN = ("moemesh",)
BOTH = (*OWN, "transformers")


@pytest.mark.parametrize(
    ("implementations", "values", "tuned", "words"),
    [
        (OWN, {"router_jitter_noise": 0.0, "attention_dropout": 0.0}, {"lora_dropout": 0.0}, []),
        (
            OWN,
            {"router_jitter_noise": 0.125, "attention_dropout": 0.125},
            {"lora_dropout": 0.125},
            ["attention_dropout = 0.125 is", "router_jitter_noise = 0.125 is", "lora_dropout = 0"],
        ),
        (BOTH, {}, {"target_parameters": ["experts.gate_up_proj"]}, ["train an A each"]),
        (BOTH, {}, {"target_parameters": ["experts.down_proj"]}, []),
    ],
)
def test_what_trains_otherwise_in_transformers_or_peft_gets_a_remark(
    tmp_path: Path,
    implementations: Sequence[str],
    values: dict[str, float],
    tuned: dict[str, Any],
    words: list[str],
) -> None:
    folder, adapters = tmp_path / "model", tmp_path / "adapters"
    for path in (folder, adapters):
        path.mkdir()
    values |= {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "mixtral"}))
    tuned |= {"peft_type": "LORA", "r": 4}
    (adapters / "adapter_config.json").write_text(json.dumps(tuned))
    config = load_run([], [f"model.path={folder}", f"lora.path={adapters}"], {}).config
    for implementation in implementations:
        model = config.model.model_copy(update={"implementation": implementation})
        remarks = list(preflight_warnings(replace(config, model=model)))
        assert len(remarks) == len(words)
        assert all(part in remark for part, remark in zip(words, remarks, strict=True))


def test_many_ranks_on_few_cores() -> None:
    config = load_run([], ["plan.dp=2"], {}).config
    assert list(preflight_warnings(config, 2)) == []
    (remark,) = preflight_warnings(config, 100_000)
    assert "100000 ranks share" in remark


def test_states_that_exceed_the_memory_are_refused() -> None:
    """AdamW in float32: 16 bytes a parameter, on all ranks that hold it."""
    config = load_run([], [], {}).config
    needed = 16 * 3_712_128
    refuse_too_large(config, needed)
    with pytest.raises(TooLargeError, match=r"56\.6 MiB for weights.* has 56\.6 MiB"):
        refuse_too_large(config, needed - 1)
    replicas = load_run([], ["plan.dp=2"], {}).config
    with pytest.raises(TooLargeError, match="2 rank"):
        refuse_too_large(replicas, 2 * needed - 1)
    large = load_run([], ["model.preset=mixtral-8x7b", "plan.dp=8", "plan.ep=8"], {}).config
    with pytest.raises(TooLargeError, match=r"optimizer of the first \d of 8 rank"):
        refuse_too_large(large, 2**39)


@pytest.mark.parametrize(
    ("overrides", "share", "change"),
    [
        ([], 0.6, "plan.microbatches = 2 needs"),
        ([], 0.2, "plan.microbatches = "),
        (["plan.microbatches=32"], 0.98, 'plan.recompute = "full" needs'),
        (["plan.dp=8"], 0.95, "plan.microbatches = 2 needs"),
        (["data.global_batch=4", "data.seq_len=1024"], 0.2, "data.seq_len = "),
    ],
)
def test_memory_that_is_short_names_the_nearest_change(
    overrides: list[str], share: float, change: str
) -> None:
    config = load_run([], overrides, {}).config
    ranks = range(config.plan.world_size)
    needed = sum(predicted_memory(config, rank).peak for rank in ranks)
    assert memory_warning(config, needed) is None
    memory = int(needed * share)
    warning = memory_warning(config, memory)
    assert warning is not None and change in warning
    assert f"need {format_bytes(needed)} by prediction" in warning
    # The change is legal, and it needs the memory that the warning prints.
    given = re.findall(r"(\w+\.\w+) = ([\w\"]+)", warning.partition(": ")[2])
    changed = load_run([], [*overrides, *(f"{key}={value}" for key, value in given)], {}).config
    smaller = sum(predicted_memory(changed, rank).peak for rank in ranks)
    assert smaller <= memory and warning.endswith(f"needs {format_bytes(smaller)}")


def test_memory_that_no_change_makes_enough() -> None:
    warning = memory_warning(load_run([], [], {}).config, 1 << 20)
    assert warning is not None and warning.endswith("with `moemesh plan`")


@pytest.mark.parametrize(
    ("overrides", "usual", "high"),
    [
        ([], "0.003", "0.03"),
        (["model.path=HERE"], "1e-05", "1e-4"),
        (["model.path=HERE", "lora.rank=8"], "0.0001", "1e-3"),
        (["train.optimizer=sgd"], "0.003", "3.0"),
    ],
)
def test_a_rate_far_above_the_usual_one_is_named(
    tmp_path: Path, overrides: list[str], usual: str, high: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    given = [one.replace("HERE", str(tmp_path)) for one in overrides]
    assert str(load_run([], given, {}).config.train.lr) == usual and said(*given) == []
    assert said(*given, f"train.lr={float(high) * 0.9}") == []
    (remark,) = said(*given, f"train.lr={float(high) * 2}")
    times = "2,000" if "sgd" in str(given) else "20"
    assert f"is {times} times {float(usual):g}, the default for" in remark
    (remark,) = said(*given, f"train.lr={float(usual) * 1e30}")
    assert " is 1e+30 times " in remark


@pytest.mark.parametrize("key", ["data", "validation", "sources"])
def test_json_that_is_trained_on_as_text_is_named(tmp_path: Path, key: str) -> None:
    lines = ['{"messages": [{"role": "user", "content": "a"}]}\n'] * 30
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    (tmp_path / "plain.txt").write_text("{ no JSON }\n" * 30)

    def given(name: str, format: str) -> list[str]:
        file = str(tmp_path / name)
        if key == "sources":
            return [f'data.sources=[{{path = "{file}", format = "{format}"}}]']
        names = {"data": ("path", "format"), "validation": ("validation", "validation_format")}
        return [f"data.{names[key][0]}={file}", f"data.{names[key][1]}={format}"]

    assert said(*given("chats.jsonl", "jsonl")) == [] == said(*given("plain.txt", "text"))
    assert said(*given("gone.jsonl", "text")) == []  # reported where the data is opened
    for format in ("text", "bytes"):
        (remark,) = said(*given("chats.jsonl", format))
        assert f"= {format} trains on {tmp_path / 'chats.jsonl'} as text: 20 of " in remark


def test_adapters_of_a_run_that_goes_on_or_starts_from_weights_are_right(tmp_path: Path) -> None:
    assert untrainable(load_run([], ["lora.rank=8"], {}), tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert untrainable(load_run([], ["lora.rank=8"], {}), tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert untrainable(load_run([], ["lora.rank=8", f"model.path={tmp_path}"], {})) == []


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
    runs.train(run, **keys | {"train__steps": 1})
    (step,) = candidates(run / "checkpoints")
    stored = open_stored(run / "checkpoints", step)
    # Without headers and the routers' biases.
    sizes = (
        sum(piece.num_bytes for piece in stored.slices(file) if "selection_bias" not in piece.name)
        for file in stored.manifest.files
    )
    predicted = retention.checkpoint_bytes(load_run([], runs.settings(runs.small(**keys))).config)
    assert predicted == sum(sizes)


def test_a_full_disk_is_refused_and_a_small_one_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.config_of(tmp_path, train__checkpoints_kept=3)
    size = retention.checkpoint_bytes(config)
    present = tmp_path / "step-1"
    present.mkdir()
    (present / "rank-00000.safetensors").write_bytes(b"x" * 1000)
    for free, limit, refusal, warned in (
        (size - 1, None, rf"{size:,} bytes\).*\({size - 1:,} bytes\) are", True),
        (size, None, "", True),
        (5 * size - 1001, None, "", True),
        (5 * size - 1000, None, "", False),
        (5 * size, size - 1, rf"{size:,} .*of {size - 1:,} .*ulimit -f", False),
        (5 * size, size, "", False),
    ):
        monkeypatch.setattr(retention, "free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(retention, "file_limit", lambda limit=limit: limit)
        assert (retention.disk_warning(config, tmp_path) is not None) == warned
        with pytest.raises(retention.DiskError, match=refusal) if refusal else nullcontext():
            assert retention.refuse_full_disk(config, tmp_path)[::3] == (size, free)


def test_advice_speaks_of_a_checkpoint_only_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moemesh", "train"])
    folder, console = RunFolder.open(tmp_path / "run"), Console(silent=False)
    parallel: Any = SimpleNamespace(mesh=Mesh.single("cpu"))
    own = Checkpoints(folder, parallel, cast("Any", None), TrainConfig(), console)
    outcome = SaveOutcome(2, "the disk is full", 0.1)
    monkeypatch.setattr(own._saver, "finish", lambda hurry: outcome)
    for step, words in ((None, "no checkpoint was written yet"), (1, "resumes from step 1: moe")):
        if step is not None:
            (folder.checkpoints / f"step-{step}").mkdir()
        with pytest.raises(CheckpointError, match="the disk is full") as caught:
            own.finish(raises=True)
        assert words in str(caught.value.facts["advice"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_cannot_write_its_last_files_has_ended_well(tmp_path: Path, ranks: int) -> None:
    """The last checkpoint is saved; another start would be of no use."""
    run = tmp_path / "run"
    keys = {"plan__dp": ranks, "train__restarts": 0}
    runs.said(*runs.arguments(run, **keys), "--stop-after", "2")
    (run / "ledger.json").unlink()
    (run / "ledger.json").mkdir()
    assert f"{run}/ledger.json cannot be written" in runs.said(*runs.arguments(run, **keys))
    assert candidates(run / "checkpoints")[0] == 4 and not (run / "failure.json").exists()
