"""One training step: forward and backward of each microbatch, sums, norm, update.

The objective is divided by global counts before the backward, so that every reduction is a plain
sum and no factor depends on the layout:

    J = (1/N) sum of token losses  +  (1/scopes) sum of auxiliary losses
        +  (weight/D) sum over depths k = 1 .. D of (1/N_k) sum of token losses at depth k

A scope (``model.aux_loss_scope``) is a sequence, a microbatch of a data-parallel rank, or a
microbatch of all ranks; one without a valid token is not counted. A depth is an extra prediction
layer (``model.num_mtp_layers``, ``model.mtp_loss_weight``); at depth k the last k positions of a
sequence have no token to predict.

Legend: B sequences, S positions, T tokens of a microbatch, K experts per token, L MoE layers of the
model, E experts, P ranks of ep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.comm.collectives import all_reduce_, gather_json
from moemesh.config.shown import Shown
from moemesh.model.batch import Batch
from moemesh.model.faults import NO_FAULT, RoutingError, check_experts, describe_logit
from moemesh.model.router import move_bias_
from moemesh.model.transformer import ModelPart, Output
from moemesh.ops.host_copy import HostCopy, constant, upload
from moemesh.parallel.expert.replicas import take_rank_tokens
from moemesh.parallel.norm import GradientNorm, clip_gradients, gradient_squares, norm_of
from moemesh.parallel.parallelize import RankModel
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.optimizer import Optimizer


def refuse_replayed(parallel: RankModel, microbatches: Sequence[Batch]) -> None:
    """Raise RoutingError on every rank if a routing to replay is invalid on any rank.

    Either all ranks replay or none does; all ranks call. A fault on one rank is not raised there,
    since the others would wait in the next collective: its message is gathered first.
    """
    if all(batch.experts is None for batch in microbatches):
        return
    config = parallel.model.config
    widths: dict[int, int] = {}
    problem = None
    try:
        for batch in microbatches:
            seq_len = batch.tokens_BS.shape[1]
            positions = torch.arange(seq_len, device=batch.sequences_B.device)
            ids_T = (batch.sequences_B[:, None] * seq_len + positions).flatten()
            for layer, experts_TK in (batch.experts or {}).items():
                if layer not in config.routed_layers:
                    layers = list(config.routed_layers)
                    raise RoutingError(f"layer {layer} has no experts: layers {layers} have")
                if len(experts_TK) != batch.num_tokens:
                    raise RoutingError(
                        f"layer {layer}: a routing of {len(experts_TK)} tokens for a microbatch of "
                        f"{batch.num_tokens}"
                    )
                check_experts(experts_TK, config.num_experts, layer=layer, token_ids_T=ids_T)
                if widths.setdefault(layer, experts_TK.shape[1]) != experts_TK.shape[1]:
                    raise RoutingError(f"layer {layer}: microbatches differ in experts per token")
    except RoutingError as error:
        problem = str(error)
    reports = gather_json([problem, sorted(widths.items())], parallel.mesh.control)
    for rank, (message, _) in enumerate(reports):
        if message is not None:
            raise RoutingError(f"rank {rank}: {message}")
    if any(sizes != reports[0][1] for _, sizes in reports):
        raise RoutingError(
            "replayed routings of one layer differ in experts per token between ranks: "
            + "; ".join(f"rank {rank}: {dict(sizes)}" for rank, (_, sizes) in enumerate(reports))
        )


def refuse_bad_logits(parallel: RankModel, fault_L: Tensor, seq_len: int) -> None:
    """Raise RoutingError on every rank if a router's logit was not finite on any rank.

    `fault_L`: the first local fault in each MoE layer of the model. All ranks call, and only if the
    gradient norm, which they share, is not finite: a good step pays nothing.
    """
    model, mesh = parallel.model, parallel.mesh
    if not fault_L.numel():
        return
    faults = fault_L.clone()
    all_reduce_(faults, mesh["world"], op="min", caller="step.faults", phase="optimizer")
    # The first faulty layer is the origin: later layers have read its results.
    for layer, code in zip(model.config.routed_layers, faults.tolist(), strict=True):
        if code != NO_FAULT:
            raise RoutingError(describe_logit(layer, code, model.config.num_experts, seq_len))


@dataclass(frozen=True, kw_only=True, repr=False)
class StepResult(Shown):
    """The result of a whole step, the same on every rank."""

    #: Mean negative log-likelihood in nats.
    loss: float
    #: Mean over scopes, coefficients included.
    aux_loss: float
    grad_norm: float
    #: Number of tokens that carry loss.
    num_tokens: int
    #: Per MoE layer (int64): tokens of each expert, and choices for which an expert had no room.
    counts_LE: Tensor
    dropped_L: Tensor
    #: No rank updates: a loss or a gradient was not finite, or the run's policy refuses the step.
    #: Some stages of an asynchronous schedule may have updated.
    skipped: bool
    #: Per MoE layer (int64): tokens that each rank of ep computed; None without replicas.
    rank_LP: Tensor | None = None
    #: Mean loss of the extra prediction layers in nats, unweighted; None without such layers.
    mtp_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step that only a return to a checkpoint can undo; `seconds` and `recorder` are this
    rank's."""

    number: int
    result: StepResult
    recorder: TimelineRecorder
    seconds: float


