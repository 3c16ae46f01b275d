"""Every token to the experts of one rank: memory stays below the stated bound, results the same."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from moemesh.comm.mesh import Mesh
from moemesh.config.layout import Layout
from moemesh.model.experts import Experts
from moemesh.ops.saved import SavedForBackward
from tests.parallel.dispatching import make
from tests.ranks import mesh_on_ranks

TOKENS, HIDDEN, WIDTH, SLOTS = 64, 32, 256, 2


def everything_to_rank_zero(mesh: Mesh, name: str, bounded: bool) -> dict[str, Any]:
    """One expert layer whose tokens all choose experts 0 and 1; saved bytes, output, gradients."""
    torch.manual_seed(mesh.rank)
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(TOKENS, SLOTS, dtype=torch.float64, requires_grad=True)
    experts_TK = torch.tensor([0, 1]).expand(TOKENS, SLOTS)
    torch.manual_seed(0)
    with torch.device("cpu"):
        experts = Experts(8 // mesh["ep"].size, HIDDEN, WIDTH).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    experts.max_rows = TOKENS * SLOTS if bounded else None
    dispatcher = make(name, mesh)
    with SavedForBackward(experts.parameters()) as saved:
        plan = dispatcher.plan(experts_TK)
        rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
        y_TH = dispatcher.combine(experts(rows), plan).wait()
        kept = saved.peak_bytes
        y_TH.square().sum().backward()
    return {
        "kept": kept,
        "rows": rows.map.num_rows,
        "y": y_TH.detach(),
        "grads": [x_TH.grad, weights_TK.grad, *[p.grad for p in experts.parameters()]],
    }


@pytest.mark.representative("all_to_all", "all_gather_fewest_bytes")
@pytest.mark.parametrize("name", ["all_to_all", "all_gather_fewest_bytes", "hierarchical"])
def test_bounded_experts_keep_less_and_give_the_same(name: str) -> None:
    layout = Layout(dp=4, ep=4)
    bounded = mesh_on_ranks(layout, everything_to_rank_zero, name, True)
    free = mesh_on_ranks(layout, everything_to_rank_zero, name, False)
    for ours, theirs in zip(bounded, free, strict=True):
        assert_close(ours["y"], theirs["y"])
        for got, expected in zip(ours["grads"], theirs["grads"], strict=True):
            assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert [rank["rows"] for rank in bounded] == [4 * TOKENS * SLOTS, 0, 0, 0]
    # The rows as they came (at most one a slot and rank), their weights and places; and what the
    # experts keep besides is at most h of max_rows rows.
    sent = 4 * TOKENS * SLOTS * (HIDDEN + 4) * 8 + TOKENS * SLOTS * (HIDDEN + 16) * 8
    inner = TOKENS * SLOTS * 2 * WIDTH * 8
    assert bounded[0]["kept"] <= sent + inner
    assert free[0]["kept"] > sent + inner
