"""`benchmarks.layer`: its output, and the exact work of its bounds."""

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks import layer
from benchmarks.bounds import BareGemms
from benchmarks.layer_rank import MeasuredLayer, measure, spread, tokens_of_rank
from benchmarks.settings import LayerSettings
from benchmarks.shapes import SHAPES, LayerShape
from benchmarks.text import layer_text
from benchmarks.workloads import BURST, rank_tokens, workload
from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout, shard_range
from tests import commands
from tests.ranks import mesh_on_ranks

SHAPE = SHAPES["tiny"]
FLOPS = 18 * 64 * 2 * 16 * 24  # 3 products, 3 times, 2 FLOPs; 64 tokens, top-2, 16 x 24


def expert_flops(rows: int, hidden: int, width: int) -> int:
    """FLOPs of SwiGLU experts on `rows` rows, forward and backward.

    Three products a row (gate, up, down) of ``2 * hidden * width`` each, and each of them once
    forward, once for its input's gradient and once for its weight's.
    """
    return 3 * 3 * 2 * rows * hidden * width


def exchange_bytes(rows_sent: int, rows_received: int, hidden: int, element_size: int) -> int:
    """Bytes that one rank sends in the four exchanges of an all-to-all layer, rows only.

    `rows_sent` of its tokens go to other ranks' experts and `rows_received` come from other ranks:
    dispatch sends the former, combine the latter, and their backwards the other way round.
    """
    return 2 * (rows_sent + rows_received) * hidden * element_size


def _measure_on_rank(mesh: Mesh, dtype: torch.dtype) -> tuple[dict[str, Any], int]:
    result = measure(SHAPE, dtype, mesh, 2)
    layer_once = MeasuredLayer(SHAPE, dtype, mesh)
    before = _row_bytes(mesh)
    layer_once()
    return result, _row_bytes(mesh) - before


def _row_bytes(mesh: Mesh) -> int:
    """Bytes that the exchanges of rows inside the layer have added to the ledger so far."""
    callers = ("moe.dispatch", "moe.combine")
    return sum(mesh.ledger.total(caller=caller).wire_bytes for caller in callers)


def _rows_between(num_ranks: int) -> torch.Tensor:
    """[n, n]: (token, slot) pairs of rank i whose expert is on rank j, from the router alone."""
    moe = MeasuredLayer(SHAPE, torch.float32, Mesh.single("cpu")).moe
    per_rank = SHAPE.num_experts // num_ranks
    rows = []
    for rank in range(num_ranks):
        tokens = tokens_of_rank(SHAPE, shard_range(SHAPE.tokens, num_ranks, rank))
        experts = moe.router(tokens, None).experts_TK
        rows.append(torch.bincount(experts.flatten() // per_rank, minlength=num_ranks))
    return torch.stack(rows)


def test_one_process_does_the_flops_of_the_formula_and_sends_nothing() -> None:
    result = measure(SHAPE, torch.float32, Mesh.single("cpu"), 2)
    assert result["flops"] == [FLOPS] == [expert_flops(SHAPE.rows, SHAPE.hidden, SHAPE.width)]
    assert result["bytes_sent"] == [0] and result["rows"] == [128]
    assert set(result["seconds"]) == {"layer", "gemm"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_share_the_flops_and_send_what_the_router_says(dtype: torch.dtype) -> None:
    results = mesh_on_ranks(Layout(dp=2, ep=2), _measure_on_rank, dtype)
    result, between = results[0][0], _rows_between(2)
    assert results[1][0] == result
    assert sum(result["flops"]) == FLOPS
    assert result["rows"] == between.sum(0).tolist()
    assert set(result["seconds"]) == {"layer", "gemm", "all_to_all"}
    for rank, (_, measured) in enumerate(results):
        other = 1 - rank
        sent, received = int(between[rank, other]), int(between[other, rank])
        expected = exchange_bytes(sent, received, SHAPE.hidden, dtype.itemsize)
        assert result["bytes_sent"][rank] == expected == measured


def _measure_load_on_rank(mesh: Mesh, load: str) -> dict[str, Any]:
    return measure(SHAPE, torch.float32, mesh, 1, load)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["W2", "W4"])
def test_a_workload_chooses_the_experts_in_the_routers_place(load: str) -> None:
    """W2 sends most rows to one rank; W4 gives the first rank few tokens of its own."""
    result = mesh_on_ranks(Layout(dp=2, ep=2), _measure_load_on_rank, load)[0]
    between = []
    for gids in rank_tokens(load, num_ranks=2, num_tokens=64):
        sizes = {"num_experts": 4, "experts_per_token": 2, "num_groups": 4}
        experts = workload(load, seed=0, step=BURST.start, gids=gids, **sizes)
        between.append(torch.bincount(experts.flatten() // 2, minlength=2))
    expected = torch.stack(between)
    assert result["rows"] == expected.sum(0).tolist()
    assert load != "W2" or result["rows"][0] > result["rows"][1]
    assert load != "W4" or int(expected[0].sum()) < int(expected[1].sum())
    for rank, sent in enumerate(result["bytes_sent"]):
        away, home = int(expected[rank, 1 - rank]), int(expected[1 - rank, rank])
        assert sent == exchange_bytes(away, home, SHAPE.hidden, 4)


def test_bare_products_follow_uneven_counts() -> None:
    gemms = BareGemms([3, 0, 5], 4, 6, torch.float64)
    gemms()
    torch.testing.assert_close(gemms.into_RG[3:], gemms.x_RH[3:] @ gemms.gate_up_LGH[2].t())
    torch.testing.assert_close(gemms.into_LHF[0], gemms.grad_RH[:3].t() @ gemms.product_RF[:3])
    torch.testing.assert_close(gemms.into_RH[:3], gemms.h_RG[:3] @ gemms.gate_up_LGH[0])


@pytest.mark.slow
def test_ranks_are_started_and_one_object_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", commands.python())  # what ranks are started with
    document = layer.run(LayerSettings(shape="tiny", ranks="1,2", rounds=2))
    assert document is not None and document == json.loads(json.dumps(document))
    assert document["machine"]["threads_per_rank"] == 1
    assert document["machine"]["torch"] == torch.__version__
    assert isinstance(document["machine"]["keeps_freed_memory"], bool)
    assert [result["ranks"] for result in document["results"]] == [1, 2]
    for result in document["results"]:
        assert (result["shape"], result["tokens"], result["top_k"]) == ("tiny", 64, 2)
        assert len(result["saved_bytes"]) == result["ranks"] and min(result["saved_bytes"]) > 0
        assert sum(result["flops"]) == FLOPS
        assert result["ratio"]["quartile_1"] <= result["ratio"]["median"]
        assert set(result["cpu_seconds"]) == set(result["seconds"])
        assert next(iter(result["parts_seconds"])) == "route"
    text = layer_text(document)
    assert "keeps freed memory" in text and len(text.splitlines()) == 4


def test_saved_bytes_are_the_tokens_h_and_what_the_router_keeps() -> None:
    shape = LayerShape(tokens=512, hidden=64, width=128, num_experts=4, top_k=2)
    result = measure(shape, torch.float32, Mesh.single("cpu"), 1)
    large = 4 * (512 * 64 + 1024 * 2 * 128)
    assert large <= result["saved_bytes"][0] <= 1.05 * large


def test_spread_is_median_and_quartiles() -> None:
    statistics = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert statistics == {"median": 3.0, "quartile_1": 2.0, "quartile_3": 4.0}
