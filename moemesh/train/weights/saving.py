"""A run's state to and from checkpoints: logical names, global expert ids, any layout.

    model.layers.1.feed_forward.experts.17.gate_up      fp32 master (or the weight itself)
    optimizer.exp_avg.layers.1.feed_forward...          moments, the same names
    model.layers.1.feed_forward.router.selection_bias   buffers

Names and shapes do not depend on the layout that wrote them, so any layout can read them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moemesh.checkpoint import store
from moemesh.checkpoint.files import quarantine
from moemesh.checkpoint.saver import SaveOutcome, Saver
from moemesh.checkpoint.store import Checkpoint, CheckpointError, Shard, shard_of
from moemesh.comm.collectives import gather_json
from moemesh.config.lora import NF4_NUMBERS_AT_ONCE, packed_bytes
from moemesh.config.plan import DEGREES
from moemesh.config.train import TrainConfig
from moemesh.monitor.failures import is_disk_full
from moemesh.ops.nf4 import quantize
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.placement import OwnRange
from moemesh.train.console import Console
from moemesh.train.optimizer import Optimizer
from moemesh.train.owned import owned_shards, shards_of
from moemesh.train.records.failure import go_on
from moemesh.train.records.run_folder import RunFolder


def contents(
    parallel: RankModel, optimizer: Optimizer, state: Mapping[str, object], *, moments: bool = True
) -> tuple[list[Shard], dict[str, object]]:
    """The shards that this rank saves, which share memory with the tensors of the run, and `state`
    with layout, moments and updates; without `moments` only weights and buffers. All ranks call."""
    mesh, updates, counts = parallel.mesh, optimizer.num_updates, dict[str, int]()
    shards = list(owned_shards(parallel, _weights(parallel, optimizer), "model.", saved=True))
    for kind, tensors in optimizer.state().items() if moments else ():
        shards += owned_shards(parallel, tensors, f"optimizer.{kind}.", saved=True)
    if moments:
        # The stages of an asynchronous schedule skip updates each for itself.
        updates = gather_json(updates, mesh.control)[0]
        others = {name: count for name, count in optimizer.counts().items() if count != updates}
        for counts_of_rank in gather_json(others, mesh.control):
            counts |= counts_of_rank
    if mesh["stage"].index == 0:
        shards += _buffers(parallel, saved=True)
    full_state = {
        **state,
        # For readers of the manifest; not needed for loading.
        "layout": {key: getattr(mesh.layout, key) for key in DEGREES},
        "moments": sorted(optimizer.kinds()),
        "updates": updates,
        # Of the parameters with another number of updates than that.
        "updates_of": counts,
    }
    return shards, full_state


def newest(
    folder: RunFolder, parallel: RankModel, on_skip: Callable[[int, str], None]
) -> Checkpoint | None:
    """The newest checkpoint that verifies, the same on every rank; None without any. One with
    non-finite numbers is used only if all have some. Raises CheckpointError if none verifies."""
    mesh = parallel.mesh
    try:
        opened = store.open_together(folder.checkpoints, mesh.control, prefer_finite=True)
    except CheckpointError as error:
        # A file system or store that does not answer: the next start may succeed.
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None
    checkpoint, skipped = opened
    if checkpoint is None and skipped:
        reasons = "\n".join(f"  step {number}: {why}" for number, why in skipped)
        raise CheckpointError(
            f"no checkpoint in {folder.checkpoints} can be read:\n{reasons}\nrestore one of them, "
            "or choose another folder to start from the beginning"
        )
    for number, why in skipped if mesh.rank == 0 else ():
        on_skip(number, why)
        if (reason := folder.lost()) is not None:
            raise folder.lease_lost(reason)
        # Quarantined, not deleted: the run will write this step another time.
        quarantine(folder.checkpoints / f"step-{number}")
    return checkpoint


def load(checkpoint: Checkpoint, parallel: RankModel, optimizer: Optimizer) -> None:
    """Restore weights, moments and buffers, each rank those that it holds. All ranks call."""
    shards = list(owned_shards(parallel, _weights(parallel, optimizer), "model."))
    moments: dict[str, dict[str, Tensor]] = {}
    stored = frozenset(checkpoint.names())
    for kind in optimizer.state_names():
        if kind not in checkpoint.state["moments"]:
            continue
        moments[kind] = {}
        for name, master in optimizer.masters.items():
            if kind in optimizer.state_names(name):
                moment = torch.zeros_like(master.data)
                placement, held = parallel.placements[name], parallel.reducer.held[name]
                prefix = f"optimizer.{kind}."
                parts = list(shards_of(placement, held, moment, parallel.mesh, prefix))
                # A checkpoint of Muon has the moments of AdamW for some parameters only.
                if stored.issuperset(part.name for part in parts):
                    moments[kind][name] = moment
                    shards += parts
    checkpoint.load_into(shards + _buffers(parallel))
    # Versions without "updates_of" counted the same number for all.
    counts = checkpoint.state.get("updates_of", {})
    optimizer.load_state(moments, int(checkpoint.state["updates"]), counts)


class WeightSource(Protocol):
    """Weights by name, such as a checkpoint or a folder of transformers; fills every shard's tensor
    in place."""

    def load_into(self, shards: Sequence[Shard]) -> None: ...


def load_weights(weights: WeightSource, parallel: RankModel, optimizer: Optimizer) -> None:
    """Start from the weights and buffers of `weights`, without moments; all ranks call, and each
    fills what it holds, for which a conversion may read more."""
    weights.load_into(
        [*owned_shards(parallel, _weights(parallel, optimizer), "model."), *_buffers(parallel)]
    )
    optimizer.round_masters()  # masters were loaded; the weights follow


@torch.no_grad()
def load_base(weights: WeightSource, parallel: RankModel) -> None:
    """Read the weights that do not train, which checkpoints of a run on a packed base leave out;
    packed ones piece by piece, in fp32. Under zero3 a rank reads all pieces of its slice of a
    packed weight, and keeps its part."""
    reducer, packed = parallel.reducer, dict[str, Tensor]()
    whole = dict(reducer.frozen_weights)
    for name in list(whole):
        if parallel.placements[name].is_packed:
            packed[name] = whole.pop(name).view(-1)
    weights.load_into([*owned_shards(parallel, whole, "model.")])
    for name, stored in packed.items():
        placement, owned = parallel.placements[name], reducer.frozen_owned[name].numbers
        *rows, columns = map(len, placement.slices(parallel.mesh))
        size = math.prod(rows) * columns
        piece_size = max(NF4_NUMBERS_AT_ONCE // columns, 1) * columns  # whole rows
        for start in range(0, size, piece_size):
            numbers = range(start, min(start + piece_size, size))
            values = torch.empty(len(numbers), dtype=torch.float32, device=stored.device)
            piece = OwnRange(numbers=numbers, is_first=True)
            weights.load_into([*shards_of(placement, piece, values, parallel.mesh, "model.")])
            codes = quantize(values.view(-1, columns)).view(-1)
            # Positions in the packed bytes; under zero3 a rank owns a part of these.
            begin = start // columns * packed_bytes(columns)
            first, last = max(owned.start, begin), min(owned.stop, begin + len(codes))
            if first < last:
                part = codes[first - begin : last - begin]
                stored[first - owned.start : last - owned.start].copy_(part)


def _weights(parallel: RankModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's part of the parameters in a checkpoint: masters of what trains, weights of the
    rest unless :func:`load_base` reads them."""
    is_packed = parallel.model.config.lora.is_packed
    return {**optimizer.masters, **({} if is_packed else parallel.reducer.frozen_weights)}


