"""Auxiliary losses of a scope by their definition; tests/parity has the sums over ranks."""

import numpy as np
import pytest
import torch

from moemesh.model.balance_loss import auxiliary_loss
from moemesh.model.router import Routing, route
from moemesh.model.seams import Tokens
from tests.model.test_router import config_of, context_of

NUM_EXPERTS, K = 8, 2


def routing_of(scope: str, num_sequences: int, padded: list[int] | None = None) -> float:
    """Both losses of two, or one, sequences of the example's 12 tokens."""
    config = config_of(
        experts_per_token=K, aux_loss_scope=scope, aux_loss_coefficient=1.0, z_loss_coefficient=0.5
    )
    context = context_of(12 // num_sequences, num_sequences, padded)
    logits_TE = torch.from_numpy(np.random.default_rng(0).normal(size=(12, NUM_EXPERTS)))
    routing = route(logits_TE, config, None, context.valid_T)
    return float(auxiliary_loss(routing, config, context, Tokens()))


def by_definition(rows: list[int]) -> float:
    """Both losses of one scope, element by element."""
    logits = np.random.default_rng(0).normal(size=(12, NUM_EXPERTS))[rows]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = np.argsort(-p, axis=1)[:, :K]
    loss = 0.0
    for expert in range(NUM_EXPERTS):
        f = sum(expert in row for row in chosen) / (K * len(rows))
        loss += NUM_EXPERTS * f * p[:, expert].mean()
    return loss + 0.5 * float(np.mean(np.log(np.exp(logits).sum(1)) ** 2))


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global"])
def test_scopes_by_definition(scope: str) -> None:
    rows = list(range(12))
    assert routing_of(scope, 1) == pytest.approx(by_definition(rows))
    halves = by_definition(rows[:6]) + by_definition(rows[6:])
    expected = halves if scope == "sequence" else by_definition(rows)
    assert routing_of(scope, 2) == pytest.approx(expected)
    assert halves / 2 != pytest.approx(by_definition(rows), rel=1e-3)


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global"])
def test_padding_counts_nowhere(scope: str) -> None:
    real = [row for row in range(12) if row not in (2, 7, 8)]
    parts = [[r for r in real if r < 6], [r for r in real if r >= 6]]
    expected = sum(map(by_definition, parts)) if scope == "sequence" else by_definition(real)
    assert routing_of(scope, 2, padded=[2, 7, 8]) == pytest.approx(expected)
    # A scope of nothing but padding adds nothing.
    assert routing_of(scope, 2, padded=list(range(6, 12))) == pytest.approx(
        by_definition(list(range(6)))
    )
    assert routing_of(scope, 1, padded=list(range(12))) == 0.0


def test_the_gradient_flows_through_probabilities_and_logits_only() -> None:
    config = config_of(experts_per_token=K, aux_loss_coefficient=1.0, z_loss_coefficient=0.5)
    logits_TE = torch.randn(12, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)

    def loss(logits_TE: torch.Tensor) -> torch.Tensor:
        routing: Routing = route(logits_TE, config, None, None)
        return auxiliary_loss(routing, config, context_of(6, 2), Tokens())

    assert torch.autograd.gradcheck(loss, (logits_TE,))
