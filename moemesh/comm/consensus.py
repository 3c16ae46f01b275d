"""Run the same work on every rank and agree on its outcome, even when a rank stops half-way.

A rank that raises between two collectives leaves its peers waiting inside the next one, where no
collective can reach them. So the work runs in a thread, and ranks exchange outcomes through the
default store: all ranks stop within milliseconds after one has failed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from moemesh.comm.mesh import Mesh

_POLL_SECONDS = 0.005
#: Longest wait in seconds, after the timeout, for the outcomes of the other ranks; and, after a
#: failure, until all ranks have read them.
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The outcome of one rank: `problem` is None for success. `raised`: its work raised or did not
    end; `followed`: its work was abandoned because another rank's raised or did not end."""

    problem: str | None
    raised: bool = False
    followed: bool = False


def run_with_consensus(
    work: Callable[[], str | None], mesh: Mesh, *, name: str, timeout_seconds: float
) -> list[RankOutcome]:
    """Run ``work()`` on every rank of `mesh`; returns the outcomes of all ranks, in rank order.

    `work` may use collectives and returns what is wrong, or None. All ranks call this at the same
    point with the same `name`. On several ranks it returns at most 20 s after `timeout_seconds`,
    whatever `work` does; on one rank it waits for `work` without a limit. If a rank raised or hung,
    the groups of the mesh cannot be used any more.
    """
    if mesh.world_size == 1:
        return [_outcome(work)]
    ranks = "-".join(map(str, mesh["world"].ranks))
    store = dist.PrefixStore(f"moemesh/consensus/{name}/{ranks}", _get_default_store())
    # Keys of this call only: every rank counts its calls, so all have the same number.
    call = store.add(f"calls/{mesh.rank}", 1)
    store = dist.PrefixStore(f"call/{call}", store)
    deadline = time.monotonic() + timeout_seconds
    done: list[RankOutcome] = []

    def run() -> None:
        if mesh.device.type == "cuda":
            torch.cuda.set_device(mesh.device)  # each thread has a current device of its own
        done.append(_outcome(work))

    thread = threading.Thread(target=run, name="moemesh-consensus", daemon=True)
    thread.start()
    # This rank's outcome: the end of its work, a peer's failure or the timeout, whichever is first.
    outcome: RankOutcome | None = None
    while outcome is None:
        thread.join(_POLL_SECONDS)
        if done:
            outcome = done[0]
        elif store.check(["raised"]):
            problem = "stopped because another rank failed"
            outcome = RankOutcome(problem=problem, raised=True, followed=True)
        elif time.monotonic() > deadline:
            outcome = RankOutcome(problem=f"no end after {timeout_seconds:g} s", raised=True)
    if outcome.raised and not outcome.followed:
        store.set("raised", "yes")
    store.set(str(mesh.rank), json.dumps(asdict(outcome)))
    keys = [str(rank) for rank in range(mesh.world_size)]
    while not store.check(keys) and time.monotonic() < deadline + _ANSWER_SECONDS:
        time.sleep(_POLL_SECONDS)
    silent = RankOutcome(problem="no answer", raised=True)
    outcomes = [
        RankOutcome(**json.loads(store.get(key))) if store.check([key]) else silent for key in keys
    ]
    if any(outcome.problem for outcome in outcomes):
        # One of these processes may host the store: none exits before all have read it.
        limit = time.monotonic() + _ANSWER_SECONDS
        store.add("read", 1)
        while store.add("read", 0) < mesh.world_size and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
    return outcomes


def _outcome(work: Callable[[], str | None]) -> RankOutcome:
    try:
        return RankOutcome(problem=work())
    except Exception as error:
        return RankOutcome(problem=f"{type(error).__name__}: {error}", raised=True)
