"""Parallel model for a program's own training loop: `moemesh.parallelize`.

Legend: B sequences, S positions, L MoE layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from moemesh.checkpoint.store import Sharded
from moemesh.comm.mesh import Mesh
from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError, check_kind, check_limit, public
from moemesh.config.load import Resolved, S, build_section
from moemesh.config.model import ModelConfig
from moemesh.config.plan import DEGREES, Plan
from moemesh.config.run import RunConfig
from moemesh.config.shown import Shown
from moemesh.config.sources import Leaf
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.parallel import parallelize as hub
from moemesh.parallel.norm import clip_gradients
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.opening import own_rows, schedule_of_step
from moemesh.train.preparation import untrainable
from moemesh.train.step import StepResult, evaluate, gradients_of_step, move_selection_biases

__all__ = ["ParallelModel", "StepResult", "parallelize"]


@public
def parallelize(
    model: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    *,
    seq_len: int,
    global_batch: int,
    seed: int = 0,
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
) -> ParallelModel:
    """Build this rank's part of `model` under `plan`; every rank of `mesh` calls it.

    `mesh`: ``Mesh.create(plan.layout, device)`` in an initialized process group, or
    ``Mesh.single(device)``. `seq_len` and `global_batch` determine buffers before the first step.
    Initial weights are functions of `seed`, the same under every plan. Raises ConfigError with
    rules that model, plan and batch break; other ValueErrors for a mesh of another layout, and
    for plans that need moemesh's own loop: sharded optimizer states, asynchronous schedules.
    """
    check_kind("model", model, ModelConfig, "moemesh.load(...).model")
    check_kind("plan", plan, Plan, "moemesh.load(...).plan")
    check_kind("mesh", mesh, Mesh, "moemesh.Mesh.create(plan.layout, device)")
    _refuse_mode("parallelize", no_grad=False)
    data, problems = _section(DataConfig, seq_len=seq_len, global_batch=global_batch)
    train, others = _section(TrainConfig, seed=seed, dtype=dtype)
    if problems or others:
        raise ConfigError([*problems, *others])
    config = RunConfig(model=model, plan=plan, data=data, train=train)
    problems = config.check() or untrainable(Resolved(config=config, origins={}))
    if problems:
        raise ConfigError(problems)
    if mesh.world_size != plan.world_size:
        raise UserError(
            f"the plan needs {plan.world_size} ranks, the mesh has {mesh.world_size}: "
            "Mesh.create(plan.layout, device)"
        )
    needed, actual = (
        ", ".join(f"{name} = {getattr(layout, name)}" for name in DEGREES)
        for layout in (plan.layout, mesh.layout)
    )
    if actual != needed:
        raise UserError(
            f"the plan has {needed}, the mesh {actual}: Mesh.create(plan.layout, device)"
        )
    if plan.data != "replicate":
        raise UserError(
            f'plan.data = "{plan.data}" shards states over an optimizer that moemesh steps itself: '
            'take moemesh.train, or plan.data = "replicate"'
        )
    parallel = hub.parallelize(
        model,
        plan,
        mesh,
        seed=seed,
        dtype=getattr(torch, dtype),
        tokens_per_rank=plan.tokens_per_rank(seq_len, global_batch),
        schedule=schedule_of_step(config, mesh),
    )
    if parallel.pipeline.schedule.update is not None:
        raise UserError(
            f'plan.schedule = "{plan.schedule}" updates weights inside of its stream, which a loop '
            'of steps cannot: take moemesh.train, or plan.schedule = "1f1b"'
        )
    return ParallelModel(parallel, config)


@dataclass(eq=False, repr=False)
class ParallelModel(Shown):
    """One rank's part of a model; created by :func:`parallelize`."""

    parallel: hub.RankModel
    config: RunConfig
    #: Number of steps so far; a key of the random numbers of a router with jitter.
    num_steps: int = 0
    #: The fp32 masters of parameters in bfloat16; other parameters are their own masters.
    _masters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])

    def __post_init__(self) -> None:
        for name, parameter in self.parallel.model.named_parameters():
            is_rounded = parameter.dtype == torch.bfloat16
            self._masters[name] = (
                nn.Parameter(parameter.detach().float()) if is_rounded else parameter
            )

    def facts(self) -> dict[str, object]:
        return {
            "mesh": self.parallel.mesh,
            "own_parameters": sum(parameter.numel() for parameter in self.parameters()),
            "num_steps": self.num_steps,
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Logical name -> this rank's shard, for an optimizer; for a bfloat16 weight its fp32
        master, from which the weight is rounded before a forward."""
        yield from self._masters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._masters.values()

    def step(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        loss_mask: Tensor | None = None,
        documents: Tensor | None = None,
        clip: float = 0.0,
    ) -> StepResult:
        """Run forward and backward of one global batch; afterwards the gradients are in ``.grad``.

        `tokens` int64 [B, S] are **all** sequences of the step, the same on every rank; each rank
        uses its part. `targets` int64 [B, S]; None: tokens are [B, S + 1] and each predicts the
        next. `valid` bool [B, S]: False for padding, which is not routed; `loss_mask` bool [B, S]:
        False for tokens without a loss (both None: all True). `documents` int64 [B, S]: document
        index of each token, which attends only within its document; None: one document. `clip`:
        largest gradient norm over all ranks; 0: no clipping.

        The objective is the mean over all tokens with a loss, plus the auxiliary losses and those
        of extra prediction layers. The gradients are complete: sums, not averages, over all ranks
        that share a parameter. They replace those of the previous step. If one is not finite,
        ``skipped`` is set and no parameter has a gradient, on any rank; if a router's logit is the
        cause, RoutingError is raised on all. The result is the same on every rank. Raises UserError
        inside of `torch.no_grad` and `torch.inference_mode`.
        """
        _refuse_mode("step", no_grad=True)
        parts = self.config.plan.microbatches
        extras = {"valid": valid, "loss_mask": loss_mask, "documents": documents}
        batches = self._own(tokens, targets, extras, parts, self.num_steps + 1)
        check_limit("clip", clip)
        for name, parameter in self.parallel.model.named_parameters():
            self._masters[name].grad = parameter.grad = None
        self._round_masters()
        self.num_steps += 1
        recorder = TimelineRecorder(self.parallel.mesh.rank)
        result = gradients_of_step(self.parallel, batches, recorder)
        if not result.skipped:
            gradients = self.parallel.reducer.gradients
            if clip:
                clip_gradients(gradients, result.grad_norm, clip)
            for name, master in self._masters.items():
                master.grad = gradients[name]
            move_selection_biases(self.parallel, result.counts_LE)
        return result

    def evaluate(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        loss_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> float:
        """Returns the mean negative log-likelihood of a global batch in nats a token, the same on
        every rank; all ranks call it. Arguments are those of :meth:`step`."""
        self._round_masters()
        extras = {"valid": valid, "loss_mask": loss_mask, "documents": documents}
        batches = self._own(tokens, targets, extras, 1, self.num_steps)
        return evaluate(self.parallel, batches)

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Give the bfloat16 weights the values of their masters, which an optimizer or a checkpoint
        may have changed."""
        for name, parameter in self.parallel.model.named_parameters():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def state_dict(self) -> dict[str, Tensor | Sharded]:
        """Returns logical name -> this rank's part of a parameter, with global shape and offset, or
        a buffer, which is equal on all ranks that have it.

        Suitable for :func:`moemesh.save_checkpoint` and :func:`moemesh.load_checkpoint`, which
        fills it in place, under any plan.
        """
        parts: dict[str, Tensor | Sharded] = {}
        for name, master in self._masters.items():
            placement = self.parallel.placements[name]
            offset = tuple(part.start for part in placement.slices(self.parallel.mesh))
            parts[name] = Sharded(master.detach(), placement.shape, offset)
        return parts | dict(self.parallel.model.named_buffers())

    def close(self) -> None:
        """Free the memory of dispatchers outside of torch; all ranks call it at the end."""
        self.parallel.close()

    def _own(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        extras: Mapping[str, Tensor | None],
        num_parts: int,
        step: int,
    ) -> list[Batch]:
        """This data-parallel rank's sequences of a global batch, in `num_parts` microbatches.
        Arguments are those of :meth:`step`; `extras`: masks and documents. Raises UserError for
        wrong shapes, dtypes and ids."""
        check_kind("tokens", tokens, Tensor)
        if targets is None:
            if tokens.ndim != 2:
                raise UserError(
                    "tokens must be [B, S + 1] where targets are left out, not "
                    f"{list(tokens.shape)}"
                )
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
        every = {"tokens": tokens, "targets": targets, **extras}
        given = {name: tensor for name, tensor in every.items() if tensor is not None}
        for name, tensor in given.items():
            check_kind(name, tensor, Tensor)
        if tokens.ndim != 2 or any(t.shape != tokens.shape for t in given.values()):
            shapes = [list(t.shape) for t in given.values()]
            raise UserError(f"tokens, targets and masks must all be [B, S], not {shapes}")
        for name in ("valid", "loss_mask", "tokens", "targets", "documents"):
            kind = torch.bool if name in ("valid", "loss_mask") else torch.int64
            if (tensor := given.get(name)) is not None and tensor.dtype != kind:
                cast = "bool" if kind is torch.bool else "long"
                raise UserError(f"{name} must be {kind}, not {tensor.dtype}: {name}.{cast}()")
        vocabulary = self.config.model.vocab_size
        for name, ids in (("tokens", tokens), ("targets", targets)):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise UserError(
                    f"{name} hold ids from {int(ids.min())} to {int(ids.max())}, the vocabulary "
                    f"those from 0 to {vocabulary - 1} (model.vocab_size)"
                )
        device = self.parallel.mesh.device
        return [
            Batch(
                tokens_BS=tokens[rows].to(device),
                targets_BS=targets[rows].to(device),
                sequences_B=torch.arange(rows.start, rows.stop, device=device),
                **{f"{x}_BS": given[x][rows].to(device) for x in extras if x in given},
                seed=self.config.train.seed,
                step=step,
            )
            for rows in own_rows(len(tokens), self.parallel.mesh, num_parts)
        ]


def _refuse_mode(name: str, *, no_grad: bool) -> None:
    """Raise UserError if `name` is called in a mode of torch without gradients: all of them would
    be zero. `no_grad`: also without inference mode."""
    mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else ""
    if no_grad and not mode and not torch.is_grad_enabled():
        mode = "torch.no_grad or after torch.set_grad_enabled(False)"
    if mode:
        raise UserError(f"{name} needs gradients: it cannot be called in {mode}")


def _section(kind: type[S], **values: object) -> tuple[S, list[Problem]]:
    """The section with these arguments of :func:`parallelize`, and its problems."""
    return build_section(
        kind,
        {
            f"{kind.section}.{name}": Leaf(value=value, origin=f"{name} of parallelize")
            for name, value in values.items()
        },
    )
