"""Choices that compare the tokens of a sequence, and capacity: loops, hand-made cases, promises."""

import math
from typing import Any

import pytest
import torch

from moemesh.config.model import ModelConfig
from moemesh.model.router import (
    capacity_per_sequence,
    comparable,
    expert_choice,
    sinkhorn,
    slots,
    within_capacity,
)
from tests.model.reference import keep_reference
from tests.model.test_router import config_of, context_of, router_of


def test_capacity_is_exact() -> None:
    valid_BS = torch.ones(3, 40, dtype=torch.bool)
    valid_BS[1, 10:], valid_BS[2] = False, False
    config = ModelConfig(num_experts=4, experts_per_token=2)
    assert capacity_per_sequence(valid_BS, config, 1.0).tolist() == [20, 5, 0]
    # 10 * 2 * 1.1 / 4 = 5.5; 40 * 2 * 1.1 / 4 = 22, which floats make 22.000000000000004.
    assert capacity_per_sequence(valid_BS, config, 1.1).tolist() == [22, 6, 0]
    assert capacity_per_sequence(valid_BS, config, 100.0).tolist() == [40, 10, 0]  # clamped
    assert capacity_per_sequence(valid_BS, config, 0.01).tolist() == [1, 1, 0]


def test_expert_choice_by_hand() -> None:
    scores_BSE = torch.tensor([[[0.9, 0.5], [0.8, 0.5], [0.1, 0.7], [1.0, 1.0]]])
    valid_BS = torch.tensor([[True, True, True, False]])
    chosen = expert_choice(scores_BSE, valid_BS, torch.tensor([2]))
    # Expert 0 takes tokens 0 and 1; expert 1 takes token 2 and, of two equals, the earlier.
    assert chosen[0].tolist() == [[True, True], [True, False], [False, True], [False, False]]
    assert slots(chosen[0], 2).tolist() == [[0, 1], [0, -1], [1, -1], [-1, -1]]


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_every_expert_takes_its_share(factor: float) -> None:
    config = config_of(router_selection="expert_choice", capacity_factor=factor)
    context = context_of(12, 2, padded=[3, 20, 21])
    x_TH = torch.randn(24, 4, requires_grad=True)
    routing = router_of(config)(x_TH, context)
    for sequence, valid in enumerate((11, 10)):
        own = routing.experts_TK[sequence * 12 : (sequence + 1) * 12]
        counts = torch.bincount(own[own >= 0], minlength=8)
        share = math.ceil(valid * 3 * (factor or 1.0) / 8)
        assert counts.tolist() == [min(valid, share)] * 8
    assert not (routing.experts_TK[[3, 20, 21]] >= 0).any()
    some_T = (routing.experts_TK >= 0).any(1)
    torch.testing.assert_close(routing.weights_TK.sum(1), some_T.float())
    routing.weights_TK.square().sum().backward()  # tokens without any expert do no harm
    assert x_TH.grad is not None and torch.isfinite(x_TH.grad).all()


@pytest.mark.parametrize("selection", ["expert_choice", "sinkhorn"])
def test_outside_training_tokens_choose(selection: str) -> None:
    """A choice that looks at later tokens would make a validation loss meaningless."""
    x_TH = torch.randn(12, 4)
    balanced = router_of(config_of(router_selection=selection))(
        x_TH, context_of(12, training=False)
    )
    plain = router_of(config_of())(x_TH, context_of(12))
    assert torch.equal(balanced.experts_TK, plain.experts_TK)
    assert torch.equal(balanced.weights_TK, plain.weights_TK)


def test_sinkhorn_balances_and_weighs_by_raw_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BSE = torch.randn(2, 200, 8, generator=generator, dtype=torch.float64)
    logits_BSE[..., 3] += 2.0  # everybody's favourite
    valid_BS = torch.ones(2, 200, dtype=torch.bool)
    valid_BS[1, 50:] = False
    balanced = sinkhorn(logits_BSE, valid_BS)
    for sequence, valid in ((0, 200), (1, 50)):
        part = balanced[sequence, :valid]
        columns = part.softmax(1).sum(0)  # rows to 1, then columns should be equal
        torch.testing.assert_close(columns, torch.full_like(columns, valid / 8), rtol=0.02, atol=0)
        counts = torch.bincount(part.argmax(1), minlength=8)
        plain = torch.bincount(logits_BSE[sequence, :valid].argmax(1), minlength=8)
        assert counts.max() < 0.5 * plain.max()
    # Padding does not matter.
    assert torch.equal(balanced[1, :50], sinkhorn(logits_BSE[1:, :50], valid_BS[1:, :50])[0])
    config = config_of(router_selection="sinkhorn", router_normalize=False)
    routing = router_of(config)(torch.randn(12, 4), context_of(12))
    gathered = routing.logits_TE.softmax(1).gather(1, routing.experts_TK)
    torch.testing.assert_close(routing.weights_TK, gathered)


