"""Asynchronous schedules equal their oracles bit for bit; every way to get versions wrong shows."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.model.batch import Batch
from moemesh.schedule.action import Schedule
from moemesh.schedule.check import check
from moemesh.schedule.versions import versions
from moemesh.sharding.load_run import load_run
from moemesh.train.command import open_samples
from moemesh.train.opening import own_batches
from moemesh.train.records.kept_schedules import recorded_segment
from tests.parity.asynchronous import Streamed, stream
from tests.parity.asynchronous_oracles import OneRank, Reference, delayed_gradients, replay
from tests.parity.models import MODEL
from tests.parity.training import Shape, train
from tests.train import runs

DEEP: dict[str, Any] = MODEL | {"num_layers": 5}
BIASED: dict[str, Any] = DEEP | {
    "router_score": "sigmoid",
    "router_selection_bias": True,
    "router_bias_rate": 0.05,
}
BASE: dict[str, Any] = {"steps": 4, "dtype": "float64", "warmup_steps": 2, "clip": 0.5}
SGD = BASE | {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW = BASE | {"optimizer": "adamw", "lr": 0.02}
SHAPE, PADDED = Shape(global_batch=8), Shape(global_batch=8, padding=True)

STREAM: dict[str, Any] = {"schedule": "pipedream", "microbatches": 4}
TWO: dict[str, Any] = {"schedule": "pipedream_2bw", "microbatches": 4}
AMPNET: dict[str, Any] = {"schedule": "ampnet", "microbatches": 4}

#: Name, model, plan, training, data.
DELAYED: list[Any] = [
    ("stash 2", DEEP, STREAM | {"pp": 2}, ADAMW, PADDED),
    ("stash 4", BIASED, STREAM | {"pp": 4}, SGD, SHAPE),
    ("stash bf16", DEEP, STREAM | {"pp": 2}, ADAMW | {"dtype": "bfloat16"}, SHAPE),
    ("2bw 2", BIASED, TWO | {"pp": 2, "update_window": 2}, ADAMW, SHAPE),
    ("2bw dp", BIASED, TWO | {"pp": 2, "dp": 2}, SGD, SHAPE),
    ("2bw 4", DEEP, TWO | {"pp": 4}, SGD, PADDED),
]
MESSAGES: list[Any] = [
    ("ampnet 2", BIASED, AMPNET | {"pp": 2, "update_window": 2}, ADAMW, PADDED),
    ("live 2", DEEP, AMPNET | {"pp": 2, "update_window": 1, "ampnet_backward": "live"}, SGD, SHAPE),
    ("ampnet 4", DEEP, AMPNET | {"pp": 4, "update_window": 1, "max_in_flight": 6}, SGD, SHAPE),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The oracle adds in the order of a rank, which has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_equal(found: Streamed, expected: Streamed) -> None:
    """Bit for bit; the reported auxiliary loss apart, which stages add up by themselves."""
    assert found.losses == expected.losses
    exact = all(weight.dtype == torch.float64 for weight in expected.weights.values())
    assert found.aux == pytest.approx(expected.aux, rel=1e-14 if exact else 1e-6)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    for name, bias in expected.biases.items():
        assert torch.equal(found.biases[name], bias), name


def assert_versions(streamed: Streamed) -> None:
    """Copies and lag equal the schedule's own count."""
    assert streamed.schedule is not None
    counted, breaches = versions(streamed.schedule)
    assert not breaches
    stages = [counted[0, stage] for stage in range(streamed.schedule.num_stages)]
    assert streamed.copies == [stage.copies for stage in stages]
    assert streamed.lags == [stage.lag for stage in stages]


@pytest.mark.representative("2bw dp")
@pytest.mark.parametrize("case", DELAYED, ids=lambda case: case[0])
def test_delayed_gradients(case: Any) -> None:
    _, model, plan, keys, shape = case
    streamed = stream(model, plan, keys, shape)
    expected = delayed_gradients(Reference(model, plan, keys, shape))
    assert_equal(streamed, expected)
    assert (streamed.copies, streamed.lags) == (expected.copies, expected.lags)
    assert_versions(streamed)


@pytest.mark.representative("ampnet 2")
@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: case[0])
def test_recorded_orders_replay(case: Any) -> None:
    _, model, plan, keys, shape = case
    streamed = stream(model, plan, keys, shape)
    assert streamed.schedule is not None
    check(streamed.schedule)
    expected = replay(Reference(model, plan, keys, shape), streamed.schedule)
    assert_equal(streamed, expected)
    assert (streamed.copies, streamed.lags) == (expected.copies, expected.lags)
    assert_versions(streamed)
    again = stream(model, plan, keys, shape, recorded=streamed.schedule)
    assert_equal(again, expected)
    # The other reading of the backward is another training.
    other = "recompute" if "ampnet_backward" in plan else "live"
    reference = Reference(model, plan | {"ampnet_backward": other}, keys, shape)
    assert replay(reference, streamed.schedule).losses != expected.losses


