"""The start-up self-test: a dispatcher that loses, swaps or scales rows is refused, by name.

Legend: T own tokens, K slots per token, N rows received, R rows at the experts, L local experts, H
hidden.

Experts that return their input must give every token (its number of valid slots) times itself. The
payload is small integers that identify the token of a row: sums are exact in every dtype down to
bfloat16, a row of them survives 8-bit coding, and equality is the only tolerance. Tokens are uneven
with one empty rank, some slots are -1; routings are spread out, all to the same experts (buffers of
fixed size overflow), and none at all; each plan is used twice. If the payload has a codec, one more
case has rows that it rounds: a dispatcher that does not use the codec returns others.

It runs on the real groups and costs a few small exchanges. Without it, a run with a broken exchange
would train, only worse, and the more so the larger ep is.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moemesh.comm.consensus import run_with_consensus
from moemesh.comm.mesh import Axis, Mesh
from moemesh.comm.overlap import Codec
from moemesh.config.errors import UserError
from moemesh.model.dispatcher import Dispatcher
from moemesh.ops.permute import permute
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher

_MAX_TOKENS = 8
_TIMEOUT_SECONDS = 300.0


class DispatcherError(UserError):
    """A dispatcher violates its contract on these ranks; raised on all of them."""


def self_test(
    dispatcher: Dispatcher,
    mesh: Mesh,
    num_experts: int,
    experts_per_token: int,
    *,
    name: str,
    hidden: int = 16,
    dtype: torch.dtype = torch.float32,
    codec: Codec | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> None:
    """Compare `dispatcher` (called `name` in messages) with the two-phase all-to-all.

    Every rank of the mesh calls this at the same point. `hidden` and `dtype` are those of the rows,
    for a dispatcher that has rules about them; `codec` that of dispatched rows. Nothing is entered
    in the ledger, and counters of the dispatcher stay as they are.

    Raises DispatcherError on every rank when any rank saw a difference, raised, or did not come to
    an end within `timeout_seconds`; the message is that of the first rank that raised or did not
    end, else of the first that saw a difference.
    """
    # A copy: its counters of plans are about the run, not about this test.
    tested = copy.copy(dispatcher)

    def work() -> str | None:
        """The first difference on this rank. All collectives run, even after a difference."""
        reference = AllToAllDispatcher(mesh["ep"], mesh["etp"], num_experts, codec=codec)
        differences: list[str] = []
        cases = _cases(mesh["ep_etp"], num_experts, experts_per_token, hidden, dtype)
        if codec is not None and mesh["ep"].size > 1:
            cases.append(_rounded(cases[0], codec))
        with mesh.ledger.paused():
            for case in cases:
                expected = _use(reference, reference.plan(case.experts_TK), case, mesh["etp"])
                plan = tested.plan(case.experts_TK)
                for use in ("", ", repeated from the saved plan"):
                    seen = _use(tested, plan, case, mesh["etp"])
                    if difference := _compare(seen, expected, case):
                        differences.append(f"{difference} ({case.name}{use})")
        return differences[0] if differences else None

    outcomes = run_with_consensus(work, mesh, name="self_test", timeout_seconds=timeout_seconds)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.problem]
    if not failed:
        return
    # The message names a rank that failed by itself rather than one that was stopped; of these, one
    # that raised: its absence may explain the differences on other ranks.
    first = min(failed, key=lambda r: (outcomes[r].followed, not outcomes[r].raised, r))
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    raise DispatcherError(
        f'dispatcher "{name}" failed its start-up self-test on rank {first}{others} of '
        f"{mesh.world_size}: {outcomes[first].problem}. Nothing was trained. "
        'Use plan.dispatcher = "all_to_all" until this is repaired'
    )


class _Case(NamedTuple):
    """One rank's part of a routing: rows, the gradients of their sums, and chosen experts."""

    name: str
    x_TH: Tensor
    grad_TH: Tensor
    experts_TK: Tensor
    #: Rows as the experts get them.
    coded_TH: Tensor


class _Seen(NamedTuple):
    """Observable results of one use of a plan."""

    counts_L: Tensor
    rows_RH: Tensor
    weights_R: Tensor
    y_TH: Tensor
    grad_x_TH: Tensor
    grad_weights_TK: Tensor


