"""Routings that cannot be used are named by layer, token and expert."""

import pytest
import torch

from moemesh.model.faults import (
    NO_FAULT,
    RoutingError,
    check_experts,
    describe_logit,
    first_fault,
    of_tokens,
)
from moemesh.model.router import stable_top_k


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_bad_logit_is_named(bad: float) -> None:
    logits_TE = torch.randn(6, 4)
    ids_T = torch.arange(6) + 14  # sequence 2 of 7 tokens, from its start
    assert int(first_fault(logits_TE, None)) == NO_FAULT
    logits_TE[4, 1] = logits_TE[2, 3] = logits_TE[0, 0] = bad
    valid_T = torch.tensor([False, True, True, True, True, True])
    code = int(of_tokens(first_fault(logits_TE, valid_T)[None], ids_T, 4))
    text = describe_logit(5, code, 4, 7)
    assert text.startswith("layer 5, token 16 (sequence 2, position 2), expert 3:")
    assert int(first_fault(logits_TE[:0], None)) == NO_FAULT


def test_nan_logits_still_choose_experts_that_exist() -> None:
    """Every rank then reaches the point where they agree to stop."""
    scores_TE = torch.full((3, 8), torch.nan)
    scores_TE[1, 2] = 0.5
    for dtype in (torch.float32, torch.float64):
        experts_TK = stable_top_k(scores_TE.to(dtype), 3)
        check_experts(experts_TK, 8, layer=0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[0, 1], [2, 8]], "layer 3, token 51: expert 8 is not one of the experts 0 to 7"),
        ([[0, -2], [2, 8]], "layer 3, token 50: expert -2 is not one of the experts"),
        ([[0, 1], [6, 6]], "layer 3, token 51: expert 6 is chosen twice"),
        ([[0.5, 1.0]], "layer 3: a routing is int64 .*, not float32 \\[1, 2\\]"),
        ([list(range(9))], "layer 3: 9 experts per token, but there are 8"),
        ([0, 1], "layer 3: a routing is int64"),
    ],
)
def test_bad_tables(table: list[list[int]], words: str) -> None:
    experts = torch.tensor(table)
    with pytest.raises(RoutingError, match=words):
        check_experts(experts, 8, layer=3, token_ids_T=torch.tensor([50, 51]))


def test_good_tables() -> None:
    check_experts(torch.tensor([[0, 7], [-1, -1], [3, -1]]), 8, layer=0)
    check_experts(torch.zeros(0, 2, dtype=torch.int64), 8, layer=0)