@pytest.mark.representative("pipedream")
@pytest.mark.parametrize(
    ("model", "plan", "keys", "shape"),
    [
        (BIASED, AMPNET, ADAMW, PADDED),
        # An update a microbatch.
        (DEEP, {"schedule": "pipedream", "microbatches": 1}, SGD, Shape(global_batch=2)),
    ],
    ids=["ampnet", "pipedream"],
)
def test_one_stage_is_plain_training(
    model: dict[str, Any], plan: dict[str, Any], keys: dict[str, Any], shape: Shape
) -> None:
    plain = train(model, {"microbatches": plan["microbatches"]}, keys, shape)
    streamed = stream(model, plan, keys, shape)
    assert (streamed.losses, streamed.aux) == (plain.losses, plain.aux)
    for name, weight in plain.weights.items():
        assert torch.equal(streamed.weights[name], weight), name


@pytest.mark.representative("static")
@pytest.mark.parametrize("schedule", [STREAM, AMPNET], ids=["static", "messages"])
def test_a_stop_request_ends_the_stream_everywhere(schedule: dict[str, Any]) -> None:
    """The stream ends after a step, with the weights of a run of that number of steps."""
    plan, long = schedule | {"pp": 2}, SGD | {"steps": 30, "warmup_steps": 0, "final_lr_ratio": 1.0}
    streamed = stream(DEEP, plan, long, SHAPE, stop_after=2)
    steps = len(streamed.losses)
    assert 2 < steps < 12
    assert streamed.schedule is not None
    short = long | {"steps": steps}
    reference = Reference(DEEP, plan, short, SHAPE)
    if schedule is STREAM:
        assert_equal(streamed, delayed_gradients(reference))
    else:
        assert streamed.schedule.total_microbatches == 4 * steps
        assert_equal(streamed, replay(reference, streamed.schedule))


def oracle_of(run: Path, schedule: Schedule | None = None) -> Streamed:
    """The oracle on the data of a run from the command line; `schedule`: what AMPNet did."""
    config = load_run([run / "config.toml"], []).config
    samples, mesh = open_samples(config, run), cast(Mesh, OneRank())
    size = config.data.global_batch

    def batches(step: int, dp: int) -> list[Batch]:
        ids = samples.ids_at((step - 1) * size, size)
        seed, count = config.train.seed, config.plan.microbatches
        return own_batches(samples, mesh, ids, count, seed=seed, step=step)

    keys = [section.model_dump() for section in (config.model, config.plan, config.train)]
    reference = Reference(*keys, SHAPE, batches)
    return delayed_gradients(reference) if schedule is None else replay(reference, schedule)


COMMAND = {"train__dtype": "float64", "plan__microbatches": 3, "model__num_layers": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"plan__schedule": "pipedream", "plan__pp": 2},
        {"plan__schedule": "pipedream_2bw", "plan__pp": 4, "plan__microbatches": 6},
    ],
    ids=lambda keys: keys["plan__schedule"],
)
def test_the_command_trains_as_the_oracle(tmp_path: Path, keys: dict[str, Any]) -> None:
    rows = runs.train(tmp_path / "run", **COMMAND | keys)
    assert runs.losses(rows) == oracle_of(tmp_path / "run").losses
    assert "validation_loss" in rows[-1]


@pytest.mark.slow
def test_a_recorded_run_is_repeated(tmp_path: Path) -> None:
    keys = COMMAND | {"plan__schedule": "ampnet", "plan__pp": 4, "plan__update_window": 1}
    rows = runs.train(tmp_path / "run", **keys)
    schedule, last = recorded_segment(tmp_path / "run", 1)
    assert last == 4
    assert runs.losses(rows) == oracle_of(tmp_path / "run", schedule).losses
    again = runs.train(tmp_path / "again", plan__replay=str(tmp_path / "run"), **keys)
    assert runs.losses(again) == runs.losses(rows)
    given = runs.arguments(tmp_path / "no", plan__replay=str(tmp_path), **keys)
    assert "has no recorded order that starts at step 1" in runs.said(*given, code=2)


@pytest.mark.slow
def test_a_run_resumes_where_it_drained(tmp_path: Path) -> None:
    """A checkpoint drains the stream, so that going on from it changes nothing."""
    keys = COMMAND | {"plan__schedule": "pipedream", "plan__pp": 2, "train__checkpoint_every": 2}
    rows = runs.train(tmp_path / "run", **keys)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    assert runs.losses(runs.train(tmp_path / "run", **keys)) == runs.losses(rows)
    whole = runs.train(tmp_path / "whole", **keys | {"train__checkpoint_every": 0})
    assert runs.losses(whole)[:2] == runs.losses(rows)[:2]
    assert runs.losses(whole)[2:] != runs.losses(rows)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "ampnet"])
def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path, schedule: str) -> None:
    keys = COMMAND | {"plan__schedule": schedule, "plan__pp": 2, "train__steps": 100_000}
    run = tmp_path / "run"
    out, _ = runs.interrupted(run, signal.SIGINT, 130, **keys)
    assert "saved; the same command resumes from there" in out
    steps = [row["step"] for row in runs.metrics(run)]
    assert steps == list(range(1, steps[-1] + 1))
    assert (run / "checkpoints" / f"step-{steps[-1]}").is_dir()
