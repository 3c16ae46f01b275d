"""The start-up self-test passes every dispatcher and refuses each planted fault on all ranks."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.model.dispatcher import DispatchedRows
from moemesh.ops.pending import Pending
from moemesh.ops.permute import map_from_sources
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.low_latency import LowLatencyDispatcher
from moemesh.parallel.expert.self_test import DispatcherError, self_test
from moemesh.parallel.expert.site import FP8_CODEC
from tests.parallel.dispatching import NUM_EXPERTS, NUM_SLOTS, make
from tests.ranks import mesh_on_ranks

LAYOUT = Layout(dp=4, ep=4)


class _Faulty(AllToAllDispatcher):
    """A right dispatcher, for a fault to be planted in."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh["ep"], mesh["etp"], NUM_EXPERTS)
        self.mesh = mesh


class SwapsRows(_Faulty):
    """The first and the last row at the experts of rank 0 change places."""

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: Any) -> Pending[DispatchedRows]:
        def swap(rows: DispatchedRows) -> DispatchedRows:
            source_R = rows.map.source_R.clone()
            if self.mesh.rank == 0 and len(source_R):
                source_R[[0, -1]] = source_R[[-1, 0]]
            return rows._replace(map=map_from_sources(source_R, rows.map.num_sources))

        return super().dispatch(x_TH, weights_TK, plan).then(swap)


class LosesARow(_Faulty):
    """The last row that rank 3 gets is not there."""

    def plan(self, experts_TK: Tensor) -> Any:
        plan = super().plan(experts_TK)
        counts_LO = plan.counts_LO.clone()
        kept = plan.by_expert
        if self.mesh.rank == 3 and kept.num_rows:
            counts_LO[counts_LO.sum(1).nonzero().max(), counts_LO.nonzero()[-1, 1]] -= 1
            kept = map_from_sources(kept.source_R[:-1], kept.num_sources)
        return replace(plan, counts_LO=counts_LO, by_expert=kept)


class MixesTheSums(_Faulty):
    """Tokens of rank 0 get their sums in the opposite order."""

    def combine(self, y_RH: Tensor, plan: Any) -> Pending[Tensor]:
        sums = super().combine(y_RH, plan)
        return sums.then(lambda y_TH: y_TH.flip(0)) if self.mesh.rank == 0 else sums


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class DoublesTheGradient(_Faulty):
    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: Any) -> Pending[DispatchedRows]:
        return super().dispatch(_Double.apply(x_TH), weights_TK, plan)


class ForgetsThePlan(_Faulty):
    """Right once; the second use of a plan gives zeros."""

    def dispatch(self, x_TH: Tensor, weights_TK: Tensor, plan: Any) -> Pending[DispatchedRows]:
        used, plan.hop.__dict__["used"] = plan.hop.__dict__.get("used", 0), 1
        return super().dispatch(x_TH * (1 - used), weights_TK, plan)


class IgnoresTheCodec(_Faulty):
    """Rows travel in their own dtype, whatever the payload."""


class RaisesOnOneRank(_Faulty):
    """Rank 1 raises where its peers wait for it in an exchange."""

    def combine(self, y_RH: Tensor, plan: Any) -> Pending[Tensor]:
        if self.mesh.rank == 1:
            raise RuntimeError("link down")
        return super().combine(y_RH, plan)


class HangsOnOneRank(_Faulty):
    def plan(self, experts_TK: Tensor) -> Any:
        if self.mesh.rank == 3:
            time.sleep(60)
        return super().plan(experts_TK)


#: Message, and the rank that it names (None: all wait, and the first clock that rings wins).
FAULTS: list[tuple[type[_Faulty], str, int | None]] = [
    (SwapsRows, "rows at the experts, in their order", 0),
    (LosesARow, "rows per expert", 3),
    (MixesTheSums, "sum over the experts", 0),
    (DoublesTheGradient, "gradient of the rows", 0),
    (ForgetsThePlan, "repeated from the saved plan", 0),
    (IgnoresTheCodec, "rows that the payload rounds", 0),
    (RaisesOnOneRank, "RuntimeError: link down", 1),
    (HangsOnOneRank, "no end after 0.5 s", None),
]


def verdicts(mesh: Mesh, names: list[str], dtype: torch.dtype) -> tuple[dict[str, str], int]:
    """The message of each dispatcher ("" when it passes), and the entries in the ledger."""
    errors = {}
    for name in names:
        try:
            dispatcher = make(name, mesh)
            codec = FP8_CODEC if name.endswith("+fp8") else None
            sizes = NUM_EXPERTS, NUM_SLOTS
            self_test(dispatcher, mesh, *sizes, name=name, dtype=dtype, codec=codec)
            if isinstance(dispatcher, LowLatencyDispatcher):
                assert (dispatcher.num_plans, dispatcher.num_fallbacks) == (0, 0)
            errors[name] = ""
        except DispatcherError as error:
            errors[name] = str(error)
            break  # the groups may be of no further use
    return errors, len(mesh.ledger)


@pytest.mark.representative("two nodes-bfloat16-fp8")
@pytest.mark.parametrize("modes", [("", "+exact", "+fp8"), ("+fp8",)], ids=["every", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, Layout(dp=4, ep=4, ranks_per_node=2), Layout(dp=2, tp=2, ep=2, etp=2)],
    ids=["ep4", "two nodes", "ep2etp2"],
)
def test_every_dispatcher_passes_and_leaves_no_trace(
    layout: Layout, dtype: torch.dtype, modes: tuple[str, ...]
) -> None:
    names = ["all_to_all", "all_gather_dense", "all_gather_uneven", "all_gather_fewest_bytes"]
    names += ["hierarchical", "low_latency"]
    names = [name + mode for name in names for mode in modes]
    for found, num_entries in mesh_on_ranks(layout, verdicts, names, dtype):
        assert found == dict.fromkeys(names, "")
        assert num_entries == 0


def refused(mesh: Mesh, fault: type[_Faulty]) -> tuple[str, float]:
    timeout = 0.5 if fault is HangsOnOneRank else 60.0
    start = time.monotonic()
    with pytest.raises(DispatcherError) as caught:
        self_test(
            fault(mesh),
            mesh,
            NUM_EXPERTS,
            NUM_SLOTS,
            name=fault.__name__,
            codec=FP8_CODEC if fault is IgnoresTheCodec else None,
            timeout_seconds=timeout,
        )
    return str(caught.value), time.monotonic() - start


@pytest.mark.representative("SwapsRows", "DoublesTheGradient", "RaisesOnOneRank", "HangsOnOneRank")
@pytest.mark.parametrize(
    ("fault", "check", "rank"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS]
)
def test_a_fault_is_refused_on_every_rank(
    fault: type[_Faulty], check: str, rank: int | None
) -> None:
    ranks = mesh_on_ranks(LAYOUT, refused, fault)
    messages = {message for message, _ in ranks}
    assert len(messages) == 1, "ranks disagree"
    (message,) = messages
    where = "" if rank is None else f"{rank} "
    assert f'"{fault.__name__}" failed its start-up self-test on rank {where}' in message
    assert check in message
    assert max(seconds for _, seconds in ranks) < 50


def test_one_rank_alone_needs_no_process_group() -> None:
    mesh = Mesh.single("cpu")
    self_test(make("all_to_all", mesh), mesh, NUM_EXPERTS, NUM_SLOTS, name="all_to_all")
    with pytest.raises(DispatcherError, match="gradient of the rows"):
        self_test(DoublesTheGradient(mesh), mesh, NUM_EXPERTS, NUM_SLOTS, name="double")
