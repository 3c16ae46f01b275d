"""Ranks of this machine that are started again after a failure, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moemesh.comm import launch
from moemesh.config.run import RunConfig
from moemesh.train.records.failure import (
    advice_on,
    details,
    go_on,
    hint_on,
    keep_failure,
    kept_in,
    newest_step,
    same_failure,
    say,
    write_verdict,
)
from moemesh.train.records.run_folder import LOGS, Events, RunFolder, RunFolderError, tell_slow
from moemesh.watch.signals import STOPPING
from moemesh.watch.supervisor import Ended, describe
from moemesh.watch.verdict import FLOOR_SECONDS, Limits, Verdict

#: A step on a GPU may compile a kernel in the middle of a run, on cores that all ranks share.
_CUDA_FLOOR_SECONDS = 180.0
#: The ranks have ended: the question where to go on may take its time, but not forever.
_STORE_SECONDS = 60.0

CAME_TWICE = "it came twice at the same place"


class Budget:
    """The number of restarts that ranks may still have; progress renews it."""

    def __init__(self, restarts: int) -> None:
        """`restarts`: how many are allowed without any progress between."""
        self.restarts = self.left = restarts
        self._from = -1
        self._before: Verdict | None = None

    def refuses(self, verdict: Verdict, step: int | None) -> str | None:
        """None if the ranks may be started again after `verdict`, from the checkpoint of `step`
        (None: from the beginning), which is counted; else why not."""
        told, before, start = verdict.seen.told, self._before, -1 if step is None else step
        self._before = verdict
        if told is not None and told.is_final:
            return "the same would happen again"
        if before is not None and start > self._from:
            self.left = self.restarts
        elif before is not None and same_failure(before, verdict):
            return CAME_TWICE
        self._from = start
        if not self.left:
            return "no progress between restarts" if self.restarts else "train.restarts is 0"
        self.left -= 1
        return None


def limits_of(config: RunConfig) -> Limits:
    """The seconds that ranks of a run may be without progress."""
    on_cpu = config.train.device == "cpu" or not torch.cuda.is_available()
    floor = FLOOR_SECONDS if on_cpu else _CUDA_FLOOR_SECONDS
    patience = config.train.timeout_seconds
    return Limits(patience=patience, floor=floor, aborts_follow=not on_cpu)


def train_supervised(
    config: RunConfig,
    folder: RunFolder,
    arguments: Sequence[str],
    *,
    run: Callable[..., Ended] = launch.run_ranks,
) -> int:
    """Run the ranks of `config` until they have ended well, were asked to stop, or failed for good;
    returns the exit code. `arguments`: those of ``moemesh`` for every rank."""
    path, logs = folder.path, folder.path / LOGS
    budget, events = Budget(config.train.restarts), Events(folder)
    command = ["moemesh", *arguments]
    keep_failure(path, have_ended=True)  # of an earlier command
    while True:
        ended = run(
            config.plan.world_size,
            arguments,
            logs=logs,
            limits=limits_of(config),
            answer=STOPPING,
            still_ours=folder.is_ours,
            notice=lambda slow: tell_slow(slow, events),
        )
        verdict = ended.verdict
        if verdict is None:
            return ended.code
        step, is_ours = newest_step(path, seconds=_STORE_SECONDS), folder.is_ours()
        refused = budget.refuses(verdict, step)
        goes_on = is_ours and refused is None
        say(describe(ended, logs, kept=kept_in(path, folder.epoch) if goes_on else logs))
        if not is_ours:
            return ended.code
        since = f"step {step}" if step is not None else "the beginning: there is no checkpoint"
        word = verdict.seen.word
        at = word.step if word is not None else None
        events.add("failed", verdict.message, at)
        if refused is not None:
            advice = advice_on(verdict, path, command, came_twice=refused == CAME_TWICE)
            action = f"ended the run: {refused}"
            write_verdict(path, ended, epoch=folder.epoch, action=action, advice=advice)
            say(f"{details(path)}; not started again: {refused}\n{advice}")
            return ended.code
        text = f"restart {budget.restarts - budget.left} of {budget.restarts}, from {since}"
        hint = hint_on(verdict)
        write_verdict(path, ended, epoch=folder.epoch, action=text, advice=hint)
        events.add("restart", text, at)
        kept = keep_failure(path, have_ended=True)
        where = details(path) if kept is None else f"details in {kept}"
        say("\n".join([f"moemesh: {text}; {where}", *([hint] if hint else [])]))
        try:
            folder.raise_epoch()
        except RunFolderError as error:
            say(f"moemesh: not started again: {error}\n{go_on(path, command)}")
            return ended.code
