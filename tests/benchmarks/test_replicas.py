"""`benchmarks.replicas` measures ranks with equal loads, and steps of the same model."""

from benchmarks import replicas
from benchmarks.settings import ReplicasSettings
from benchmarks.text import replicas_text
from moemesh.config.layout import Layout
from tests.ranks import mesh_on_ranks

SETTINGS = ReplicasSettings(
    ranks="2",
    workload="W2",
    layers=1,
    hidden=16,
    width=16,
    num_experts=16,
    experts_per_token=2,
    sequences=4,
    seq_len=32,
    rounds=2,
)


def test_replicas_even_out_a_hot_rank() -> None:
    result, other = mesh_on_ranks(Layout(dp=2, ep=2), replicas.measure, SETTINGS)
    assert result["workloads"][0]["balance"] == other["workloads"][0]["balance"]
    row = result["workloads"][0]
    assert row["balance"]["without"] > 1.3
    assert row["balance"]["with"] < 1.05
    assert 0 < row["planning_share"] < 1
    assert min(*row["seconds"].values(), *row["busiest_rank_cpu_seconds"].values()) > 0
    assert result["settings"]["workloads"] == ("W2",) and "ranks" not in result["settings"]
    assert len(replicas_text([result]).splitlines()) == 2
