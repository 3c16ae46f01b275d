"""The checkpoints of a run while it trains: started between steps, and what becomes of them."""

from __future__ import annotations

import sys
import time

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.comm.collectives import gather_json
from moemesh.config.train import TrainConfig
from moemesh.parallel.parallelize import RankModel
from moemesh.train.console import Console
from moemesh.train.optimizer import Optimizer
from moemesh.train.records.failure import go_on
from moemesh.train.records.run_folder import RunFolder
from moemesh.train.weights import saving
from moemesh.watch.lease import LeaseLost

#: Waiting longer than this for the last checkpoint before the next is worth an event.
_WAITED_SECONDS = 0.5


class Checkpoints:
    """Saves the state of a run; all ranks make one and call its methods together."""

    def __init__(
        self,
        folder: RunFolder,
        parallel: RankModel,
        optimizer: Optimizer,
        config: TrainConfig,
        console: Console,
    ) -> None:
        """`console`: of rank 0 it gets what is to be known."""
        mesh = parallel.mesh
        self._parallel, self._optimizer, self._path = parallel, optimizer, folder.path
        self._console = console
        self._tells = mesh.rank == 0
        self._saver = Saver(
            folder.checkpoints,
            rank=mesh.rank,
            world_size=mesh.world_size,
            gather=lambda value: gather_json(value, mesh.control),
            keep=config.checkpoints_kept,
            in_background=config.checkpoint_async,
            ranks_on_machine=mesh.layout.ranks_per_node or mesh.world_size,
            lost=folder.lost,
        )
        self._has_said_why = self._has_saved = False

    def save(self, step: int, state: dict[str, object]) -> None:
        """Begin a checkpoint of the present state; a save that fails is a warning, and the next one
        tries again. Waits for the one before, so that their number does not depend on the disk."""
        since = time.monotonic()
        before = self.finish(hurry=True)
        waited = time.monotonic() - since
        if before is not None and waited > _WAITED_SECONDS:
            self._console.say(
                f"step {step}: waited {waited:.1f} s for the checkpoint of step {before.step}, "
                f"which took {before.seconds:.1f} s: train.checkpoint_every is shorter than that",
                "checkpoint",
            )
        try:
            self._start(step, state)
        except CheckpointError as error:
            self._complain(step, str(error))

    def save_last(self, step: int, state: dict[str, object]) -> None:
        """Write a checkpoint of the present state to the end. Raises CheckpointError on every rank
        where all attempts fail."""
        self.finish(hurry=True)
        self._start(step, state)
        outcome = self.finish(raises=True)
        assert outcome is not None

    def finish(self, *, hurry: bool = False, raises: bool = False) -> SaveOutcome | None:
        """Wait for the checkpoint under way, if there is one; what went wrong is a warning, or with
        `raises` CheckpointError. `hurry`: nothing that fails now is tried again. Raises LeaseLost
        on every rank where the checkpoints are another run's now."""
        outcome = self._saver.finish(hurry=hurry)
        self.look()
        if outcome is None:
            return None
        if outcome.is_lost:
            raise LeaseLost(
                f"checkpoint of step {outcome.step} not saved: {outcome.problem}: this run stops"
            )
        if outcome.problem is not None:
            if raises:
                advice = "mend what the message names (a full disk: make room); "
                advice += go_on(self._path, ["moemesh", *sys.argv[1:]])
                raise CheckpointError(
                    f"checkpoint of step {outcome.step}: {outcome.problem}", {"advice": advice}
                )
            self._complain(outcome.step, outcome.problem)
        elif not self._has_saved and self._tells:
            self._has_saved = True
            self._console.keep(f"first checkpoint of this start: step {outcome.step}", "saved")
        if outcome.nonfinite and self._tells:
            more = len(outcome.nonfinite) - 1
            names = outcome.nonfinite[0] + (f" and {more} more tensors" if more else "")
            self._console.warn(
                f"checkpoint of step {outcome.step}: numbers in {names} are not finite: it "
                "replaces no older checkpoint, and no run goes on from it while there is another"
            )
        return outcome

    def look(self) -> None:
        """Tell what failed in the meantime; cheap, for every step."""
        for text in self._saver.news():
            self._console.warn(f"checkpoint: {text}")

    def abandon(self) -> None:
        """This process ends at once: leave the checkpoint under way unfinished."""
        self._saver.abandon()

    def _start(self, step: int, state: dict[str, object]) -> None:
        shards, own = saving.contents(self._parallel, self._optimizer, state)
        self._saver.start(step, shards, own)
        if (why := self._saver.why_blocking) and not self._has_said_why:
            self._has_said_why = True
            text = f"checkpoints are written while training waits: {why}"
            self._console.say(text, "checkpoint")

    def _complain(self, step: int, problem: str) -> None:
        if self._tells:
            self._console.warn(
                f"checkpoint of step {step} not saved, training goes on, the next one is tried "
                f"again: {problem}"
            )
