"""Explanations: each cause on a folder that has it, and no claim without a file that shows it."""

import fcntl
import json
import random
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moemesh.cli.insight import explain as explain_verb
from moemesh.cli.insight import report as report_verb
from moemesh.config.changes import compare
from moemesh.config.errors import ConfigError, UserError
from moemesh.config.load import resolved_toml, with_recorded
from moemesh.monitor.failures import CAUSES, OTHER
from moemesh.planner.estimate import estimate_run
from moemesh.report import page
from moemesh.report.bars import EXPOSED
from moemesh.report.bounds import BOUNDS
from moemesh.report.explain import explain, lower_rate
from moemesh.sharding.load_run import load_run
from moemesh.trace.ledger import Ledger
from moemesh.trace.run import PlannedStep, Run, ledgers_to_json
from moemesh.trace.timeline import Timeline, WorkRecord
from moemesh.train.records.run_folder import refuse_changes
from tests.report.fake_run import CONFIG, entry, metrics_row, write_fake_run


def timeline(
    *,
    data: float = 0.0,
    wait: float = 0.0,
    forward: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    reduce: float = 0.0,
    optimizer: float = 0.0,
    source: str = "measured",
) -> Timeline:
    """One step of four ranks in two stages; the arguments are seconds of its parts. The sum of
    gradients ends on all ranks together, `reduce` seconds after the last forward."""
    records: list[WorkRecord] = []
    for rank, length in enumerate(forward):
        begin, end = data + wait, data + wait + max(forward) + reduce
        place = {"wait": wait, "kind": "F", "stage": rank // 2, "microbatch": 0}
        spans = (
            ("data", 0.0, data, {}),
            ("0F0", begin, begin + length, place),
            ("reduce", begin + length, end, {}),
            ("optimizer", end, end + optimizer, {}),
        )
        records += [
            WorkRecord(rank=rank, start=start, end=stop, name=name, step=7, **more)
            for name, start, stop, more in spans
        ]
    return Timeline(ranks=(0, 1, 2, 3), records=tuple(records), source=source)


def folder_of(path, line=None, simulated=None, config=CONFIG, cores=None, **row):
    """A finished run of 20 steps with this timeline, of 4 ranks on a machine of `cores` cores."""
    write_fake_run(path, num_steps=20)
    (path / "config.toml").write_text(config.replace("steps = 400", "steps = 20"))
    (path / "summary.json").write_text('{"steps": 20}')
    if cores:
        start = {"hardware": {"usable_cores": cores}, "devices": ["cpu"] * 4}
        start["hosts"] = [{"host": "laptop", "ranks": [0, 1, 2, 3]}]
        (path / "provenance.json").write_text(json.dumps({"starts": [start]}))
    if row:
        chance = random.Random(1)
        rows = [replace(metrics_row(step, 20, chance), **row) for step in range(1, 21)]
        rows = [replace(r, seconds=1.0) for r in rows]
        (path / "metrics.jsonl").write_text("".join(r.to_line() for r in rows))
    for name, value in (("timeline.json", line), ("timeline_simulated.json", simulated)):
        (path / name).unlink(missing_ok=True)
        if value is not None:
            (path / name).write_text(json.dumps(value.to_json()))
    return path


def failed(folder, **failure):
    """The explanation of a run with this failure report."""
    (folder / "failure.json").write_text(json.dumps(failure))
    return explain(Run.load(folder))


RECOMPUTE = CONFIG.replace("[data]", 'recompute = "full"\n\n[data]')
#: Timeline, simulated timeline, more arguments, and a proposed change, for each cause.
CASES = {
    "data": (timeline(data=3.0), None, {}, "data.cache="),
    "communication": (timeline(reduce=3.0), None, {}, "plan."),
    "bubble": (
        *(timeline(wait=3.0), timeline(wait=3.0, source="simulated")),
        *({}, "plan.microbatches=16"),
    ),
    "imbalance": (timeline(forward=(1.0, 8.0, 1.0, 8.0)), None, {}, "train.rebalance_every=50"),
    "shared cores": (timeline(reduce=3.0), None, {"cores": 2}, ""),
    "optimizer": (timeline(optimizer=3.0), None, {}, ""),
    "memory": (timeline(), None, {"config": RECOMPUTE}, "plan.recompute=selective"),
    "compute": (timeline(), None, {}, ""),
}


def test_every_cause_has_a_case():
    assert CASES.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", CASES)
def test_what_bounds_a_run(tmp_path, name):
    line, simulated, more, change = CASES[name]
    explanation = explain(Run.load(folder_of(tmp_path / "run", line, simulated, **more)))
    largest = max(explanation.shares, key=lambda cause: explanation.shares[cause])
    # Of a run that recomputes, three quarters of the passes are work that is wanted, and of two
    # ranks one computes all the time: the remedy is that of the largest part which is lost.
    assert explanation.cause == largest == ("compute" if name in ("memory", "imbalance") else name)
    assert sum(explanation.shares.values()) == pytest.approx(1)
    assert explanation.state == "finished" and "step 20 of 20" in explanation.text
    share = f"{explanation.shares[name]:.0%} of a step"
    assert share in explanation.text
    command = shlex.split(explanation.command)
    if change:
        overrides = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
        assert any(override.startswith(change) for override in overrides)
        # The command is legal, and the run continues in its folder, which permits every change.
        assert command[command.index("--out") + 1] == str(tmp_path / "run")
        assert overrides[-1] == "train.steps=40"
        file = tmp_path / "run" / "config.toml"
        configs = [
            with_recorded(load_run([file], more, environ={}).config, tmp_path / "run")
            for more in ((), overrides)
        ]
        allowed = [command[i + 1] for i, word in enumerate(command) if word == "--allow-change"]
        refuse_changes(compare(*map(resolved_toml, configs)), frozenset(allowed))
        assert len(allowed) == (name == "imbalance")  # train.rebalance_every
    else:
        assert command[:2] == ["moemesh", "profile"]


def test_ranks_that_share_cores_are_named_in_place_of_communication(tmp_path):
    text = explain(Run.load(folder_of(tmp_path / "run", timeline(reduce=3.0), cores=2))).text
    assert "4 ranks share 2 cores and wait for one another in 75% of a step" in text
    assert "communication 75%" not in text and "bounded by communication" not in text
    # With a core for each rank, the same waits are those of communication.
    text = explain(Run.load(folder_of(tmp_path / "wide", timeline(reduce=3.0), cores=4))).text
    assert "bounded by communication" in text and "share" not in text.partition("next:")[0]


def test_a_change_of_a_run_at_work_or_of_a_wrong_course_starts_beside_it(tmp_path):
    folder = folder_of(tmp_path / "run", timeline(data=3.0))
    (folder / "summary.json").unlink()
    with (folder / "lease").open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        explanation = explain(Run.load(folder))
    assert explanation.state == "running" and f"--out {folder}-data-cache" in explanation.command
    assert "train.steps" not in explanation.command
    # A rate at which nothing was learned: its weights are of no use for another run.
    folder = folder_of(tmp_path / "flat", timeline(), loss=5.0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = (json.dumps(row | {"loss": 5 + 0.2 * row["step"]}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text('{"steps": 20, "unigram_loss": 3.0}')
    explanation = explain(Run.load(folder))
    assert "learning rate" in explanation.text and f"--out {folder}-train-lr" in explanation.command


def test_waiting_for_slow_ranks_is_no_communication(tmp_path):
    """The quick rank waits in the sum of gradients: that is imbalance, not communication."""
    line = timeline(forward=(1.0, 3.0, 1.0, 3.0))
    explanation = explain(Run.load(folder_of(tmp_path / "run", line)))
    assert explanation.shares["imbalance"] == pytest.approx(1 / 3)
    assert explanation.shares["communication"] == pytest.approx(0)
    # What is measured to be waited for inside the passes is added, what waits outside is not.
    explanation = explain(Run.load(folder_of(tmp_path / "other", line, communication_seconds=0.5)))
    assert explanation.shares["communication"] == pytest.approx(0.5 - 1 / 3)


def test_no_claim_without_a_file(tmp_path):
    explanation = explain(Run.load(folder_of(tmp_path / "run")))
    assert explanation.cause == "unknown" and explanation.command == ""
    assert "timeline.json" in explanation.text and "bounded" not in explanation.text
    # Only the share of data is known: a large one names the cause, a small one leaves it open.
    assert explain(Run.load(folder_of(tmp_path / "b", data_seconds=0.1))).cause == "unknown"
    assert explain(Run.load(folder_of(tmp_path / "c", data_seconds=0.6))).cause == "data"
    both = {"data_seconds": 0.1, "communication_seconds": 0.3}
    explanation = explain(Run.load(folder_of(tmp_path / "d", **both)))
    assert explanation.cause == "compute" and explanation.shares["compute"] == pytest.approx(0.6)


def test_plans_alarms_and_json(tmp_path):
    run = Run.load(folder_of(tmp_path / "run", timeline(), mfu=0.25))
    planned = PlannedStep(cluster="laptop_cpu", seconds=0.5, parts={"compute": 0.4, "bubble": 0.1})
    explanation = explain(replace(run, planned=planned))
    expected = "expects 0.5 s a step on laptop_cpu (mostly compute), 1 s were measured (-50%"
    assert expected in explanation.text
    assert "25.0% of the device's peak" in explanation.text and "is dead" in explanation.text
    data = explanation.to_json()
    assert json.loads(json.dumps(data)) == data
    assert {"name": "mfu", "value": 0.25, "file": "metrics.jsonl"} in data["evidence"]
    assert data["planned"]["seconds"] == 0.5 and data["failure"] is None


#: Failure reports of each cause, in the form that is written.
FAILURES = {
    "out of memory": [
        {"kind": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2 GiB"},
        {"kind": "RuntimeError", "message": "DefaultCPUAllocator: can't allocate memory: ..."},
    ],
    "disk full": [{"kind": "OSError", "message": "[Errno 28] No space left on device: 'x'"}],
    "diverged": [{"kind": "Diverged", "message": "no gradient of the last 5 steps was finite"}],
    "replicas differ": [{"kind": "ReplicaVoteError", "message": "rank 3 holds other weights"}],
    "mismatched operations": [
        {"kind": "Mismatch", "message": "rank 2 called barrier of 0 bytes (barrier) as #7 of dp"}
    ],
    "network cut": [
        {"kind": "NetworkCut", "message": "host b with rank 3 cannot be reached: timed out"}
    ],
    "hang": [
        {"kind": "Hung", "message": "no progress", "collective": {"operation": "all_reduce",
         "group": "ep", "missing": [3]}},
        {"kind": "DistBackendError", "message": "Timed out waiting 1800000ms for recv"},
    ],
    "stopped from outside": [{"kind": "Stopped", "message": "rank 1 is in state T"}],
    "killed": [{"kind": "Killed", "message": "rank 2 was killed by signal 9"}],
    "lost contact": [
        {"kind": "RuntimeError", "message": "[..] Connection closed by peer [127.0.0.1]:3411"},
        {"kind": "DistBackendError", "message": "recv: Connection reset by peer"},
    ],
    "damaged checkpoint": [{"kind": "CheckpointError", "message": "step-4 cannot be read"}],
    "data": [{"kind": "BadRecordError", "message": "a.jsonl:7: no key text", "file": "a.jsonl"}],
    "configuration": [{"kind": "WorldSizeError", "message": "3 ranks were started"}],
    "exit": [{"kind": "Exited", "message": "rank 1 exited with code 3"}],
    "exception": [{"kind": "ZeroDivisionError", "message": "division by zero", "frames": []}],
}  # fmt: skip


def test_every_failure_cause_has_a_case():
    assert set(FAILURES) == {cause.name for cause in (*CAUSES, OTHER)}


@pytest.mark.parametrize("name", FAILURES)
def test_why_a_run_failed(tmp_path, name):
    for failure in FAILURES[name]:
        folder = folder_of(tmp_path / "run", timeline())
        explanation = failed(folder, **{"rank": 2, "step": 12, **failure})
        assert (explanation.state, explanation.cause) == ("failed", name), failure
        assert (
            "rank 2, step 12" in explanation.text
            and failure["message"].rstrip(". ") in explanation.text
        )
        assert explanation.command.startswith("moemesh ")
        assert str(folder) in explanation.command
    if name == "diverged":
        assert "--set train.lr=0.0001 --allow-change train.lr" in explanation.command
    if name == "hang":
        folder = folder_of(tmp_path / "other", timeline())
        assert "in all_reduce over ep without rank 3" in failed(folder, **FAILURES[name][0]).text


def test_the_command_of_the_run_comes_back(tmp_path):
    folder = folder_of(tmp_path / "run", timeline())
    starts = [
        {"argv": ["moemesh", "train", "a b.toml", "--out", "r"], "hosts": [{"host": "node1"}]}
    ]
    (folder / "provenance.json").write_text(json.dumps({"schema": 1, "starts": starts}))
    (folder / "checkpoints" / "step-16").mkdir(parents=True)
    (folder / "checkpoints" / "step-8").mkdir()
    explanation = failed(folder, kind="Killed", message="signal 9")
    assert explanation.command == "moemesh train 'a b.toml' --out r"
    assert "resumes from the checkpoint of step 16" in explanation.text
    # Called elsewhere, or of a folder that was moved, its paths are others.
    for directory, out in ((tmp_path, "run"), (Path.cwd(), "r"), (Path.cwd(), str(folder))):
        starts[0] |= {"argv": ["moemesh", "train", "f.toml", "--out", out]}
        starts[0] |= {"directory": str(directory)}
        (folder / "provenance.json").write_text(json.dumps({"schema": 1, "starts": starts}))
        command = failed(folder, kind="Killed", message="signal 9").command
        resumes = f"f.toml --out {out}" if out == str(folder) else folder
        assert command == f"moemesh train {resumes}"
    # Advice of the report itself is stronger than that of the table.
    text = failed(folder, kind="Killed", message="m", advice="Buy memory.", bundle="b/7").text
    assert "Buy memory." in text and "dmesg" not in text and "replayed from b/7" in text


@pytest.mark.parametrize(
    ("argv", "lr", "command"),
    [
        ("train --set train.lr=1e6 --out r --set train.steps=9", 1e6,
         "train --out r --set train.steps=9 --set train.lr=0.003 --allow-change train.lr"),
        ("train f.toml --set=train.lr=1 --set train.lr=5e-3 --allow-change train.lr", 5e-3,
         "train f.toml --set train.lr=0.0005 --allow-change train.lr"),
    ],
)  # fmt: skip
def test_a_diverged_run_is_given_each_key_once_and_a_usual_rate(tmp_path, argv, lr, command):
    folder = folder_of(tmp_path / "run", timeline())
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", f"lr = {lr}"))
    starts = [{"argv": ["moemesh", *argv.split()]}]
    (folder / "provenance.json").write_text(json.dumps({"schema": 1, "starts": starts}))
    explanation = failed(folder, kind="Diverged", message="is not finite")
    assert sorted(shlex.split(explanation.command)) == sorted(["moemesh", *command.split()])


@pytest.mark.parametrize(("newest", "is_anew"), [(2, False), (3, True), (6, True)])
def test_weights_that_gave_no_finite_step_are_not_gone_on_from(tmp_path, newest, is_anew):
    folder = folder_of(tmp_path / "run", timeline())
    (folder / "checkpoints" / f"step-{newest}").mkdir(parents=True)
    explanation = failed(folder, kind="Diverged", message="is not finite", finite_step=3)
    assert (
        f"of step {newest} holds the weights that gave no finite step" in explanation.text
    ) == is_anew
    words = shlex.split(explanation.command)
    assert "train.lr=0.0001" in words
    assert (f"{folder}-train-lr-0-0001" in words) == is_anew


@pytest.mark.parametrize(
    ("more", "rate"),
    [("", "0.003"), ('path = "hf"', "1e-05"), ('path = "hf"\n[lora]\nrank = 8', "0.0001")],
)
def test_a_lower_rate_is_at_most_the_usual_one(tmp_path, more, rate):
    config = f"[train]\nlr = 3.0\n[model]\n{more}\n"
    run = Run(folder=tmp_path, config=tomllib.loads(config))
    assert lower_rate(run) == f"train.lr={rate}"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("zero1", "once a step: a larger data.global_batch needs fewer, and learns otherwise"),
        ("zero2", "once a microbatch: fewer and larger microbatches need fewer"),
        ("zero3", "once a microbatch: fewer and larger microbatches need fewer"),
    ],
)
def test_gradients_on_the_way_are_no_reason_to_change_the_batch(tmp_path, data, words):
    """A larger batch has no fewer sums under zero2 and zero3 if microbatches stay as large."""
    config = CONFIG.replace("pp = 2", f'dp = 2\ndata = "{data}"').replace("\ndp = 1", "")
    folder = folder_of(tmp_path / "run", timeline(reduce=8.0), config=config)
    (folder / "plan.json").unlink(missing_ok=True)
    book = Ledger()
    book.record(**entry("dp_cp", "all_reduce", "backward", "gradients", 1, 8, 2**30, 8))
    (folder / "ledger.json").write_text(json.dumps(ledgers_to_json({0: book})))
    explanation = explain(Run.load(folder))
    assert "global_batch" not in explanation.command and words in explanation.text
    assert ("plan.microbatches=2" in explanation.command) == (data != "zero1")


def test_lines_of_advice_are_separate_sentences(tmp_path):
    folder = folder_of(tmp_path / "run", timeline())
    text = failed(
        folder, kind="OSError", advice="remove the cause first\nresume: moemesh train"
    ).text
    assert "Remove the cause first; resume: moemesh train." in text


def test_any_failure_report_is_explained(tmp_path):
    folder = folder_of(tmp_path / "run")
    for failure in ({}, {"kind": None, "message": 7, "collective": "x", "rank": None}):
        assert failed(folder, **failure).cause == "exception"


def test_a_run_that_ended_without_a_word(tmp_path):
    folder = folder_of(tmp_path / "run")
    (folder / "summary.json").unlink()
    explanation = explain(Run.load(folder))
    assert (explanation.state, explanation.cause) == ("interrupted", "killed")
    assert explanation.command == f"moemesh train {folder}"


def test_losses_that_are_not_finite_are_the_verdict(tmp_path):
    folder = folder_of(tmp_path / "run", timeline())
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for first, words in (
        (18, "of the last 2 steps is not finite"),
        (0, "No step had a finite loss"),
    ):
        for row in rows[first:]:
            row["loss"] = None
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        explanation = explain(Run.load(folder))
        assert words in explanation.text and " nan " not in explanation.text
        assert "--set train.lr=" in explanation.command and "bounded" not in explanation.text


def test_a_finished_run_that_lost_rows_has_finished(tmp_path):
    folder = folder_of(tmp_path / "run", timeline())
    file = folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": "", "step": 20, "kind": "finished", "text": ""}) + "\n")
    explanation = explain(Run.load(folder))
    assert explanation.state == "finished"
    assert "finished step 20; the rows after step 3 are gone" in explanation.text


def test_the_verb_needs_no_torch(tmp_path):
    folder = folder_of(tmp_path / "run", timeline())
    program = (
        "import sys; from moemesh.cli.insight import explain; from pathlib import Path;"
        "explain(Path(sys.argv[1]), 'laptop_cpu', True); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(process.stdout)["planned"]["seconds"] > 0


def test_the_cluster_of_the_run_is_the_default_one(tmp_path, capsys):
    def priced(name, cluster=None):
        config = CONFIG.replace("[train]", f'[train]\ncluster = "{name}"')
        folder = folder_of(tmp_path / "run", timeline(), config=config)
        explain_verb(folder, cluster, True)
        return json.loads(capsys.readouterr().out)["planned"]

    assert priced("laptop_cpu")["cluster"] == "laptop_cpu"
    assert priced("laptop_cpu", "dgx_h100")["cluster"] == "dgx_h100"
    assert priced("gone.toml") is None  # it was there when the run began
    with pytest.raises(ConfigError):
        priced("laptop_cpu", "gone.toml")


def test_the_page_has_the_exposed_communication_of_the_planner(tmp_path):
    folder = write_fake_run(tmp_path / "run", num_steps=10)
    path = page.write(folder)
    assert "no computation hides" not in path.read_text()
    config = load_run([folder / "config.toml"], environ={}).config
    seconds = estimate_run(config, "laptop_cpu").seconds
    report_verb(folder, cluster="laptop_cpu")
    text = path.read_text()
    assert "no computation hides" in text and "laptop_cpu" in text
    waiting = sum(seconds[name] for name in EXPOSED) + seconds["bubble"]
    assert f"{waiting * 1e3:,.3f}" in text
    with pytest.raises(UserError, match="one run"):
        report_verb(folder, folder, cluster="laptop_cpu")


def test_small_products_are_a_reason_for_a_low_mfu(tmp_path):
    run = folder_of(tmp_path / "run", timeline(), mfu=0.05)
    explanation = explain(Run.load(run))
    # 16 x 256 tokens, 2 choices each, in 4 microbatches to 16 experts.
    assert "an expert multiplies 128 rows at once" in explanation.text
    assert "a row has 256 columns" in explanation.text
    assert (
        "products are small"
        not in explain(Run.load(folder_of(tmp_path / "b", timeline(), mfu=0.5))).text
    )
