"""The DeepEP adapter with a fake of the package, and the message without it."""

import gc
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.parallel.expert import deepep_probe
from moemesh.parallel.expert.deepep import DeepEPDispatcher, DeepEPError, connect
from moemesh.parallel.expert.self_test import self_test
from tests.parallel import fake_deep_ep
from tests.parallel.dispatching import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_SLOTS,
    TOKENS,
    assert_contract,
    dispatch_on_rank,
    routed,
)
from tests.ranks import mesh_on_ranks

LAYOUTS = [Layout(dp=4, ep=4), Layout(dp=4, ep=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_keeps_the_contract_of_all_dispatchers(layout: Layout) -> None:
    assert_contract(mesh_on_ranks(layout, dispatch_on_rank, "deepep"), layout)


def test_the_ledger_is_told_one_row_per_token_and_rank() -> None:
    layout = LAYOUTS[0]
    per_rank = NUM_EXPERTS // layout.ep

    def rows_between(source: int, target: int) -> int:
        experts = routed(source).experts_TK
        ranks = torch.where(experts < 0, -1, experts // per_rank)
        return int((ranks == target).any(1).sum())

    for rank, got in enumerate(mesh_on_ranks(layout, dispatch_on_rank, "deepep")):
        sent = sum(rows_between(rank, other) for other in range(4) if other != rank)
        received = sum(rows_between(other, rank) for other in range(4) if other != rank)
        there, back = (sent, received), (received, sent)
        row, times = HIDDEN * 8, 2  # float64; the harness dispatches twice
        for caller, phase, way, size in [
            ("moe.dispatch", "forward", there, row * times),
            ("moe.dispatch.weights", "forward", there, NUM_SLOTS * (8 + 8) * times),
            ("moe.combine", "forward", back, row),
            ("moe.combine", "backward", there, row),
            ("moe.dispatch", "backward", back, row),
            ("moe.dispatch.weights", "backward", back, NUM_SLOTS * 8),
        ]:
            (entry,) = (e for e in got["ledger"] if (e["caller"], e["phase"]) == (caller, phase))
            moved = (entry["wire_bytes"], entry["received_bytes"])
            assert moved == (way[0] * size, way[1] * size), f"{caller} {phase} of rank {rank}"
            assert entry["axis"] == "ep"


def connected(mesh: Mesh) -> DeepEPDispatcher:
    sys.modules["deep_ep"] = fake_deep_ep
    return DeepEPDispatcher(mesh["ep"], NUM_EXPERTS, connect(mesh["ep"], 16))


def whole_life(mesh: Mesh) -> dict[str, Any]:
    """Self-test in the only dtypes that the kernels know, then handles counted at each step."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    dispatcher = connected(mesh)
    self_test(
        dispatcher, mesh, NUM_EXPERTS, NUM_SLOTS, name="deepep", hidden=16, dtype=torch.bfloat16
    )
    alive = {"after the self-test": handles()}
    x_TH = torch.ones(TOKENS[mesh.rank], 16, dtype=torch.bfloat16, requires_grad=True)
    experts_TK = routed(mesh.rank).experts_TK
    weights_TK = torch.ones(experts_TK.shape, requires_grad=True)
    plan = dispatcher.plan(experts_TK)
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    y_TH = dispatcher.combine(rows.source_NH.index_select(0, rows.map.source_R), plan).wait()
    del plan
    alive["before the backward"] = handles()
    y_TH.sum().backward()
    del y_TH, rows
    alive["after the backward"] = handles()
    with torch.no_grad():
        plan = dispatcher.plan(experts_TK)
        rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
        dispatcher.combine(rows.source_NH.index_select(0, rows.map.source_R), plan).wait()
    del plan, rows
    alive["without a backward"] = handles()
    buffer = dispatcher.buffer
    dispatcher.close()
    return {
        "alive": alive,
        "destroyed": buffer.destroyed,
        "bytes": buffer.num_nvl_bytes,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


def handles() -> int:
    gc.collect()
    return len(fake_deep_ep.Handle.alive)


def test_it_passes_the_self_test_and_keeps_no_handle() -> None:
    for got in mesh_on_ranks(LAYOUTS[0], whole_life):
        assert got["alive"] == {
            "after the self-test": 0,
            "before the backward": 1,
            "after the backward": 0,
            "without a backward": 0,
        }
        assert got["destroyed"] and not got["fill"]
        assert got["bytes"] == 16 * 2 * 4


def refused_size(mesh: Mesh) -> str:
    with pytest.raises(DeepEPError) as caught:
        connected(mesh)
    return str(caught.value)


def test_a_number_of_ranks_without_defaults_is_refused() -> None:
    for message in mesh_on_ranks(Layout(dp=3, ep=3), refused_size):
        assert message.startswith("deepep has no default configuration for ep = 3 (Unsupported")


def test_where_it_is_absent_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    probe = deepep_probe.available()
    assert not probe.usable and probe.interface is None
    assert str(probe) == (
        'plan.dispatcher = "deepep" needs the package deep_ep '
        "(https://github.com/deepseek-ai/DeepEP); not found. Use all_to_all or hierarchical"
    )
    with pytest.raises(DeepEPError, match=r"not found\. Use all_to_all"):
        connect(Mesh.single("cpu")["ep"], 16)


@pytest.mark.parametrize(
    ("names", "interface", "said"),
    [
        (["Buffer"], "v1", None),
        (["Buffer", "ElasticBuffer"], "v1", None),
        (["ElasticBuffer"], "v2", r"this one has ElasticBuffer \(V2\) only"),
        ([], None, "this module named deep_ep has none"),
    ],
)
def test_the_interface_is_probed(
    monkeypatch: pytest.MonkeyPatch, names: list[str], interface: str | None, said: str | None
) -> None:
    module = ModuleType("deep_ep")
    module.__spec__ = fake_deep_ep.__spec__
    for name in names:
        setattr(module, name, fake_deep_ep.Buffer)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    probe = deepep_probe.available()
    assert probe.interface == interface
    assert "a CUDA device" in probe.missing and not probe.usable
    if said is not None:
        with pytest.raises(DeepEPError, match=said):
            connect(Mesh.single("cpu")["ep"], 16)


def test_a_package_that_does_not_load_is_a_message_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake_deep_ep.__spec__)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    probe = deepep_probe.available()
    assert "needs a deep_ep that can be imported (ModuleNotFoundError: " in str(probe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"plan.etp": 2}, "needs etp = 1, not 2"),
        ({"plan.recompute": "full"}, "does not dispatch twice in one order"),
        ({"train.dtype": "float32"}, "needs dtype bfloat16, not float32"),
        ({"model.hidden_size": 40}, "needs a hidden size that 16 divides, not 40"),
    ],
)
def test_what_it_cannot_do_is_told_before_the_start(
    change: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = deepep_probe.Probe(interface="v1", missing=())
    monkeypatch.setattr(deepep_probe, "available", lambda: usable)
    sections: dict[str, dict[str, Any]] = {"model": {}, "plan": {}, "train": {"dtype": "bfloat16"}}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    obstacles = deepep_probe.obstacles(
        RunConfig(
            model=ModelConfig(**{"hidden_size": 64} | sections["model"]),
            plan=Plan(**sections["plan"]),
            train=TrainConfig(**sections["train"]),
        )
    )
    assert len(obstacles) == (said is not None)
    assert said is None or said in obstacles[0]