@dataclass(kw_only=True)
class StepBoundary:
    """End of a step: all stages hold its weights.

    `began`: the last step of the previous boundary; `is_last`: the run has no further step, which
    an observer may decide, too. Set by observers: `stopping`: some rank has a stop request, or
    ``--stop-after`` is reached; `saves`: a checkpoint of this step is due.
    """

    step: FinishedStep
    began: int
    is_last: bool
    stopping: bool = False
    saves: bool = False

    @property
    def number(self) -> int:
        """The number of the step, from 1."""
        return self.step.number

    def is_due(self, every: int) -> bool:
        """Whether work for every `every` steps (0: none), and for the last step, is due."""
        return self.is_last or bool(every and self.number % every == 0)


#: A function that is called after a step: it returns the reason to return to a checkpoint, or None
#: to continue, and raises to end the run. All ranks call the same ones in the same order.
Observer = Callable[[StepBoundary], str | None]


class StepCounts(NamedTuple):
    """Counts of a step, or a part of it, over all replicas: tokens that carry loss, scopes of
    auxiliary losses, and tokens that carry loss at each depth of the extra prediction layers."""

    num_tokens: int = 0
    num_scopes: int = 0
    ahead: tuple[int, ...] = ()

    def plus(self, other: StepCounts) -> StepCounts:
        """The summed counts of two parts of a step."""
        ahead = zip(self.ahead or (0,) * len(other.ahead), other.ahead, strict=True)
        return StepCounts(
            self.num_tokens + other.num_tokens,
            self.num_scopes + other.num_scopes,
            tuple(a + b for a, b in ahead),
        )


def step_result(
    *,
    counts: StepCounts,
    packed: Tensor,
    like: Sequence[Tensor],
    norm: GradientNorm,
) -> StepResult:
    """The result from sums over all ranks, or some (post-validation). `packed`: the vector of
    :func:`pack_sums` without its `first`; `like`: tensors with the shapes of the loads."""
    sizes = [2 + len(counts.ahead), *[part.numel() for part in like]]
    losses, *parts = packed.cpu().split_with_sizes(sizes)
    loss, aux, *ahead = losses.tolist()
    counts_LE, dropped_L, *rank_LP = [
        part.round().long().view(shape.shape) for part, shape in zip(parts, like, strict=True)
    ]
    at_depths = [sum_ / max(count, 1) for sum_, count in zip(ahead, counts.ahead, strict=True)]
    return StepResult(
        loss=loss / max(counts.num_tokens, 1),
        aux_loss=aux / max(counts.num_scopes, 1),
        grad_norm=norm.value,
        num_tokens=counts.num_tokens,
        counts_LE=counts_LE,
        dropped_L=dropped_L,
        skipped=not norm.is_finite,
        rank_LP=rank_LP[0] if rank_LP else None,
        mtp_loss=sum(at_depths) / len(at_depths) if at_depths else None,
    )


def pack_sums(first: Sequence[Tensor], losses: Tensor, loads: Sequence[Tensor]) -> Tensor:
    """One float64 vector of `first`, `losses` and `loads` (see :class:`StepSums`); float64 holds
    the integer loads exactly."""
    return torch.cat([*first, losses, *[part.flatten().double() for part in loads]])


def token_losses(losses_T: Tensor, batch: Batch) -> Tensor:
    """Sum of the losses of tokens that carry loss."""
    mask_T = batch.loss_mask_T()
    return losses_T.sum() if mask_T is None else losses_T.masked_fill(~mask_T, 0.0).sum()


