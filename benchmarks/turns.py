"""Turns of contenders that run in processes of their own: one timed step each, then the other's.

The number of the next turn is the name of a file in a folder that both read. A contender whose turn
has not come sleeps; its threads do not compete with those of the other. In every second round the
order is reversed, since the second finds other data in the caches than the first.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONTENDERS = ("moemesh", "transformers")
#: Steps before the first that counts: allocators and kernels settle.
WARM_UP = 3
LEARNING_RATE, CLIP, DECAY = 1e-4, 1.0, 0.1
#: Tokens of a prompt.
PROMPT = 32
#: Longest wait for the other contender, in seconds.
_PATIENCE = 600.0

#: One whole step on the tokens [B, S + 1] of all ranks; returns the mean loss of a token, or of
#: generated tokens the mean id.
Step = Callable[[Tensor], float]


class TurnError(RuntimeError):
    """The other contender did not take its turn."""


def tokens_of_round(settings: Any, number: int) -> Tensor:
    """The tokens [B, S + 1] of a round, the same for both contenders."""
    generator = torch.Generator().manual_seed(number)
    shape = (settings.sequences, settings.seq_len + 1)
    return torch.randint(settings.vocabulary, shape, generator=generator)


def take_turns(
    settings: Any,
    name: str,
    step: Step,
    gather: Callable[[float], list[float]],
    device: torch.device,
    *,
    rank: int,
) -> None:
    """Take `settings.rounds` timed steps after the warm-up, each while the other contender waits.

    `gather` returns a value of every rank, on all ranks. Rank 0 writes ``<name>.json`` to the
    folder `settings.turns`: the seconds of each round (those of its slowest rank), the losses of
    all rounds, the threads of a rank, and the peak memory of the largest rank in bytes.
    """
    folder, seconds, losses = Path(settings.turns), [], []
    for number in range(WARM_UP + settings.rounds):
        tokens_BS = tokens_of_round(settings, number)
        place = CONTENDERS.index(name)
        turn = 2 * number + (1 - place if number % 2 else place)
        if rank == 0:
            _wait_for(folder / str(turn))
        gather(0.0)
        synchronize(device)
        start = time.perf_counter()
        losses.append(step(tokens_BS))
        synchronize(device)
        elapsed = max(gather(time.perf_counter() - start))
        if number >= WARM_UP:
            seconds.append(elapsed)
        if rank == 0:
            (folder / str(turn)).rename(folder / str(turn + 1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    result = {
        "seconds": seconds,
        "losses": losses,
        "threads": torch.get_num_threads(),
        "peak_bytes": max(gather(float(peak))),
    }
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def _wait_for(file: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            raise TurnError(f"the other contender did not finish its turn in {_PATIENCE:.0f} s")
        time.sleep(0.002)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