def _buffers(parallel: RankModel, *, saved: bool = False) -> list[Shard]:
    """The routers' biases, replicated on every rank with the layer; `saved`: only those of modules
    whose first holder is this pipeline rank."""
    shards: list[Shard] = []
    for name, buffer in parallel.model.named_buffers():
        module = name.rpartition(".")[0] + "."
        # The parameters of its module are on the pipeline ranks that hold the buffer.
        placement = next(x for other, x in parallel.placements.items() if other.startswith(module))
        if not saved or placement.holders[0] == parallel.mesh["pp"].index:
            shards.append(shard_of(f"model.{name}", buffer))
    return shards


#: Seconds of waiting for the previous checkpoint above which an event is logged.
_WAITED_SECONDS = 0.5


class Checkpoints:
    """Saves the state of a run while it trains; a save begins between two steps. All ranks make an
    instance and call its methods together."""

    def __init__(
        self,
        folder: RunFolder,
        parallel: RankModel,
        optimizer: Optimizer,
        config: TrainConfig,
        console: Console,
    ) -> None:
        """`console`: that of rank 0 gets all messages."""
        mesh = parallel.mesh
        self._parallel, self._optimizer, self._folder = parallel, optimizer, folder
        self._console = console
        self._logs = mesh.rank == 0
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
        self._has_logged_why = self._has_saved = False
        #: Whether the console has reported a full disk since the last checkpoint.
        self._shows_full = False

    def save(
        self,
        step: int,
        state: dict[str, object],
        *,
        is_last: bool = False,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin a checkpoint of the present state; a failed save is a warning, and the next one
        retries. The call first waits for the previous checkpoint, so that the number of checkpoints
        does not depend on the disk. With `is_last` the call completes the checkpoint. It raises
        CheckpointError on every rank if its last attempt fails: after all retries, or the first
        that fails once `hurries` returns True."""
        since = time.monotonic()
        before = self.finish(hurry=True)
        waited = time.monotonic() - since
        if before is not None and waited > _WAITED_SECONDS and not is_last:
            self._console.log(
                f"step {step}: waited {waited:.1f} s for the checkpoint of step {before.step}, "
                f"which took {before.seconds:.1f} s: train.checkpoint_every is shorter than that",
                "checkpoint",
            )
        shards, full_state = contents(self._parallel, self._optimizer, state)
        try:
            self._saver.start(step, shards, full_state, hurries=hurries)
        except CheckpointError as error:
            if is_last:
                raise
            self._warn_unsaved(step, str(error))
        if (why := self._saver.why_blocking) and not self._has_logged_why:
            self._has_logged_why = True
            text = f"checkpoints are written while training waits: {why}"
            self._console.log(text, "checkpoint")
        if is_last:
            self.finish(raises=True)

    def finish(self, *, hurry: bool = False, raises: bool = False) -> SaveOutcome | None:
        """Wait for the pending checkpoint, if any; a failure is a warning, or with `raises` a
        CheckpointError. `hurry`: without retries. Raises LeaseLost on every rank if another run has
        taken the checkpoints over."""
        outcome = self._saver.finish(hurry=hurry)
        self.report_problems()
        if outcome is None:
            return None
        if outcome.is_lost:
            raise self._folder.lease_lost(
                f"checkpoint of step {outcome.step} not saved: {outcome.problem}"
            )
        if outcome.problem is not None:
            if raises:
                advice = "remove the cause in the message (a full disk: free space); "
                advice += go_on(self._folder.path, ["moemesh", *sys.argv[1:]])
                raise CheckpointError(
                    f"checkpoint of step {outcome.step}: {outcome.problem}", {"advice": advice}
                )
            self._warn_unsaved(outcome.step, outcome.problem)
        else:
            self._shows_full = False
            if not self._has_saved and self._logs:
                self._has_saved = True
                self._console.keep(f"first checkpoint of this start: step {outcome.step}", "saved")
        if outcome.nonfinite and self._logs:
            more = len(outcome.nonfinite) - 1
            names = outcome.nonfinite[0] + (f" and {more} more tensors" if more else "")
            self._console.warn(
                f"checkpoint of step {outcome.step}: numbers in {names} are not finite: it "
                "replaces no older checkpoint, and a run resumes from it only without a finite one"
            )
        return outcome

    def report_problems(self) -> None:
        """Report problems of the pending save; cheap, for every step."""
        for text in self._saver.news():
            if not self._is_known(text):
                self._console.warn(f"checkpoint: {text}")

    def _is_known(self, problem: str) -> bool:
        """Whether `problem` is a full disk, which the console has reported since the last
        checkpoint. The caller reports it otherwise."""
        is_full, is_known = is_disk_full(problem), self._shows_full
        self._shows_full = is_known or is_full
        return is_full and is_known

    def abandon(self) -> None:
        """Leave the pending checkpoint unfinished; the process exits."""
        self._saver.abandon()

    def _warn_unsaved(self, step: int, problem: str) -> None:
        if not self._logs:
            return
        if self._is_known(problem):
            self._console.warn(f"checkpoint of step {step} not saved: no space left on the disk")
        else:
            self._console.warn(
                f"checkpoint of step {step} not saved, training continues, the next one retries: "
                f"{problem}"
            )
