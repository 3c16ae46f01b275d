"""Fits: constants that made the data come back, priors hold, files round-trip."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moemesh
from moemesh.cli.accuracy import calibrate
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import ConfigError, UserError
from moemesh.config.load import resolved_toml
from moemesh.planner.accuracy.calibrate import cross_validate, fit
from moemesh.planner.accuracy.calibration_file import calibration_toml, fitted_cluster, use_cluster
from moemesh.planner.accuracy.own import learn, lessons, run_of_folder
from moemesh.planner.accuracy.published import parse_run
from moemesh.planner.accuracy.validate import predict
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import from_arch_table
from moemesh.planner.timing.calibration import (
    NAMES,
    SPREADS,
    Calibration,
    prior_calibration,
    read_calibration,
    shipped_calibration,
)
from moemesh.planner.timing.columns import Software, layout_row, model_row
from moemesh.planner.timing.price import pricing
from moemesh.sharding.load_run import load_run
from moemesh.trace.run import MetricsRow
from tests.planner.published_rows import ARCHS, llama, write_table

LAYOUTS = [(tp, pp, mbs) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for mbs in (1, 2)]
ROWS = [llama(number, *layout, 30.0 + number) for number, layout in enumerate(LAYOUTS)]


def generated(calibration: Calibration):
    """Runs whose times are exactly what `calibration` predicts."""
    runs = [parse_run(one, ARCHS) for one in ROWS]
    return [replace(one.run, seconds=one.seconds, ended="ok") for one in predict(runs, calibration)]


def test_fit_recovers_what_made_the_data():
    truth = replace(
        prior_calibration(),
        clusters={"aleph_alpha/A100-80G": {"gemm_efficiency": 0.92, "intra_node_efficiency": 0.7}},
    )
    runs = generated(truth)
    calibration = learn(runs, prior_calibration()).calibration
    errors = [abs(one.error) for one in predict(runs, calibration)]
    before = [abs(one.error) for one in predict(runs, prior_calibration())]
    assert max(errors) < 0.01
    assert np.median(before) > 0.05
    own = calibration.clusters["aleph_alpha/A100-80G"]
    assert own["gemm_efficiency"] == pytest.approx(0.92, abs=0.04)
    # Half of it: what only few layouts show may as well be theirs alone.
    assert own["intra_node_efficiency"] < 0.9


def test_one_row_barely_moves_the_priors():
    runs = generated(prior_calibration())[:1]
    slow = [replace(run, seconds=run.seconds * 1.3) for run in runs]
    calibration = learn(slow, prior_calibration()).calibration
    for name, factor in calibration.clusters["aleph_alpha/A100-80G"].items():
        assert abs(np.log(factor)) < 2 * SPREADS[NAMES.index(name)]


def test_a_mislabelled_row_does_not_bend_the_fit():
    runs = generated(prior_calibration())
    wrong = [replace(runs[0], seconds=runs[0].seconds * 2), *runs[1:]]
    calibration = learn(wrong, prior_calibration()).calibration
    errors = [abs(one.error) for one in predict(runs, calibration)]
    assert np.median(errors) < 0.01


def test_nothing_to_fit():
    with pytest.raises(UserError, match="no row of the table"):
        fit([parse_run(llama(1, 1, 1, 8, None), ARCHS)], prior_calibration())


def test_calibration_file_round_trips():
    shipped = shipped_calibration()
    again = read_calibration(tomllib.loads(calibration_toml(shipped, "text")))
    assert again.shared == pytest.approx(shipped.shared, rel=1e-3)
    assert set(again.clusters) == set(shipped.clusters)
    assert again.allocations == shipped.allocations


def test_shipped_names_are_known_and_factors_positive():
    shipped = shipped_calibration()
    levels = (shipped.stacks, shipped.releases, shipped.clusters)
    for factors in (shipped.shared, *(values for level in levels for values in level.values())):
        assert factors.keys() <= set(NAMES)
        assert min(factors.values(), default=1) > 0
    for key in shipped.allocations:
        shipped.allocation(key)


def test_unknown_clusters_take_after_their_relatives():
    calibration = Calibration(
        shared=prior_calibration().shared,
        clusters={
            "one/A100-80G": {"gemm_efficiency": 0.8},
            "two/A100-80G": {"gemm_efficiency": 0.9},
            "two/A100-40G": {"gemm_efficiency": 0.6},
            "three/H100-80G": {"gemm_efficiency": 1.2},
        },
    )
    # A stack counts once, and three stacks of no deviation are added.
    known = calibration.deviations("new/A100-80G")["gemm_efficiency"]
    assert known == pytest.approx((0.8 * (0.9 * 0.6) ** 0.5) ** (1 / 5))
    generation = calibration.deviations("new/H800-80G")["gemm_efficiency"]
    assert generation == pytest.approx(1.2 ** (1 / 4))
    assert calibration.deviations("new/V100") == {}
    stacked = replace(calibration, stacks={"one": {"gemm_efficiency": 0.85}})
    assert stacked.deviations("one/H100-80G") == {"gemm_efficiency": 0.85}
    assert stacked.deviations("one/A100-80G") == {"gemm_efficiency": 0.8}


def test_command_writes_a_cluster_file_that_predicts(tmp_path, capsys):
    out = tmp_path / "cluster.toml"
    calibrate(runs=[write_table(tmp_path, ROWS)], out=out)
    assert "aleph_alpha/A100-80G" in capsys.readouterr().out
    cluster = load_cluster(str(out))
    assert set(cluster.constants) == set(NAMES)
    parsed = [parse_run(one, ARCHS) for one in ROWS]
    changed, calibration = use_cluster(parsed, shipped_calibration(), cluster)
    after = [one.error for one in predict(changed, calibration)]
    plain = [one.error for one in predict(parsed, shipped_calibration())]
    assert np.median(np.abs(after)) < np.median(np.abs(plain))


def test_command_asks_which_cluster(tmp_path):
    rows = [llama(1, 1, 1, 1, 26.5), llama(2, 1, 1, 1, 26.5, hardware="H100-80G NVL8")]
    table = write_table(tmp_path, rows)
    with pytest.raises(UserError, match="choose one with --cluster"):
        calibrate(runs=[table], out=tmp_path / "c.toml")
    with pytest.raises(UserError, match="no finished run of cluster other"):
        calibrate(runs=[table], out=tmp_path / "c.toml", cluster="other")


def test_contradictory_cluster_files(tmp_path):
    table = write_table(tmp_path, [llama(1, 1, 1, 1, 26.5)])
    out = tmp_path / "cluster.toml"
    calibrate(runs=[table], out=out)
    text = out.read_text()
    out.write_text(text.replace("inter_node_bandwidth = ", "inter_node_bandwidth = 0.0 #"))
    with pytest.raises(ConfigError, match="inter_node_bandwidth"):
        load_cluster(str(out))
    out.write_text(text + "speed = 3.0\n")
    with pytest.raises(UserError, match="speed"):
        use_cluster([parse_run(llama(1, 1, 1, 1, 1), ARCHS)], shipped_calibration(),
                    load_cluster(str(out)))  # fmt: skip


def test_releases_multiply_and_unknown_ones_take_after_the_last():
    plain = prior_calibration()
    known = replace(
        plain,
        releases={
            "one 26.02": {"expert_overhead_us": 2.0},
            "one 26.06": {"expert_overhead_us": 0.5},
        },
    )
    base = plain.constants("one/B200").expert_overhead_us
    for release, factor in (
        ("one 26.02", 2.0), ("one 26.04", 2.0), ("one 27.01", 0.5), ("one 25.09", 2.0),
        ("other 26.02", 1.0), ("", 1.0),
    ):  # fmt: skip
        overhead = known.constants("one/B200", release).expert_overhead_us
        assert overhead == pytest.approx(base * factor), release


def test_a_table_without_software_is_the_users_own(tmp_path: Path) -> None:
    table, mine = write_table(tmp_path, [one | {"src": ""} for one in ROWS]), tmp_path / "mine.toml"
    calibrate(runs=[table], out=mine)
    assert load_cluster(str(mine)).name == "own/A100-80G"
    # A search corrects the bounds of all its layouts by these runs, and each price as `estimate`.
    task: dict[str, Any] = {"model": "llama3-8b", "seq_len": 2048, "global_batch": 64}
    plans = moemesh.plan(**task, cluster=mine, nodes=1, top=2)
    alone = moemesh.estimate(**task, cluster=mine, plan=plans[0].plan)
    assert plans[0].seconds <= plans[1].seconds
    assert alone.seconds == pytest.approx(plans[0].seconds, rel=1e-9)
    assert plans.details["lower_bound_seconds"] <= plans[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize("column", ["GPUs per node", "nodes"])
def test_nodes_of_the_rows(tmp_path: Path, column: str) -> None:
    """64 A100 as 16 nodes of four, where the data sheet has nodes of eight."""
    table = write_table(tmp_path, ROWS)
    head, *lines = table.read_text().splitlines()
    each = "16" if column == "nodes" else "4"
    table.write_text("\n".join([f"{head},{column}", *(f"{line},{each}" for line in lines)]))
    calibrate(runs=[table], out=tmp_path / "mine.toml")
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert (cluster.nodes, cluster.gpus_per_node) == (16, 4)


def test_a_cluster_file_replaces_the_data_sheet(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    lab = load_cluster("dgx_a100").model_copy(
        update={"name": "lab", "gpus_per_node": 4, "gpu_hour_price": 1.5, "usable_share": 0.9}
    )
    file.write_text(lab.to_toml("Four GPUs a node."))
    calibrate(runs=[write_table(tmp_path, ROWS)], out=tmp_path / "mine.toml", cluster=str(file))
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert (cluster.name, cluster.gpus_per_node) == ("lab", 4)
    assert (cluster.gpu_hour_price, cluster.usable_share) == (1.5, 0.9)
    assert len(cluster.own_runs) == len(LAYOUTS)


def test_one_run_alone_is_not_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(tmp_path, [llama(1, 1, 1, 1, 90.0)])
    calibrate(runs=[table], out=tmp_path / "mine.toml")
    assert "other runs imply" not in capsys.readouterr().out


def test_a_group_left_out_does_not_know_its_own_times():
    """Left-out runs with ten times the measured time: their predictions stay unchanged."""
    hidden = [llama(50, 1, 1, 1, 26.5, model="Hidden"), llama(51, 2, 1, 2, 29.7, model="Hidden")]
    slower = [one | {"step_time_s": "265"} for one in hidden]

    def predicted(rows):
        runs = [parse_run(one, ARCHS) for one in rows]
        predictions = cross_validate(runs, prior_calibration())
        return [one.seconds for one in predictions if one.run.row["model"] == "Hidden"]

    assert predicted(ROWS + hidden) == pytest.approx(predicted(ROWS + slower), rel=1e-9)


def test_own_runs_teach_what_constants_cannot_say_and_nothing_elsewhere(tmp_path):
    """Layouts with pp = 4 take 8 % more; a file of a dozen runs learns it, for pp = 4 only."""
    usual = generated(prior_calibration())
    slow = {run.id for run in usual if run.layout.pp == 4}
    runs = [replace(run, seconds=run.seconds * 1.08) if run.id in slow else run for run in usual]
    learned = learn(runs[::2], prior_calibration())
    after = {one.run.id: one.error for one in predict(runs, learned.calibration)}
    before = {one.run.id: one.error for one in predict(runs, prior_calibration())}
    unseen = {run.id for run in runs[1::2]}
    assert max(abs(after[one]) for one in unseen & slow) < 0.5 * 0.08
    assert max(abs(after[one]) for one in unseen - slow) < 0.015
    assert min(abs(before[one]) for one in unseen & slow) > 0.07
    own = learned.calibration.own["aleph_alpha/A100-80G"]
    moe, spread = from_arch_table("moe-30B", ARCHS), {"dp": 8, "ep": 8, "seq_len": 4096}
    layout = PlannedLayout(global_batch=64, **spread)
    far = model_row(moe), layout_row(moe, layout, Software(fsdp=True))
    assert abs(own.correction(*far)) < 1e-3
    assert "none of your 12 runs" in own.describe(*far)
    one = runs[0]
    near = own.describe(model_row(one.shape), layout_row(one.shape, one.layout, one.software))
    assert "of your 12 runs like this one" in near
    assert f"the nearest, {one.id}, is 0.0 away: none differs" in near
    cluster = fitted_cluster(runs[::2], learned.calibration, learned.runs)
    (tmp_path / "c.toml").write_text(cluster.to_toml("text"))
    known = load_cluster(tmp_path / "c.toml")
    assert known.own_runs == learned.runs
    estimated = pricing(known).seconds(one.shape, one.layout)
    assert sum(estimated.values()) == pytest.approx(2 * estimated["total"])


def test_bad_runs_are_named_and_cost_little(tmp_path, capsys):
    runs = generated(prior_calibration())[::2]
    wrong = [replace(runs[0], seconds=runs[0].seconds * 10), *runs[1:]]
    learned = learn(wrong, prior_calibration())
    assert [doubt.partition(":")[0] for doubt in learned.doubts] == [f"run {runs[0].id}"]
    assert max(abs(one.error) for one in predict(runs, learned.calibration)) < 0.01
    with pytest.raises(UserError, match=f"runs {runs[0].id}, .*milliseconds"):
        learn([replace(run, seconds=run.seconds * 1000) for run in runs], prior_calibration())
    twins = [*runs, replace(runs[1], id="twin", seconds=runs[1].seconds * 1.5)]
    assert any("are one layout" in one for one in learn(twins, prior_calibration()).doubts)
    rows = [*ROWS[:2], ROWS[2] | {"step_time_s": "nan"}, *ROWS[3:6]]
    calibrate(runs=[write_table(tmp_path, rows)], out=tmp_path / "c.toml")
    assert "run 2 is left out: step_time_s is `nan`: a run shows" in capsys.readouterr().out


def test_no_efficiency_is_written_above_one(tmp_path, capsys):
    """Runs faster than the data sheet: the message names the value that is too low, and the
    calibration file is valid for plans."""
    runs = generated(shipped_calibration())[:8]
    rows = [
        row | {"step_time_s": str(run.seconds / 4), "src": "mine"}
        for row, run in zip(ROWS, runs, strict=False)
    ]
    out = tmp_path / "fast.toml"
    calibrate(runs=[write_table(tmp_path, rows)], out=out)
    said, known = capsys.readouterr().out, load_cluster(out)
    efficiencies = {name: x for name, x in known.constants.items() if "efficiency" in name}
    assert max(efficiencies.values()) == 1.0 == efficiencies["gemm_efficiency"]
    assert "peak_flops.bfloat16 of A100-80G is too low" in said
    assert "inter_node_bandwidth of A100-80G is too low" in said
    assert known.inter_node_bandwidth > 3.2e9
    pricing(known)


def test_an_efficiency_above_one_is_refused():
    cluster = load_cluster("dgx_h100").model_copy(update={"constants": {"memory_efficiency": 1.2}})
    with pytest.raises(ConfigError, match="memory_efficiency is a share of memory_bandwidth"):
        pricing(cluster)


def test_errors_after_own_runs_fall(tmp_path):
    truth = replace(
        prior_calibration(), clusters={"aleph_alpha/A100-80G": {"gemm_efficiency": 0.8}}
    )
    curve = lessons(generated(truth), prior_calibration(), (0, 4, 12, 50), draws=2)
    assert [one.own for one in curve] == [0, 4, 12]
    assert curve[0].median > 4 * curve[2].median
    assert curve[2].median < 0.01


def test_run_folders_teach_a_cluster(tmp_path, capsys):
    """A run folder as a row of a table: its plan, the median of its steps, the given cluster."""
    folders: list[Path] = []
    for dp in (1, 2, 4):
        folder = tmp_path / f"dp{dp}"
        folder.mkdir()
        config = load_run([], [f"plan.dp={dp}", "data.global_batch=16"], environ={}).config
        (folder / "config.toml").write_text(resolved_toml(config))
        rows = [
            MetricsRow(
                step=step, loss=5.0, grad_norm=1.0, aux_loss=0.0, tokens=4096, lr=1e-3,
                tokens_per_second=4096 / seconds, seconds=seconds,
            )
            for step, seconds in enumerate((9.0, 2.0 / dp, 2.1 / dp, 1.9 / dp), start=1)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(row.to_line() for row in rows))
        folders.append(folder)
    observed = run_of_folder(folders[1], load_cluster("laptop_cpu"))
    assert observed.reason == "" and observed.seconds == 1.0 and observed.layout.dp == 2
    out = tmp_path / "mine.toml"
    with pytest.raises(UserError, match="give --cluster"):
        calibrate(runs=folders, out=out)
    calibrate(runs=folders, out=out, cluster="laptop_cpu")
    assert "wrote" in capsys.readouterr().out
    known = load_cluster(out)
    assert known.name == load_cluster("laptop_cpu").name
    assert [one.seconds for one in known.own_runs] == [2.0, 1.0, 0.5]
    with pytest.raises(UserError, match="no run"):
        run_of_folder(tmp_path, load_cluster("laptop_cpu"))
