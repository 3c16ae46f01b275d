"""What is said before a run starts, and what is refused because it cannot fit."""

import json
import re
from pathlib import Path

import pytest

from moemesh.sharding.load_run import load_run
from moemesh.trace.memory_profile import format_bytes
from moemesh.train.preflight import (
    TooLargeError,
    memory_warning,
    predicted_memory,
    preflight_warnings,
    refuse_too_large,
    untrainable,
)
from tests.mistakes.files import MODEL


def said(*overrides: str) -> list[str]:
    return list(preflight_warnings(load_run([], overrides, {}).config))


def test_a_sensible_plan_needs_no_remark() -> None:
    assert said() == [] == said("train.steps=8")  # a trial of a few steps
    assert said("plan.pp=4", "plan.microbatches=8", "plan.schedule=zb_h1") == []
    assert said("plan.dp=2", "plan.ep=2", "plan.spare_slots=1") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.schedule=gpipe"], "plan.schedule = gpipe does nothing"),
        (["plan.spare_slots=1"], "plan.spare_slots = 1 does nothing"),
        (["plan.dispatcher=hierarchical"], "plan.dispatcher = hierarchical does nothing"),
        (
            ["train.steps=8", "train.warmup_steps=10"],
            "steps = 8: the learning rate ends at 2.4e-03",
        ),
        (["plan.pp=4"], "plan.microbatches = 1 keeps 4 pipeline ranks waiting for 75% of a step"),
    ],
)
def test_what_was_probably_not_meant_gets_one_remark(overrides: list[str], words: str) -> None:
    (remark,) = said(*overrides)
    assert words in remark


def test_many_ranks_on_few_cores() -> None:
    config = load_run([], ["plan.dp=2"], {}).config
    assert list(preflight_warnings(config, 2)) == []
    (remark,) = preflight_warnings(config, 100_000)
    assert "100000 ranks share" in remark


def test_streams_that_never_drain_have_no_bubble_of_a_step() -> None:
    assert said("plan.pp=4", "plan.schedule=pipedream") == []


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
        (["data.global_batch=4", "data.seq_len=1024"], 0.17, "data.seq_len = "),
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
    # The change is legal, and what it is said to need is what it needs.
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


def test_parts_of_a_step_without_a_sequence_are_counted() -> None:
    assert said("plan.dp=4", "plan.microbatches=8") == []
    (remark,) = said("plan.dp=4", "plan.microbatches=9")
    assert "data.global_batch = 32 sequences into 36 parts: 4 are empty" in remark


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
    assert said(*given("gone.jsonl", "text")) == []  # told where the data is looked at
    for format in ("text", "bytes"):
        (remark,) = said(*given("chats.jsonl", format))
        assert f"= {format} trains on {tmp_path / 'chats.jsonl'} as it stands: 20 of " in remark


@pytest.mark.parametrize(
    ("overrides", "legal", "words"),
    [
        (["plan.dp=33"], ["plan.dp=32"], "1 of the 33 replicas would have nothing to do"),
        (["plan.dp=64"], ["plan.dp=64", "data.global_batch=64"], "32 of the 64 replicas"),
        (["lora.rank=8"], ["lora.rank=8", "train.train_only=*"], "beside random weights"),
    ],
)
def test_what_cannot_be_right_is_refused(
    overrides: list[str], legal: list[str], words: str
) -> None:
    (problem,) = untrainable(load_run([], overrides, {}))
    assert words in problem.message and problem.fix
    assert untrainable(load_run([], legal, {})) == []


def test_adapters_of_a_run_that_goes_on_or_starts_from_weights_are_right(tmp_path: Path) -> None:
    assert untrainable(load_run([], ["lora.rank=8"], {}), tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    assert untrainable(load_run([], ["lora.rank=8"], {}), tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert untrainable(load_run([], ["lora.rank=8", f"model.path={tmp_path}"], {})) == []
