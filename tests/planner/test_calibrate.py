"""Fits: constants that made the data come back, priors hold, files round-trip."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moemesh.cli.accuracy import calibrate
from moemesh.config.cluster import load_cluster
from moemesh.config.errors import ConfigError, UserError
from moemesh.planner.accuracy.calibrate import cross_validate, fit
from moemesh.planner.accuracy.calibration_file import calibration_toml, use_cluster
from moemesh.planner.accuracy.published import parse_run
from moemesh.planner.accuracy.validate import predict
from moemesh.planner.timing.calibration import (
    NAMES,
    OWN,
    Calibration,
    prior_calibration,
    read_calibration,
    shipped_calibration,
)
from tests.planner.published_rows import ARCHS, llama, write_table

LAYOUTS = [(tp, pp, mbs) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for mbs in (1, 2)]


def generated(calibration: Calibration):
    """Runs whose times are exactly what `calibration` predicts."""
    runs = [
        parse_run(llama(index, tp, pp, mbs, 1.0), ARCHS)
        for index, (tp, pp, mbs) in enumerate(LAYOUTS)
    ]
    return [replace(one.run, seconds=one.seconds, ended="ok") for one in predict(runs, calibration)]


def test_fit_recovers_what_made_the_data():
    truth = replace(
        prior_calibration(),
        clusters={"aleph_alpha/A100-80G": {"gemm_efficiency": 0.92, "intra_node_efficiency": 0.7}},
    )
    runs = generated(truth)
    found = fit(runs, prior_calibration(), share=False)
    errors = [abs(one.error) for one in predict(runs, found)]
    before = [abs(one.error) for one in predict(runs, prior_calibration())]
    assert max(errors) < 0.01
    assert np.median(before) > 0.05
    own = found.clusters["aleph_alpha/A100-80G"]
    assert own["gemm_efficiency"] == pytest.approx(0.92, abs=0.04)
    assert own["intra_node_efficiency"] == pytest.approx(0.7, abs=0.15)


def test_one_row_barely_moves_the_priors():
    runs = generated(prior_calibration())[:1]
    slow = [replace(run, seconds=run.seconds * 1.3) for run in runs]
    found = fit(slow, prior_calibration(), share=False)
    for name, factor in found.clusters["aleph_alpha/A100-80G"].items():
        assert abs(np.log(factor)) < 3 * OWN[name]


def test_a_mislabelled_row_does_not_bend_the_fit():
    runs = generated(prior_calibration())
    wrong = [replace(runs[0], seconds=runs[0].seconds * 2), *runs[1:]]
    found = fit(wrong, prior_calibration(), share=False)
    errors = [abs(one.error) for one in predict(runs, found)]
    assert np.median(errors) < 0.01


def test_few_fitted_scalars_for_a_cluster():
    """Of those, a run without experts, FSDP or 8-bit numbers reads ten."""
    used_elsewhere = {"gemm_efficiency_8bit", "overlap_slowdown", "expert_overhead_us"}
    assert len(set(OWN) - used_elsewhere) <= 10


def test_nothing_to_fit():
    with pytest.raises(UserError, match="no row of the table"):
        fit([parse_run(llama(1, 1, 1, 8, None), ARCHS)], prior_calibration())


def test_calibration_file_round_trips():
    shipped = shipped_calibration()
    again = read_calibration(tomllib.loads(calibration_toml(shipped, "text")), "test")
    assert again.shared == pytest.approx(shipped.shared, rel=1e-3)
    assert set(again.clusters) == set(shipped.clusters)
    assert again.allocations == shipped.allocations


def test_calibration_files_with_mistakes_are_told():
    with pytest.raises(UserError, match="`speed`"):
        read_calibration({"shared": {"speed": 1.0}}, "x")
    with pytest.raises(UserError, match="above 0"):
        read_calibration({"cluster": {"a/b": {"gemm_efficiency": 0.0}}}, "x")
    with pytest.raises(UserError, match="names colour"):
        read_calibration({"memory": {"a": {"colour": 1}}}, "x")


def test_unknown_clusters_take_after_their_relatives():
    calibration = Calibration(
        shared=prior_calibration().shared,
        clusters={
            "one/A100-80G": {"gemm_efficiency": 0.8},
            "two/A100-80G": {"gemm_efficiency": 0.9},
            "three/H100-80G": {"gemm_efficiency": 1.2},
        },
    )
    known = calibration.deviations("new/A100-80G")["gemm_efficiency"]
    assert known == pytest.approx((0.8 * 0.9) ** (1 / 3))
    generation = calibration.deviations("new/H800-80G")["gemm_efficiency"]
    assert generation == pytest.approx(1.2**0.5)
    assert calibration.deviations("new/V100") == {}
    stacked = replace(calibration, stacks={"one": {"gemm_efficiency": 0.85}})
    assert stacked.deviations("one/H100-80G") == {"gemm_efficiency": 0.85}
    assert stacked.deviations("one/A100-80G") == {"gemm_efficiency": 0.8}


def test_command_writes_a_cluster_file_that_predicts(tmp_path, capsys):
    runs = [llama(index, tp, pp, mbs, 30.0 + index) for index, (tp, pp, mbs) in enumerate(LAYOUTS)]
    table = write_table(tmp_path, runs)
    out = tmp_path / "cluster.toml"
    calibrate(runs=table, out=out)
    assert "aleph_alpha/A100-80G" in capsys.readouterr().out
    cluster = load_cluster(str(out))
    assert set(cluster.constants) == set(NAMES)
    parsed = [parse_run(one, ARCHS) for one in runs]
    changed, calibration = use_cluster(parsed, shipped_calibration(), cluster)
    after = [one.error for one in predict(changed, calibration)]
    plain = [one.error for one in predict(parsed, shipped_calibration())]
    assert np.median(np.abs(after)) < np.median(np.abs(plain))


def test_command_asks_which_cluster(tmp_path):
    rows = [llama(1, 1, 1, 1, 26.5), llama(2, 1, 1, 1, 26.5, hardware="H100-80G NVL8")]
    table = write_table(tmp_path, rows)
    with pytest.raises(UserError, match="choose one with --cluster"):
        calibrate(runs=table, out=tmp_path / "c.toml")
    with pytest.raises(UserError, match="no finished run of cluster other"):
        calibrate(runs=table, out=tmp_path / "c.toml", cluster="other")


def test_contradictory_cluster_files(tmp_path):
    table = write_table(tmp_path, [llama(1, 1, 1, 1, 26.5)])
    out = tmp_path / "cluster.toml"
    calibrate(runs=table, out=out)
    text = out.read_text()
    out.write_text(text.replace("inter_node_bandwidth = 2", "inter_node_bandwidth = 0.0 #"))
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
        found = known.constants("one/B200", release).expert_overhead_us
        assert found == pytest.approx(base * factor), release


def test_a_table_without_software_is_the_users_own(tmp_path: Path) -> None:
    rows = [llama(index, tp, pp, mbs, 30.0 + index) for index, (tp, pp, mbs) in enumerate(LAYOUTS)]
    table = write_table(tmp_path, [one | {"src": ""} for one in rows])
    calibrate(runs=table, out=tmp_path / "mine.toml")
    assert load_cluster(str(tmp_path / "mine.toml")).name == "own/A100-80G"


def test_a_group_left_out_does_not_know_its_own_times():
    """Times of the left-out runs ten times as long: their predictions stay as they are."""
    others = [
        llama(index, tp, pp, mbs, 30.0 + index) for index, (tp, pp, mbs) in enumerate(LAYOUTS)
    ]
    hidden = [llama(50, 1, 1, 1, 26.5, model="Hidden"), llama(51, 2, 1, 2, 29.7, model="Hidden")]
    slower = [one | {"step_time_s": "265"} for one in hidden]

    def predicted(rows):
        runs = [parse_run(one, ARCHS) for one in rows]
        found = cross_validate(runs, prior_calibration())
        return [one.seconds for one in found if one.run.row["model"] == "Hidden"]

    assert predicted(others + hidden) == pytest.approx(predicted(others + slower), rel=1e-9)
