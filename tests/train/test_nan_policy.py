"""Steps that are not finite and losses that jump: skip, rollback, stop, under every schedule."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from moemesh.checkpoint.saver import SaveJob
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.monitor.supervisor import StopRequest
from moemesh.parallel.parallelize import RankModel
from moemesh.train import session as sessions
from moemesh.train.command import open_samples, train_rank
from moemesh.train.console import Console
from moemesh.train.numerics.nan_check import NonfiniteOrigin
from moemesh.train.numerics.nan_policy import CENTRE, LEAST, WINDOW, Diverged, NaNPolicy, Spikes
from moemesh.train.numerics.replica_checksums import CopiesDiffer
from moemesh.train.numerics.repro_bundle import ALONE, ReproBundle, replay_step
from moemesh.train.opening import construct
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.run_folder import Events, RunFolder
from moemesh.train.step import StepResult
from tests.ranks import mesh_on_ranks
from tests.train.runs import config_of, metrics, rows_of, shared_file

BATCH, STEPS = 4, 6
#: Settings of all runs here.
SETTINGS: dict[str, Any] = {
    "model__num_layers": 4,
    "data__global_batch": BATCH,
    "train__steps": STEPS,
    "train__checkpoint_every": 2,
    "train__vote_every": 0,
}
#: The step that is spoiled at first.
BAD = 4
PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "synchronous": {"dp": 2, "ep": 2},
    "validated": {"pp": 2, "microbatches": 4, "optimizer_validation": "after"},
    "asynchronous": {"pp": 2, "microbatches": 2, "schedule": "pipedream_2bw", "update_window": 2},
}


class Spoiled(NamedTuple):
    """Result of a run on one rank: exception or "", its facts; on rank 0 also events and rows."""

    error: str
    facts: dict[str, Any]
    events: list[dict[str, Any]]
    steps: list[int]
    finite: bool
    position: int


def run_on_rank(
    mesh: Mesh, folder: Path, keys: dict[str, Any], bad_step: int, damage: bool
) -> Spoiled:
    """Train with one injected NaN: the first sample of step `bad_step` gets it in layer 2, or with
    `damage` a weight of rank 1 becomes NaN after the update of that step, once."""
    config = config_of(folder, **SETTINGS | keys)
    # Another rank may have begun to write there.
    run = RunFolder.open(folder / "run", "auto" if mesh.rank == 0 else None)
    samples = open_samples(config, run.path)
    (bad,) = samples.ids_at((bad_step - 1) * BATCH, 1)
    tokens_S = torch.from_numpy(samples.batch(np.array([bad]))[0])[0]

    def spoil(parallel: RankModel) -> RankModel:
        is_bad = False

        def begin(_: object, args: tuple[Any, ...]) -> None:
            nonlocal is_bad
            is_bad = bool((args[0].tokens_BS == tokens_S).all(1).any()) and args[0].training

        def end(_: object, args: object, output: Tensor) -> Tensor:
            return torch.where(torch.tensor(is_bad), torch.nan, output)

        parallel.model.register_forward_pre_hook(begin)
        if "2" in parallel.model.layers:
            parallel.model.layers["2"].attention.register_forward_hook(end)
        return parallel

    held: list[RankModel] = []

    def build(*args: Any, **options: Any) -> RankModel:
        parallel = construct(*args, **options)
        held.append(parallel if damage else spoil(parallel))
        return held[-1]

    num_updates, plain = 0, Optimizer.step

    def update(self: Optimizer, *args: Any) -> None:
        nonlocal num_updates
        plain(self, *args)
        num_updates += 1
        if damage and mesh.rank == 1 and num_updates == bad_step:
            held[0].model.get_parameter("norm.weight").data[0] = torch.nan

    plain_save = SaveJob.run

    def save(self: SaveJob) -> None:
        # With `damage`, longer than the steps up to it: the run ends while a save is pending.
        time.sleep(0.2 * damage)
        plain_save(self)

    error, facts = "", {}
    with (
        mock.patch.object(sessions, "construct", build),
        mock.patch.object(Optimizer, "step", update),
        mock.patch.object(SaveJob, "run", save),
    ):
        try:
            events = Events(run if mesh.rank == 0 else None)
            console = Console(silent=True, events=events)
            train_rank(
                config=config,
                mesh=mesh,
                folder=run,
                samples=samples,
                console=console,
                stop=StopRequest(alone=False),
            )
        except (Diverged, CopiesDiffer) as caught:
            error, facts = str(caught), caught.facts
    finite = all(bool(p.isfinite().all()) for p in held[0].model.parameters())
    if mesh.rank:
        return Spoiled(error, facts, [], [], finite, 0)
    told, steps = rows_of(run.path / "events.jsonl"), [row["step"] for row in metrics(run.path)]
    saves = [
        p for p in run.checkpoints.glob("step-*/manifest.json") if ".tmp-" not in p.parent.name
    ]
    manifest = max(saves, key=lambda p: int(p.parent.name[5:]), default=None)
    position = json.loads(manifest.read_text())["state"]["position"] if manifest else 0
    return Spoiled(error, facts, told, steps, finite, position)


def run(
    tmp_path: Path, plan: str, bad_step: int = BAD, *, damage: bool = False, **keys: Any
) -> list[Spoiled]:
    shared_file(tmp_path)
    keys |= {f"plan__{key}": value for key, value in PLANS[plan].items()}
    layout = Plan(**PLANS[plan]).layout
    return mesh_on_ranks(layout, run_on_rank, tmp_path, keys, bad_step, damage)


def of_kind(events: list[dict[str, Any]], kind: str) -> list[str]:
    return [event["text"] for event in events if event["kind"] == kind]


@pytest.mark.representative("validated")
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_skipped_and_its_origin_is_told(tmp_path: Path, plan: str) -> None:
    first, *others = run(tmp_path, plan)
    assert not first.error and all(rank.finite for rank in (first, *others))
    assert first.steps == list(range(1, STEPS + 1)) and first.position == STEPS * BATCH
    (message,) = of_kind(first.events, "skipped")
    assert message.startswith(f"step {BAD}: ") and "layers.2.attention is NaN first" in message
    assert "microbatch 0" in message and "moemesh replay" in message


@pytest.mark.representative("synchronous")
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_goes_back_and_leaves_the_samples_out(tmp_path: Path, plan: str) -> None:
    first, *others = run(tmp_path, plan, train__on_nonfinite="rollback")
    assert not first.error and all(rank.finite for rank in (first, *others))
    assert first.steps == list(range(1, STEPS + 1))
    (message,) = of_kind(first.events, "rollback")
    start = 2 * BATCH
    assert f"back to the checkpoint of step 2; the samples {start} to " in message
    end = int(message.split(" of the data order")[0].split(" to ")[-1]) + 1
    # Every sample up to the position was read once by a step that counts, or is named.
    assert first.position == STEPS * BATCH + (end - start) and end >= BAD * BATCH


@pytest.mark.representative("asynchronous")
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_stops_with_facts(tmp_path: Path, plan: str) -> None:
    for rank in run(tmp_path, plan, train__on_nonfinite="stop"):
        assert f"step {BAD}: " in rank.error and rank.finite
        assert rank.facts["layer"] == 2 and rank.facts["microbatch"] == 0
        assert rank.facts["phase"] == "forward" and len(rank.facts["samples"]) >= 1
        assert "lower train.lr" in rank.facts["advice"]


def replay_on_rank(mesh: Mesh, folder: Path, overrides: list[str]) -> NonfiniteOrigin:
    return replay_step(ReproBundle(folder, overrides), mesh)


def test_skips_are_bounded_and_the_advice_is_not_the_same_command(tmp_path: Path) -> None:
    """The weights have become so large that every step overflows; a replay does, too, anywhere."""
    keys: dict[str, Any] = {"train__lr": 1e30, "train__steps": 30, "train__max_skips": 3}
    outcomes = run(tmp_path, "synchronous", bad_step=100, **keys)
    for rank in outcomes:
        assert "no step of the last 3 was finite" in rank.error
        advice = rank.facts["advice"]
        assert "the same command would end in the same way" in advice and "1e+30" in advice
    rank = outcomes[0]
    # No checkpoint is made of steps that are skipped, in the place of an older one.
    saved = [int(path.name[5:]) for path in (tmp_path / "run/checkpoints").glob("step-*")]
    assert max(saved, default=0) <= rank.facts["finite_step"]
    messages = [*of_kind(rank.events, "skipped"), rank.error]
    # The weights are the cause, not the samples of a step.
    assert all("; samples " not in one for one in messages[-3:])
    bundle = Path(rank.facts["bundle"])
    body = json.loads((bundle / "bundle.json").read_text())
    origin = replay_on_rank(Mesh.single("cpu"), bundle, list(ALONE))
    assert (origin.phase, origin.name) == (body["found"]["phase"], rank.facts["module"])
    assert origin.microbatch == body["found"]["microbatch"]
    with pytest.raises(UserError, match="not a replay bundle"):
        ReproBundle(tmp_path, [])


def test_no_sample_is_blamed_where_all_are_alike() -> None:
    some = NonfiniteOrigin(phase="loss", rank=0, ranks=(0,), value="NaN", samples=(7, 8))
    assert "; samples 7, 8)" in str(some)
    text = str(replace(some, num_alike=2))
    assert "all 2 sequences alike" in text and "7, 8" not in text


def test_each_step_in_a_row_names_its_own_samples() -> None:
    said: list[str] = []
    guard = NaNPolicy(TrainConfig(max_skips=3), lambda text, kind: said.append(text))
    asked: list[tuple[int, bool]] = []

    def examine(step: int, wants_bundle: bool) -> tuple[NonfiniteOrigin, str | None]:
        asked.append((step, wants_bundle))
        origin = NonfiniteOrigin(
            phase="loss", rank=0, ranks=(0,), value="NaN", samples=(100 + step,)
        )
        return origin, "failures/step-4" if wants_bundle else None

    nothing = torch.zeros(0, 0, dtype=torch.int64)
    bad = StepResult(
        loss=math.nan, grad_norm=math.nan, aux_loss=0.0, mtp_loss=None, num_tokens=1,
        counts_LE=nothing, dropped_L=nothing, skipped=True,
    )  # fmt: skip
    for step in (4, 5, 6):
        guard.judge(step, bad)
        if step < 6:
            assert guard.decide(examine) is None
            assert f"samples {100 + step})" in said[-1]
            assert ("moemesh replay" in said[-1]) == (step == 4)
    with pytest.raises(Diverged, match="samples 106") as caught:
        guard.decide(examine)
    assert asked == [(4, True), (5, False), (6, False)]
    assert caught.value.facts["samples"] == [106]
    assert caught.value.facts["bundle"] == "failures/step-4"
    assert "look at the samples named" in caught.value.facts["advice"]


def test_bundles_are_bounded(tmp_path: Path) -> None:
    """A bundle that would be too large has no weights, and its replay reports that."""
    keys: dict[str, Any] = {"train__lr": 1e30, "train__bundle_gib": 1e-4, "train__max_skips": 2}
    (rank,) = run(tmp_path, "alone", bad_step=100, **keys)
    bundle = Path(rank.facts["bundle"])
    assert not (bundle / "weights").exists() and (bundle / "batch.safetensors").exists()
    with pytest.raises(UserError, match="written without weights"):
        ReproBundle(bundle, [])


@pytest.mark.representative("skip")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, policy: str) -> None:
    """Nor do they push the last sound checkpoint out: the run stops, or goes back to it."""
    keys: dict[str, Any] = {"train__on_nonfinite": policy, "train__checkpoints_kept": 1}
    ranks = run(tmp_path, "synchronous", damage=True, **keys)
    if policy == "rollback":
        assert not any(rank.error for rank in ranks) and all(rank.finite for rank in ranks)
        assert ranks[0].position == STEPS * BATCH + 2 * BATCH
        return
    for rank in ranks:
        assert "the state of step 4 is not finite and is not saved" in rank.error
        assert rank.facts["rank"] == 1 and rank.facts["parameter"] == "norm.weight"
        assert "the same command resumes from the newest checkpoint" in rank.facts["advice"]
    assert ranks[0].position == 2 * BATCH, "the newest checkpoint is that of step 2"


def test_copies_are_compared_before_they_are_saved(tmp_path: Path) -> None:
    for rank in run(tmp_path, "synchronous", damage=True, train__vote_every=100):
        assert "step 4: norm.weight: the copies of ranks 0, 1 differ" in rank.error
        assert rank.facts["ranks"] == [0, 1] and "compared before" in rank.facts["advice"]


# Loss spikes.


def scores(losses: np.ndarray) -> np.ndarray:
    """Scores of many losses at once, which :class:`Spikes` computes one after another."""
    windows = np.lib.stride_tricks.sliding_window_view(losses[:-1], WINDOW)
    centre = np.median(windows[:, -CENTRE:], axis=1)
    spread = 1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(windows, axis=1)), axis=1)
    return (losses[WINDOW:] - centre) / spread


@pytest.mark.representative("2.0")
@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_noise_raises_no_alarm(slope: float) -> None:
    """At most 1 in 100,000 steps; here of a loss that falls, too."""
    generator = np.random.default_rng(0)
    steps = np.arange(100_000)
    losses = 3 + slope * np.exp(-steps / 300) + 0.05 * generator.normal(size=len(steps))
    all_scores = scores(losses)
    judge = Spikes(7.0)
    judged = [judge.score(loss) for loss in losses[: WINDOW + 200]]
    assert judged[WINDOW:] == pytest.approx(all_scores[:200].tolist())
    assert judged[:LEAST] == [0.0] * LEAST
    assert sum(judge.is_spike(score) for score in all_scores) <= 1


def test_spikes_of_ten_deviations_are_found() -> None:
    generator = np.random.default_rng(1)
    judge, num_spikes = Spikes(7.0), 0
    noise = generator.normal(size=(400, WINDOW + 1))
    noise[:, -1] += 10
    for losses in 3 + 0.05 * noise:
        num_spikes += judge.is_spike(float(scores(losses)[0]))
    assert num_spikes >= 0.95 * len(noise)


def test_a_judge_goes_on_from_its_state() -> None:
    losses = [3 + 0.1 * ((7 * n) % 5) for n in range(60)]
    whole, first, second = Spikes(7.0), Spikes(7.0), Spikes(7.0)
    expected = [whole.score(loss) for loss in losses]
    head = [first.score(loss) for loss in losses[:40]]
    second.load_state(json.loads(json.dumps(first.state())))
    assert head + [second.score(loss) for loss in losses[40:]] == expected
    assert max(expected) < 7 and whole.is_spike(whole.score(10.0))