def count_over_step(parallel: RankModel, microbatches: Sequence[Batch]) -> StepCounts:
    """The counts of the step, over all replicas and microbatches."""
    scope = parallel.model.config.aux_loss_scope
    depths = range(1, parallel.model.config.num_mtp_layers + 1)
    # Scopes of this rank: their number, or for "global" a number for each microbatch.
    scopes = [batch.num_routed_sequences() for batch in microbatches]
    if scope == "sequence":
        scopes = [sum(scopes)]
    elif scope == "microbatch":
        scopes = [sum(map(bool, scopes))]
    mesh = parallel.mesh
    counts = torch.tensor(
        [
            sum(batch.num_loss_tokens() for batch in microbatches),
            *(sum(batch.num_tokens_ahead(depth) for batch in microbatches) for depth in depths),
            *scopes,
        ]
    )
    if mesh["cp"].index:
        # Ranks of cp have parts of the same sequences: only the first of them counts.
        counts.zero_()
    # Over the host's backend, so that no rank waits until its device has finished the previous
    # step; within a stage, since stages arrive here at different times.
    all_reduce_(counts, mesh.host("dp_cp"), caller="step.counts", phase="forward")
    num_tokens, *rest = counts.tolist()
    ahead, scopes = rest[: len(depths)], rest[len(depths) :]
    # A global scope exists when any rank has a token in that microbatch.
    num_scopes = sum(scopes) if scope != "global" else sum(map(bool, scopes))
    return StepCounts(num_tokens, num_scopes, tuple(ahead))


class StepSums:
    """Sums over the microbatches of a step: before :meth:`reduce` those of this rank, then of all.

    ``losses``: sums of token losses, of auxiliary losses, and of token losses at each depth of the
    extra prediction layers. For every MoE layer of the model, on this rank or not: the loads
    ``counts_LE``, ``dropped_L`` and, if experts have replicas, ``rank_LP`` (the tokens of each
    rank); and ``fault_L``, this rank's first fault in each layer, which :meth:`reduce` leaves as it
    is.
    """

    def __init__(self, parallel: RankModel, counts: StepCounts) -> None:
        self._num_tokens, self._num_scopes = max(counts.num_tokens, 1), max(counts.num_scopes, 1)
        self._model, self._mesh, config = parallel.model, parallel.mesh, parallel.model.config
        layers = config.routed_layers
        #: Loss weight per token at each MTP depth.
        self._depth_weights = [
            config.mtp_loss_weight / len(counts.ahead) / max(number, 1) for number in counts.ahead
        ]
        # Tensor-parallel ranks compute the same token losses: only the first reports them.
        self._reports = self._mesh["tp"].index == 0
        shape, device = (len(layers), config.num_experts), self._mesh.device
        self.losses = torch.zeros(2 + len(counts.ahead), dtype=torch.float64, device=device)
        self.counts_LE = torch.zeros(shape, dtype=torch.int64, device=device)
        self.dropped_L = self.counts_LE.new_zeros(len(layers))
        self.fault_L = torch.full_like(self.dropped_L, NO_FAULT)
        sizes = len(layers), self._mesh["ep"].size
        self.rank_LP = self.counts_LE.new_zeros(sizes) if parallel.has_replicas else None

    @property
    def loads(self) -> list[Tensor]:
        """The counts, int64: ``counts_LE``, ``dropped_L`` and ``rank_LP`` if it exists."""
        loads = [self.counts_LE, self.dropped_L]
        return loads if self.rank_LP is None else [*loads, self.rank_LP]

    def objective(self, part: ModelPart, output: Output, batch: Batch) -> Tensor:
        """This part's share of J; adds its losses and loads to the sums."""
        if output.moe_layers:
            indices = [*map(self._model.config.routed_layers.index, output.moe_layers)]
            indices_L = constant(indices, self._mesh.device)
            self.counts_LE.index_add_(0, indices_L, output.counts_LE)
            self.dropped_L.index_add_(0, indices_L, output.dropped_L)
            self.fault_L.scatter_reduce_(0, indices_L, output.fault_L, "amin")
        if self.rank_LP is not None:
            self.rank_LP += take_rank_tokens(self._model, self._mesh)
        self.losses[1] += output.aux.detach()
        share = output.aux / self._num_scopes
        if output.losses_T is None:
            return share
        loss = token_losses(output.losses_T, batch)
        self.losses[0] += loss.detach() if self._reports else 0.0
        share = loss / self._num_tokens + share
        for depth, losses_T in enumerate(output.ahead_losses, start=1):
            mask_T = batch.ahead(depth).loss_BS.flatten()
            loss = losses_T.masked_fill(~mask_T, 0.0).sum()
            self.losses[1 + depth] += loss.detach() if self._reports else 0.0
            share = share + loss * self._depth_weights[depth - 1]
        return share

    def reduce(self) -> None:
        """Sum over all ranks: first those of the same stages, then the stages."""
        named = [("step.losses", self.losses)]
        if self.counts_LE.numel():
            named.append(("step.loads", self.counts_LE))
        if self._model.config.capacity_factor:
            named.append(("step.dropped", self.dropped_L))
        if self.rank_LP is not None:
            named.append(("step.loads", self.rank_LP))
        for caller, tensor in named:
            for axis in ("stage", "pp"):
                all_reduce_(tensor, self._mesh[axis], caller=caller, phase="optimizer")


