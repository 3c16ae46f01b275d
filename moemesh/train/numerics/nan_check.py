"""Examination of a non-finite step: repeat it, and check every number.

Healthy steps pay nothing: the ranks repeat the step's forward and backward, with the same samples
and random numbers, only after they have agreed that a loss or a gradient is not finite. They check
the weights, the outputs of all modules of layers and of the norms before a head, the losses, the
gradients of the inputs of these modules and of all weights before these are summed over ranks, and
then the sums. The findings of all ranks are put in the order of the computation; the first is the
origin:

    weights  ->  forward, microbatch by microbatch, layer by layer  ->  loss
             ->  backward, from the last layer to the first  ->  sums over ranks

A fault that does not repeat (a bit that flipped in a register, for example) is found by none of
these checks; then the report has the parameters whose gradients were not finite in the step itself.

Legend: B sequences, S positions, T tokens of a microbatch, E experts, L local experts, R rows of
local experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moemesh.comm.collectives import gather_json
from moemesh.model.batch import Batch, Context
from moemesh.model.faults import NO_FAULT
from moemesh.model.router import Routing
from moemesh.model.transformer import ModelPart, Output
from moemesh.parallel.parallelize import RankModel
from moemesh.parallel.pipeline.pipeline import Pipeline
from moemesh.schedule.action import Op
from moemesh.schedule.generators import one_f_one_b
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer
from moemesh.train.step import StepSums, count_over_step, forget_rank_tokens

#: Largest number of sample ids, experts and parameters in a message.
MOST_NAMED = 16
#: Phases in the order of the computation; "backward" and "gradient" are compared by layer.
PHASES = ("weight", "forward", "loss", "backward", "gradient", "sum")


@dataclass(frozen=True, kw_only=True)
class Nonfinite:
    """Non-finite numbers on one rank. `place`: their position in the order of a layer's
    computation; ``is_fresh``: the module's inputs are finite; `sequences`: indices in the step, if
    known, of those concerned among `num_checked` sequences."""

    rank: int
    phase: str
    name: str
    value: str
    microbatch: int = 0
    layer: int = -1
    place: int = 0
    is_fresh: bool = False
    experts: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    num_checked: int = 0


@dataclass(frozen=True, kw_only=True)
class NonfiniteOrigin:
    """The origin of a value that is not finite, the same on every rank.

    `phase`: one of :data:`PHASES`, or "unrepeated" if the repeated step was finite. `name`: the
    parameter or module. `ranks`: all ranks that had the value at that place. `layer`, `microbatch`
    and `expert` are None if they do not apply. `samples`: ids in the data of the sequences
    concerned; `num_alike`: the number of these sequences if all checked ones are concerned, so that
    no single one is the cause; else 0. `parameters`: those whose gradients were not finite in the
    step itself. ``is_damage``: other ranks hold finite copies of the same weight.
    """

    phase: str
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    microbatch: int | None = None
    layer: int | None = None
    expert: int | None = None
    experts: tuple[int, ...] = ()
    name: str = ""
    parameters: tuple[str, ...] = ()
    value: str = ""
    samples: tuple[int, ...] = ()
    num_alike: int = 0
    is_damage: bool = False

    def facts(self) -> dict[str, Any]:
        """The keys of failure.json that are known."""
        name = "parameter" if self.phase in ("weight", "gradient", "sum") else "module"
        return {
            name if key == "name" else key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if value not in (None, (), "") and key not in ("num_alike", "is_damage")
        }

    def __str__(self) -> str:
        if self.phase == "unrepeated":
            text = "it does not repeat with the same numbers: a fault of the hardware, perhaps"
            if self.parameters:
                named = ", ".join(self.parameters[:3])
                more = len(self.parameters) - 3
                text += f"; gradients of {named}{f' and {more} others' if more > 0 else ''}"
            return text
        what = {
            "weight": f"the weight {self.name} is",
            "forward": f"the output of {self.name} is",
            "loss": "the loss is",
            "backward": f"the gradient that leaves {self.name} is",
            "gradient": f"the gradient of {self.name} is",
            "sum": f"the sum over ranks of the gradient of {self.name} is",
        }[self.phase]
        where = [f"rank {self.rank}"]
        if len(self.ranks) > 1:
            where = ["ranks " + ", ".join(map(str, self.ranks))]
        places = {"microbatch": self.microbatch, "layer": self.layer, "expert": self.expert}
        where += [f"{name} {number}" for name, number in places.items() if number is not None]
        if self.num_alike:
            where.append(f"all {self.num_alike} sequences alike, so none of them is the cause")
        elif self.samples:
            where.append("samples " + ", ".join(map(str, self.samples)))
        return f"{what} {self.value} first ({'; '.join(where)})"


def order(value: Nonfinite) -> tuple[int, ...]:
    """Sort key of the order of computation among values of one phase."""
    if value.phase == "backward":
        return value.microbatch, -value.layer, -value.place
    if value.phase in ("weight", "gradient", "sum"):
        return value.microbatch, value.place
    return value.microbatch, value.layer, value.place


def origin(
    parallel: RankModel,
    seen: Sequence[Nonfinite],
    sample_ids: Sequence[int],
    parameters: tuple[str, ...],
) -> NonfiniteOrigin:
    """The first value in the order of the computation; all ranks call with the values of all."""
    phase = next(
        (phase for phase in PHASES if any(finding.phase == phase for finding in seen)), None
    )
    if phase is None:
        return NonfiniteOrigin(phase="unrepeated", parameters=parameters[:MOST_NAMED])
    candidates = [finding for finding in seen if finding.phase == phase]
    if phase == "backward":
        # A backward goes from the last layer to the first: the gradient of a weight of a later
        # layer, or in an earlier microbatch, was computed before the first value of this phase.
        first = min(candidates, key=order)
        before = first.microbatch, -first.layer
        weights = [
            finding for finding in seen if finding.phase == "gradient" and finding.layer >= 0
        ]
        candidates = [
            finding for finding in weights if (finding.microbatch, -finding.layer) < before
        ] or candidates
    first = min(candidates, key=lambda value: (order(value), not value.is_fresh, value.rank))
    # The same value on all ranks that had it.
    key = order(first), first.name, first.is_fresh
    same = [
        finding for finding in candidates if (order(finding), finding.name, finding.is_fresh) == key
    ]
    in_step = first.phase not in ("weight", "sum")
    concerned = [finding for finding in same if finding.sequences]
    if in_step and not concerned:
        # Rows of experts are tokens of other ranks, whose values in the same layer have the
        # sequences.
        layer_of = first.phase, first.microbatch, first.layer
        concerned = [
            finding
            for finding in seen
            if (finding.phase, finding.microbatch, finding.layer) == layer_of
        ]
    sequences = sorted({sequence for finding in concerned for sequence in finding.sequences})
    are_all = all(len(finding.sequences) == finding.num_checked for finding in concerned)
    experts = tuple(sorted({expert for finding in same for expert in finding.experts}))
    layer, ranks = layer_in(first.name), tuple(sorted({finding.rank for finding in same}))
    return NonfiniteOrigin(
        phase=first.phase,
        rank=first.rank,
        ranks=ranks,
        name=first.name,
        value=first.value,
        microbatch=first.microbatch if in_step else None,
        layer=None if layer < 0 else layer,
        expert=experts[0] if len(experts) == 1 else None,
        experts=experts[:MOST_NAMED],
        samples=tuple(int(sample_ids[sequence]) for sequence in sequences)[:MOST_NAMED],
        num_alike=len(sequences) if len(sequences) > 1 and are_all else 0,
        parameters=parameters[:MOST_NAMED],
        is_damage=phase == "weight" and _is_damage(parallel, first.name, first.rank, ranks),
    )


def _is_damage(parallel: RankModel, weight: str, rank: int, ranks: tuple[int, ...]) -> bool:
    """Whether other ranks hold finite copies of a weight of `rank`; all ranks call."""
    name = re.sub(r"^optimizer\.[^.]+\.", "", weight)
    placement, data = parallel.placements.get(name), parallel.reducer.data
    if placement is None or data == "zero3" or (name != weight and data != "replicate"):
        return False  # no copies: each rank has another part
    copies = gather_json(parallel.mesh[placement.summed_over].ranks, parallel.mesh.control)
    return not set(copies[rank]) <= set(ranks)


def layer_in(name: str) -> int:
    """The layer in the name of a parameter, moment or module; -1 without one."""
    match = re.search(r"(?:^|\.)layers\.(\d+)", name)
    return -1 if match is None else int(match[1])


#: Largest number of values of each phase that are sent to the other ranks: the first ones.
_MOST_SENT = 32


class NaNCheck:
    """Collects non-finite values on this rank in the step of `microbatches`: in its weights, by
    hooks in the modules of layers, and in losses and gradients."""

    def __init__(self, parallel: RankModel, microbatches: Sequence[Batch]) -> None:
        self._parallel, self.mesh = parallel, parallel.mesh
        self._num_microbatches = len(microbatches)
        #: (phase, name, microbatch) -> the first value found there.
        self._seen: dict[tuple[object, ...], Nonfinite] = {}
        #: Sequence -> index of its microbatch.
        self._microbatch_of = {
            sequence: index
            for index, batch in enumerate(microbatches)
            for sequence in batch.sequences_B.tolist()
        }
        self._names = {p: name for name, p in parallel.model.named_parameters()}
        #: Microbatch of the running operation, or of the gradient that was checked last.
        self._current = 0
        #: Layer -> context of its newest forward.
        self._contexts: dict[int, Context] = {}
        #: Context of the newest forward of any layer.
        self._latest: Context | None = None
        #: Tensors with a hook on their gradient.
        self._watched = WeakTensorKeyDictionary()
        #: (layer, module) -> number in the order of the first starts, and of the first ends.
        self._started: dict[tuple[int, str], int] = {}
        self._ended: dict[tuple[int, str], int] = {}

    def gather(self) -> list[Nonfinite]:
        """The first values of each phase, of every rank; all ranks call."""
        local: list[dict[str, Any]] = []
        for phase in PHASES:
            ordered = sorted(
                (finding for finding in self._seen.values() if finding.phase == phase), key=order
            )
            local += map(asdict, ordered[:_MOST_SENT])
        tuples = ("experts", "sequences")  # JSON makes lists of them
        return [
            Nonfinite(**{**values, **{key: tuple(values[key]) for key in tuples}})
            for findings in gather_json(local, self.mesh.control)
            for values in findings
        ]

    def check_weights(self, optimizer: Optimizer | None) -> None:
        """Check parameters, buffers, masters and moments."""
        model = self._parallel.model
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        named += self._parallel.reducer.held_weights.items()
        if optimizer is not None:
            named += optimizer.masters.items()
            for kind, moments in optimizer.state().items():
                named += [(f"optimizer.{kind}.{name}", x) for name, x in moments.items()]
        for name, tensor in named:
            self._check_parameter("weight", name, tensor)

    @contextmanager
    def hooked(self) -> Iterator[Pipeline]:
        """Context in which everything that its pipeline computes is checked: the pipeline of the
        run, or, for an asynchronous schedule, one that does not update between microbatches."""
        pipeline, reducer = self._parallel.pipeline, self._parallel.reducer
        if pipeline.schedule.update is not None:
            pipeline = Pipeline(
                one_f_one_b(pipeline.schedule.num_ranks, self._num_microbatches),
                pipeline.parts,
                self._parallel.model,
                reducer,
                self.mesh,
                lambda seq_len: (seq_len,),
                overlap_blocks=False,
            )
        config = self._parallel.model.config
        handles: list[Any] = []
        for name, module in self._parallel.model.named_modules():
            layer = layer_in(name)
            if layer < 0 and re.match(r"norm(\.|$)|ahead_norms\.", name):
                # Norms before a head come after all layers.
                layer = config.num_layers + config.num_mtp_layers
            if layer >= 0:
                handles += self._hooks(name, layer, module)

        def check_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
            if (name := self._names.get(parameter)) is not None:
                self._check_parameter("gradient", name, gradient, self._current)

        def start(op: Op) -> None:
            self._current = pipeline.schedule.sample(op)

        pipeline.hooks.watch, reducer.watch = start, check_gradient
        try:
            yield pipeline
        finally:
            pipeline.hooks.watch = reducer.watch = None
            for handle in handles:
                handle.remove()
        for name, gradient in reducer.gradients.items():  # after the sums over ranks
            self._check_parameter("sum", name, gradient)

    def check_losses(self, output: Output, batch: Batch) -> None:
        """Check the losses of a forward, by sequence."""
        if output.losses_T is None:
            return
        num_sequences = len(batch.sequences_B)
        for depth, losses_T in enumerate((output.losses_T, *output.ahead_losses)):
            mask_T = batch.loss_mask_T() if not depth else batch.ahead(depth).loss_BS.flatten()
            learns_T = torch.ones_like(losses_T, dtype=torch.bool) if mask_T is None else mask_T
            bad_T = ~torch.isfinite(losses_T) & learns_T
            if bad_T.any():
                rows = bad_T.view(num_sequences, -1).any(1)
                sequences = tuple(batch.sequences_B[rows].tolist())
                num_checked = int(learns_T.view(num_sequences, -1).any(1).sum())
                where = {"sequences": sequences, "num_checked": num_checked}
                self._add("loss", "loss", losses_T[bad_T], **where)
        if not is_finite(output.aux):
            where = {"sequences": tuple(batch.sequences_B.tolist()), "num_checked": num_sequences}
            self._add("loss", "auxiliary loss", output.aux, place=1, **where)

    def _hooks(self, name: str, layer: int, module: nn.Module) -> Iterator[Any]:
        """Hook `module`: `begin` hooks the gradients of its inputs, `end` checks its outputs."""

        def begin(_: nn.Module, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
            given = (*args, *keys.values())
            for value in given:
                if isinstance(value, Context):
                    self._contexts[layer] = self._latest = value
            place = self._started.setdefault((layer, name), len(self._started))
            microbatch, context = self._microbatch(layer), self._contexts.get(layer)

            def check_gradient(gradient: Tensor) -> None:
                self._current = microbatch
                if not is_finite(gradient):
                    where = {"microbatch": microbatch, "layer": layer, "place": place}
                    where |= _sequences(context, gradient)
                    self._add("backward", name, gradient, **where)

            for x in _floats(given):
                # Nested modules with the same input share its gradient.
                if x.requires_grad and x not in self._watched:
                    self._watched[x] = True
                    x.register_hook(check_gradient)

        def end(_: nn.Module, args: tuple[Any, ...], keys: dict[str, Any], output: Any) -> None:
            place = self._ended.setdefault((layer, name), len(self._ended))
            microbatch, context = self._microbatch(layer), self._contexts.get(layer)
            bad = [x for x in _floats(output) if not is_finite(x)]
            experts, sequences = list[int](), tuple[int, ...]()
            if isinstance(output, Routing) and int(output.fault) != NO_FAULT:
                # The code of a fault is (token id) * (number of experts) + expert.
                token, expert = divmod(int(output.fault), output.logits_TE.shape[1])
                experts = [expert]
                sequences = (token // self._contexts[layer].length,)
                bad = bad or [output.logits_TE]
            for x in bad[:1]:
                # The experts of the non-finite rows, if the module has all rows of local experts.
                counts_L = getattr(args[0], "counts_L", None) if args else None
                placement = self._parallel.placements.get(f"{name}.gate_up")
                if isinstance(counts_L, Tensor) and placement and int(counts_L.sum()) == len(x):
                    experts_R = torch.arange(len(counts_L)).repeat_interleave(counts_L.cpu())
                    bad_R = ~torch.isfinite(x).all(1).cpu()
                    ids = placement.experts(self.mesh)  # of local experts
                    experts = experts or [ids[i] for i in experts_R[bad_R].unique().tolist()]
                self._add(
                    "forward",
                    name,
                    x,
                    microbatch=microbatch,
                    layer=layer,
                    place=place,
                    is_fresh=all(is_finite(x) for x in _floats((*args, *keys.values()))),
                    experts=experts,
                    **({"sequences": sequences} if sequences else _sequences(context, x)),
                )

            def begin_backward(_: Tensor) -> None:
                self._current = microbatch

            for x in _floats(output):
                if x.requires_grad:
                    x.register_hook(begin_backward)

        yield module.register_forward_pre_hook(begin, with_kwargs=True)
        yield module.register_forward_hook(end, with_kwargs=True)

    def _microbatch(self, layer: int) -> int:
        """The microbatch of the forward of `layer` that runs now."""
        context = self._contexts.get(layer, self._latest)
        if context is None or not len(context.token_ids_T):
            return self._current
        sequence = int(context.token_ids_T[0]) // max(context.length, 1)
        return self._microbatch_of.get(sequence, self._current)

    def _check_parameter(self, phase: str, name: str, tensor: Tensor, microbatch: int = 0) -> None:
        tensor, placement = tensor.detach(), self._parallel.placements.get(name)
        if tensor.untyped_storage().size() < tensor.numel() * tensor.element_size():
            return  # zero3 has freed its memory between steps
        if not tensor.is_floating_point() or is_finite(tensor):
            return
        indices: list[int] = []  # of experts in the stack of this rank
        held = self._parallel.reducer.held.get(name)
        if placement is not None and placement.is_expert:
            if tensor.ndim == len(placement.shape):
                indices = (~torch.isfinite(tensor.flatten(1)).all(1)).nonzero().flatten().tolist()
            elif held and len(held.numbers) == tensor.numel():
                # The flat range of the stack that this rank owns.
                size = math.prod(len(part) for part in placement.slices(self.mesh)[1:])
                bad = (~torch.isfinite(tensor.flatten())).nonzero().flatten() + held.numbers.start
                indices = (bad // size).unique().tolist()
        experts = placement.experts(self.mesh) if placement is not None and indices else ()
        self._add(
            phase,
            name,
            tensor,
            microbatch=microbatch,
            layer=layer_in(name),
            place=list(self._parallel.placements).index(name) if placement is not None else 0,
            experts=tuple(experts[index] for index in indices),
        )

    def _add(self, phase: str, name: str, tensor: Tensor, **where: Any) -> None:
        """Keep the first value of each phase, name and microbatch; `where`: fields of it."""
        where.setdefault("microbatch", self._current if phase == "loss" else 0)
        key = phase, name, where["microbatch"]
        if key not in self._seen:
            where["experts"] = tuple(where.get("experts", ()))[:MOST_NAMED]
            value = "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
            rank = self.mesh.rank
            self._seen[key] = Nonfinite(rank=rank, phase=phase, name=name, value=value, **where)


def _sequences(context: Context | None, x: Tensor) -> dict[str, Any]:
    """The fields `sequences` and `num_checked` of a value whose rows are this rank's tokens; empty
    for other rows."""
    if context is None or x.ndim != 2 or len(x) != len(context.token_ids_T):
        return {}
    of_row_T = context.token_ids_T // context.length
    bad_T = ~torch.isfinite(x).all(1)
    sequences = tuple(of_row_T[bad_T].unique().tolist())
    return {"sequences": sequences, "num_checked": len(of_row_T.unique())}


def is_finite(x: Tensor) -> bool:
    """Whether all elements are finite."""
    return bool(torch.isfinite(x.detach()).all())


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a value: a tensor, or nested tuples and lists."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for part in cast(Sequence[Any], value):
            yield from _floats(part)


def nonfinite_gradients(parallel: RankModel) -> tuple[str, ...]:
    """Names of the parameters whose summed gradients of the last step are not finite on some rank;
    all ranks call."""
    reducer = parallel.reducer
    local = [name for name, gradient in reducer.gradients.items() if not is_finite(gradient)]
    names_of_ranks = gather_json(local, parallel.mesh.control)
    seen = {name for names in names_of_ranks for name in names}
    return tuple(name for name in parallel.trained if name in seen)


def examine(
    parallel: RankModel,
    optimizer: Optimizer | None,
    microbatches: Sequence[Batch],
    sample_ids: Sequence[int],
    parameters: tuple[str, ...] = (),
) -> NonfiniteOrigin:
    """Repeat the step of this rank's `microbatches` and find its first non-finite value.

    All ranks call. `sample_ids`: those of all sequences of the step; `parameters`: see
    :class:`NonfiniteOrigin`. The gradients in ``parallel.reducer`` become those of the repeated
    step; weights, the optimizer and the ledger are unchanged.
    """
    mesh = parallel.mesh
    with mesh.ledger.paused():
        check = NaNCheck(parallel, microbatches)
        check.check_weights(optimizer)
        with check.hooked() as pipeline:
            sums = StepSums(parallel, count_over_step(parallel, microbatches))
            forget_rank_tokens(parallel)

            def objective(part: ModelPart, output: Output, batch: Batch) -> Tensor:
                share = sums.objective(part, output, batch)
                check.check_losses(output, batch)
                return share

            pipeline.run(microbatches, objective, TimelineRecorder(mesh.rank))
            parallel.reducer.finish()
            forget_rank_tokens(parallel)
        seen = check.gather()
    return origin(parallel, seen, sample_ids, parameters)


def examine_state(parallel: RankModel, optimizer: Optimizer) -> NonfiniteOrigin | None:
    """The first weight, buffer, master or moment that is not finite; None if all are finite. All
    ranks call."""
    check = NaNCheck(parallel, ())
    check.check_weights(optimizer)
    seen = check.gather()
    return origin(parallel, seen, (), ()) if seen else None