def _cases(
    group: Axis, num_experts: int, num_slots: int, hidden: int, dtype: torch.dtype
) -> list[_Case]:
    """This rank's tokens in three routings; rank 1 of the group has none."""
    num_tokens = 0 if group.index == 1 else 2 + (3 * group.index + 4) % (_MAX_TOKENS - 1)
    global_ids_T = torch.arange(num_tokens, device=group.device) + group.index * _MAX_TOKENS
    x_TH, grad_TH = _digits(global_ids_T, hidden), _digits(5 * global_ids_T + 3, hidden)
    # Blocks of 128 that reach 7 = 448 / 64 get the scale 1 / 64 as e4m3: their integers are exact.
    x_TH[:, ::128] = 7
    generator = torch.Generator().manual_seed(group.index)
    spread_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :num_slots]
    same_TK = torch.arange(num_slots).expand(num_tokens, num_slots)
    token_TK = torch.arange(num_tokens)[:, None] * num_slots + torch.arange(num_slots)
    padding_TK = (token_TK % 5 == 4) | (torch.arange(num_tokens)[:, None] == num_tokens - 1)
    routings = {
        "spread routing": spread_TK.masked_fill(padding_TK, -1),
        "all tokens to the same experts": same_TK.masked_fill(padding_TK, -1),
        "no token routed": torch.full_like(spread_TK, -1),
    }
    x_TH = x_TH.to(dtype)
    return [
        _Case(name, x_TH, grad_TH.to(dtype), experts_TK.to(group.device), coded_TH=x_TH)
        for name, experts_TK in routings.items()
    ]


def _rounded(case: _Case, codec: Codec) -> _Case:
    """`case` with rows that `codec` rounds, to numbers whose sums are exact in bfloat16, too."""
    x_TH = 0.9 * case.x_TH
    x_TH[:, ::128] = 7
    coded_TH = codec.decode(codec.encode(x_TH), x_TH.shape[1], x_TH.dtype)
    return case._replace(name="rows that the payload rounds", x_TH=x_TH, coded_TH=coded_TH)


def _digits(number_T: Tensor, hidden: int) -> Tensor:
    """The octal digits of each number, lowest first, in columns 1, 2, ...; repeated over H."""
    place_H = (torch.arange(hidden, device=number_T.device) - 1) % 8
    return (number_T[:, None] >> (3 * place_H)) & 7


def _use(dispatcher: Dispatcher, plan: Any, case: _Case, etp: Axis) -> _Seen:
    """Dispatch, experts that return their input, combine, and the backward of these."""
    x_TH = case.x_TH.clone().requires_grad_()
    weights_TK = torch.ones(case.experts_TK.shape, device=x_TH.device, requires_grad=True)
    rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
    rows_RH = permute(rows.source_NH, rows.map)
    # Each expert-tensor rank returns its share of the columns: the shares add up to the input.
    columns_H = torch.arange(rows_RH.shape[1], device=rows_RH.device)
    share_H = columns_H % etp.size == etp.index
    results_RH = (rows_RH.float() * share_H * rows.weights_R[:, None].float()).to(rows_RH.dtype)
    y_TH = dispatcher.combine(results_RH, plan).wait()
    y_TH.backward(case.grad_TH)
    assert x_TH.grad is not None and weights_TK.grad is not None, "no gradient arrived"
    # Padding rows at the end are not computed.
    own_R = slice(int(rows.counts_L.sum()))
    return _Seen(
        rows.counts_L, rows_RH[own_R].detach(), rows.weights_R[own_R].detach(), y_TH.detach(),
        x_TH.grad, weights_TK.grad,
    )  # fmt: skip


def _compare(seen: _Seen, reference: _Seen, case: _Case) -> str | None:
    """A description of the first check that fails."""
    valid_TK = case.experts_TK >= 0
    num_valid_T1 = valid_TK.sum(1, keepdim=True).to(case.x_TH.dtype)
    inner_T1 = (case.coded_TH.float() * case.grad_TH.float()).sum(1, keepdim=True)
    checks = {
        "rows per expert": (seen.counts_L, reference.counts_L),
        "rows at the experts, in their order": (seen.rows_RH, reference.rows_RH),
        "weights at the experts": (seen.weights_R, reference.weights_R),
        "sum over the experts": (seen.y_TH, num_valid_T1 * case.coded_TH),
        "gradient of the rows": (seen.grad_x_TH, num_valid_T1 * case.grad_TH),
        "gradient of the weights": (seen.grad_weights_TK, inner_T1 * valid_TK),
    }
    for what, (have, want) in checks.items():
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{what}: {list(have.shape)} {have.dtype}, not {list(want.shape)} {want.dtype}"
        if not torch.equal(have, want):
            place = tuple((have != want).nonzero()[0].tolist())
            return f"{what}: {have[place].item():g} at {list(place)}, not {want[place].item():g}"
    return None