def forget_rank_tokens(parallel: RankModel) -> None:
    """Discard the token counts of replicas from outside of a step: of validation, an undone
    warm-up, or a repeated step."""
    if parallel.has_replicas:
        take_rank_tokens(parallel.model, parallel.mesh)


def gradients_of_step(
    parallel: RankModel,
    microbatches: Sequence[Batch],
    recorder: TimelineRecorder,
    *,
    refuses: bool = True,
) -> StepResult:
    """Run every microbatch and sum the gradients; they stay in ``parallel.reducer``. `refuses`:
    raise RoutingError on all ranks if a router's logit was not finite; False: such a step is marked
    as skipped, as for other numbers that are not finite."""
    reducer, mesh = parallel.reducer, parallel.mesh
    refuse_replayed(parallel, microbatches)
    counts = count_over_step(parallel, microbatches)
    sums = StepSums(parallel, counts)
    forget_rank_tokens(parallel)
    parallel.pipeline.run(microbatches, sums.objective, recorder)
    with recorder.span("reduce"):
        reducer.finish()
        sums.reduce()
        squares = gradient_squares(
            reducer.gradients, parallel.norm_addends(), mesh, sums.losses, axis="world"
        )
        # All numbers that the host needs of the step, in one copy, so that it waits once.
        total = squares.sum(0, keepdim=True)
        copied = HostCopy(pack_sums([total], sums.losses, sums.loads)).tensor()
    norm = norm_of(copied[:1])
    if refuses and not norm.is_finite:
        refuse_bad_logits(parallel, sums.fault_L, microbatches[0].tokens_BS.shape[1])
    return step_result(counts=counts, packed=copied[1:], like=sums.loads, norm=norm)


def update(
    parallel: RankModel, optimizer: Optimizer, result: StepResult, *, lr: float, clip: float
) -> None:
    """Clip, step the optimizer, move the routers' biases; no-op if the step is skipped.

    Ranks with the same `result` decide the same; that of a partial sum may differ between ranks
    (:mod:`moemesh.train.post_validated`).
    """
    if result.skipped:
        return
    gradients = optimizer.gradients(parallel.reducer.gradients)
    clip_gradients(gradients, result.grad_norm, clip)
    optimizer.step(gradients, lr)
    move_selection_biases(parallel, result.counts_LE)


def move_selection_biases(parallel: RankModel, counts_LE: Tensor) -> None:
    """One step of the local routers' biases; `counts_LE`: tokens of each expert, of all layers."""
    model = parallel.model
    for layer, (name, bias_E) in model.selection_biases().items():
        if parallel.tuning.trains(name):
            index = model.config.routed_layers.index(layer)
            counts_E = upload(counts_LE[index], parallel.mesh.device)
            move_bias_(bias_E, counts_E, model.config.router_bias_rate)


def evaluate(parallel: RankModel, batches: Sequence[Batch]) -> float:
    """Mean negative log-likelihood (nats per token) of `batches`, without gradients."""
    total, count = sum_losses(parallel, batches)
    return total / max(count, 1)


@torch.no_grad()
def sum_losses(parallel: RankModel, batches: Sequence[Batch]) -> tuple[float, float]:
    """Summed negative log-likelihood (nats) of the tokens of `batches` that carry loss, and their
    number, over all ranks; all ranks call."""
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.mesh.device)
    experts = [moe.experts for moe in parallel.model.moe_layers().values()]
    bounded = [expert.num_bounded for expert in experts]

    def add(part: ModelPart, output: Output, batch: Batch) -> Tensor:
        if output.losses_T is not None:
            sums[0] += token_losses(output.losses_T, batch)
            sums[1] += batch.num_loss_tokens()
        return output.aux

    with parallel.mesh.ledger.scope("evaluate"):
        parallel.pipeline.evaluate([replace(batch, training=False) for batch in batches], add)
        for axis in ("dp_cp", "pp"):
            all_reduce_(sums, parallel.mesh[axis], caller="evaluate", phase="forward")
    for expert, number in zip(experts, bounded, strict=True):
        expert.num_bounded = number  # the bound is for training batches
    total, count = sums.tolist()
    return total, count
