"""`bench dispatch`: closed byte formulas, its report of the ranks, and its refusals."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks import contenders, measure, peers
from benchmarks.crossing import RowsBetween, bytes_sent, rows_between
from benchmarks.dispatch import measured
from benchmarks.settings import DISPATCHERS, DispatchSettings
from benchmarks.text import dispatch_text
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.model.dispatcher import LocalDispatcher
from moemesh.ops.permute import OwnSlots
from moemesh.parallel.expert import build
from tests import commands
from tests.ranks import mesh_on_ranks
from tests.waiting import PATIENCE

LAYOUT = Layout(dp=4, ep=4, ranks_per_node=2)
SMALL = DispatchSettings(
    ranks_per_node=2, experts=16, top_k=3, tokens=64, hidden=32, width=16, rounds=1, groups=8
)
NAMES = "all_to_all,all_gather,hierarchical,low_latency"


def routing(seed: int) -> list[Tensor]:
    """Random experts of four ranks with uneven tokens, some slots empty."""
    generator = torch.Generator().manual_seed(seed)
    choices = []
    for count in (5, 0, 9, 3):
        experts = torch.rand(count, 16, generator=generator).argsort(1)[:, :3]
        experts[torch.rand(count, 3, generator=generator) < 0.1] = -1
        choices.append(experts)
    return choices


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "hierarchical"])
def test_the_closed_formula_counts_what_each_token_needs(name: str, seed: int) -> None:
    experts = routing(seed)
    dispatched, combined = torch.zeros(4, 4).long(), torch.zeros(4, 4).long()
    for rank, chosen in enumerate(experts):
        for token in chosen.tolist():
            homes = [expert // 4 for expert in token if expert >= 0]
            if name == "all_to_all":
                for home in homes:
                    dispatched[rank, home] += 1
                    combined[home, rank] += 1
            elif name == "all_gather":
                dispatched[rank] += 1
                for home in set(homes):
                    combined[home, rank] += 1
            else:
                for node in {home // 2 for home in homes}:
                    gateway = 2 * node + rank % 2
                    dispatched[rank, gateway] += 1
                    for home in {home for home in homes if home // 2 == node}:
                        dispatched[gateway, home] += 1
                combined = dispatched.t()
    rows = rows_between(name, experts, num_experts=16, ranks_per_node=2)
    others = ~torch.eye(4, dtype=torch.bool)
    assert torch.equal(rows.dispatch_RR[others], dispatched[others])
    assert torch.equal(rows.combine_RR[others], combined[others])


def test_fixed_slots_are_sent_until_they_overflow() -> None:
    experts = routing(0)
    copies = rows_between("all_to_all", experts, num_experts=16, ranks_per_node=2)
    most = int(copies.dispatch_RR.max())
    fits = rows_between("low_latency", experts, num_experts=16, ranks_per_node=2, num_slots=most)
    assert (fits.dispatch_RR == most).all()
    less = most - 1
    over = rows_between("low_latency", experts, num_experts=16, ranks_per_node=2, num_slots=less)
    assert torch.equal(over.dispatch_RR, copies.dispatch_RR)


def test_bytes_are_told_by_side_of_the_node_border() -> None:
    rows = RowsBetween(torch.arange(16).view(4, 4), 100 + torch.arange(16).view(4, 4))
    sent = bytes_sent(
        rows, 1, ranks_per_node=2, row_bytes=10, coded_row_bytes=3, with_backward=True
    )
    assert sent[("moe.dispatch", "forward")] == (4 * 3, (6 + 7) * 3)
    assert sent[("moe.combine", "forward")] == (104 * 10, (106 + 107) * 10)
    assert sent[("moe.dispatch", "backward")] == (1 * 10, (9 + 13) * 10)
    assert sent[("moe.combine", "backward")] == (101 * 10, (109 + 113) * 10)


def run_on_rank(mesh: Mesh, settings: DispatchSettings) -> dict[str, Any]:
    return measured(settings, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        replace(SMALL, dispatcher=NAMES, workload="W2,W4"),
        replace(SMALL, dispatcher=NAMES, workload="W5", mode="moe_fwd_bwd", chunks=3),
        replace(
            SMALL,
            dispatcher=NAMES,
            workload="W4",
            mode="moe_fwd_bwd",
            chunks=2,
            payload="fp8",
            dtype="bfloat16",
        ),
    ],
    ids=["dispatch_only", "chunks", "chunks of fp8"],
)
def test_the_ledger_has_the_formulas_bytes_and_nothing_is_dropped(
    settings: DispatchSettings,
) -> None:
    ranks = mesh_on_ranks(LAYOUT, run_on_rank, settings)
    assert all(document["workloads"] == ranks[0]["workloads"] for document in ranks)
    for result in ranks[0]["workloads"]:
        chunks = sorted({1, settings.chunks})
        names = [(entry["dispatcher"], entry["chunks"]) for entry in result["dispatchers"]]
        assert names == [(name, count) for name in NAMES.split(",") for count in chunks]
        across = {}
        for entry in result["dispatchers"]:
            assert entry["bytes_as_expected"], entry
            assert entry["own_node_bytes"] + entry["across_bytes"] == entry["sent_bytes"] > 0
            assert entry["other_bytes"] > 0 and entry["peak_bytes"] > 0
            assert entry["dropped"] == 0 and entry["link_bytes"] is None
            assert len(entry["steps"]) == settings.rounds
            assert 0 < entry["seconds"]["p50"] <= entry["seconds"]["max"] == max(entry["steps"])
            across[entry["dispatcher"]] = entry["across_bytes"]
        assert across["hierarchical"] < across["all_to_all"] < across["low_latency"] or (
            result["workload"] in ("W2", "W5")  # slots may have overflowed: then equal
        )
        alone = {f"{entry['dispatcher']}_exchange_alone" for entry in result["dispatchers"]}
        assert set(result["bounds"]) == {"bare_all_to_all"} | (
            {"experts"} | alone if settings.mode == "moe_fwd_bwd" else set()
        )
    assert "hierarchical" in dispatch_text(ranks[0])


def lying_on_rank(mesh: Mesh, settings: DispatchSettings) -> list[bool]:
    """The dispatcher "all_gather" is an all-to-all."""
    with pytest.MonkeyPatch.context() as patch:
        liar = partial(build.make_dispatcher, "all_to_all")
        patch.setattr(measure, "make_dispatcher", lambda name, *rest: liar(*rest))
        (result,) = measured(settings, mesh)["workloads"]
    return [entry["bytes_as_expected"] for entry in result["dispatchers"]]


def test_other_bytes_than_the_formulas_are_told() -> None:
    settings = replace(SMALL, dispatcher="all_to_all,all_gather", rounds=1)
    for verdicts in mesh_on_ranks(LAYOUT, lying_on_rank, settings):
        assert verdicts == [True, False]


class Dropping(LocalDispatcher):
    """Loses the rows of expert 0."""

    def plan(self, experts_TK: Tensor) -> OwnSlots:
        return super().plan(experts_TK.masked_fill(experts_TK == 0, -1))


def test_lost_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_dispatcher", lambda *_: Dropping(16))
    settings = replace(SMALL, ranks=1, ranks_per_node=1, dispatcher="all_to_all", rounds=1)
    result = measured(settings, Mesh.single("cpu"))
    (entry,) = result["workloads"][0]["dispatchers"]
    assert entry["dropped"] == 64 * 3 // 16


def test_the_burst_is_within_the_rounds() -> None:
    settings = replace(SMALL, ranks=1, ranks_per_node=1, dispatcher="all_to_all", workload="W7")
    result = measured(settings, Mesh.single("cpu"))
    assert result["workloads"][0]["first_step"] == 28


def test_peak_memory_counts_what_is_held_at_one_time() -> None:
    def step() -> None:
        first = torch.empty(1000, dtype=torch.float64)
        second = torch.empty(500, dtype=torch.float64)
        del first
        torch.empty(700, dtype=torch.float64)
        del second

    assert contenders.peak_bytes(step) == 12000


def test_transformers_computes_the_same_layer() -> None:
    config = ModelConfig(
        hidden_size=32,
        expert_intermediate_size=16,
        num_experts=16,
        experts_per_token=3,
        num_shared_experts=0,
    )
    layer = contenders.make_layer(config, 1, 0, torch.float32)
    if (peer := peers.transformers_step(layer)) is None:
        pytest.skip("transformers 5 is not installed")
    settings = replace(SMALL, ranks=1, ranks_per_node=1)
    result = measured(replace(settings, mode="moe_fwd_bwd"), Mesh.single("cpu"))
    assert result["single_process"]["ours_seconds"] > 0
    experts_TK = torch.rand(8, 16).argsort(1)[:, :3]
    work = SimpleNamespace(
        experts_TK=experts_TK,
        weights_TK=torch.rand(8, 3),
        x_TH=torch.randn(8, 32),
        gradient_TH=torch.randn(8, 32),
    )
    theirs = peer[1](work)  # type: ignore[arg-type]
    layer.dispatcher = LocalDispatcher(16)
    given = contenders._given(experts_TK, work.weights_TK)
    assert_close(contenders.apply_experts(layer, work.x_TH, given), theirs)


def test_all_means_every_one() -> None:
    settings = replace(SMALL, workload="all", dispatcher="all")
    assert settings.dispatchers == DISPATCHERS
    assert len(settings.workloads) == 9 and measure.FIRST_STEPS["W7"] + 10 > 35


def test_the_command_starts_its_ranks_and_prints_one_object() -> None:
    options = "--ranks 2 --experts 8 --top-k 2 --tokens 32 --hidden 16 --rounds 2 --json"
    options += " --workload W3 --dispatcher all_to_all"
    command = [commands.python(), "-m", "benchmarks.dispatch", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["settings"]["tokens"] == 32
    (result,) = document["workloads"]
    assert result["tokens_per_rank"] == [16, 16]
    assert result["dispatchers"][0]["bytes_as_expected"]