def test_a_sequence_of_padding_is_legal() -> None:
    for selection in ("expert_choice", "sinkhorn"):
        config = config_of(router_selection=selection)
        routing = router_of(config)(torch.randn(6, 4), context_of(3, 2, padded=[3, 4, 5]))
        assert torch.isfinite(routing.weights_TK).all()
        assert (routing.experts_TK[3:] == -1).all() and (routing.experts_TK[:3] >= 0).any()
    for selection in ("expert_choice", "sinkhorn", "token_choice"):
        config = config_of(router_selection=selection, capacity_factor=1.0)
        assert len(router_of(config)(torch.randn(0, 4), context_of(6, 0)).experts_TK) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_tokens_tie_in_spite_of_rounding(dtype: torch.dtype) -> None:
    """The later of two twins looks better by one unit in the last place; the earlier one wins."""
    twin = torch.tensor(0.3, dtype=dtype)
    better = torch.nextafter(twin, torch.ones_like(twin))
    scores = torch.stack([twin, better, better - 0.1])
    assert comparable(scores)[0] == comparable(scores)[1] > comparable(scores)[2]
    chosen = expert_choice(
        comparable(scores)[None, :, None], torch.ones(1, 3, dtype=torch.bool), torch.tensor([1])
    )
    assert chosen.flatten().tolist() == [True, False, False]


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("capacity", [[0, 3], [1, 2], [6, 6]])
def test_capacity_is_the_loop(prioritised: bool, capacity: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    experts_BSK = torch.rand(2, 6, 4, generator=generator).argsort(2)[:, :, :2]
    experts_BSK[0, 2], experts_BSK[1, 4, 1] = -1, -1
    priority = torch.randint(3, (2, 6, 2), generator=generator).double() if prioritised else None
    kept = within_capacity(experts_BSK, priority, torch.tensor(capacity), 4)
    for sequence in range(2):
        expected = keep_reference(
            experts_BSK[sequence].tolist(),
            None if priority is None else priority[sequence].tolist(),
            capacity[sequence],
        )
        assert kept[sequence].tolist() == expected


def test_capacity_by_hand() -> None:
    """Four tokens want expert 0, which has room for two (4 * 1 * 1.0 / 2)."""
    few: dict[str, Any] = {"num_experts": 2, "experts_per_token": 1, "router_normalize": False}
    x_TH = torch.tensor([[1.0], [3.0], [2.0], [4.0]])

    def dropped(**knobs: Any) -> list[bool]:
        config = config_of(**few, hidden_size=1, capacity_factor=1.0, **knobs)
        router = router_of(config)
        with torch.no_grad():
            router.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        routing = router(x_TH, context_of(4))
        assert int(routing.num_dropped) == 2
        none_T = routing.experts_TK[:, 0] == -1
        assert not routing.weights_TK[none_T].any()
        return none_T.tolist()

    assert dropped(capacity_policy="position") == [False, False, True, True]
    assert dropped(capacity_policy="probability") == [True, False, True, False]


def test_renormalising_is_a_choice() -> None:
    x_TH = torch.randn(12, 4, generator=torch.Generator().manual_seed(5))
    plain = router_of(config_of())(x_TH, context_of(12))
    cut = router_of(config_of(capacity_factor=0.7))(x_TH, context_of(12))
    again = router_of(config_of(capacity_factor=0.7, capacity_renormalize=True))(
        x_TH, context_of(12)
    )
    lost_TK = cut.experts_TK < 0
    assert 0 < int(cut.num_dropped) == int(lost_TK.sum()) < 36
    assert torch.equal(again.experts_TK, cut.experts_TK)
    # Without: the others keep their weights. With: the token keeps its total, if any is left.
    torch.testing.assert_close(cut.weights_TK, plain.weights_TK.masked_fill(lost_TK, 0.0))
    some_T = ~lost_TK.all(1)
    torch.testing.assert_close(again.weights_TK.sum(1), plain.weights_TK.sum(1) * some_T)
    assert (cut.weights_TK.sum(1) < 0.99).any()
    # The balance loss sees what was wanted, not what was left.
    assert torch.equal(cut.preferred_TK, plain.experts_TK)


def test_enough_room_drops_nothing() -> None:
    x_TH = torch.randn(12, 4)
    plain = router_of(config_of())(x_TH, context_of(12))
    roomy = router_of(config_of(capacity_factor=8 / 3))(x_TH, context_of(12))
    assert torch.equal(roomy.experts_TK, plain.experts_TK) and not int(roomy.num_dropped)
    assert torch.equal(roomy.weights_TK, plain.weights_TK)
