"""The parallel model in a program's own loop: `moemesh.parallelize`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from moemesh.checkpoint.store import Sharded
from moemesh.comm.mesh import Mesh
from moemesh.config.data import DataConfig
from moemesh.config.errors import ConfigError, Problem, UserError, check_kind, check_limit, public
from moemesh.config.layout import shard_range
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
from moemesh.train.opening import schedule_of_step
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
    ``Mesh.single(device)``. `seq_len` and `global_batch` size what must be known before the first
    step. Initial weights are functions of `seed`: the same under every plan. Raises ConfigError
    with every rule that model, plan and batch break, ValueError for a mesh of another layout.
    """
    check_kind("model", model, ModelConfig, "moemesh.load(...).model")
    check_kind("plan", plan, Plan, "moemesh.load(...).plan")
    check_kind("mesh", mesh, Mesh, "moemesh.Mesh.create(plan.layout, device)")
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
    needed, own = (
        ", ".join(f"{name} = {getattr(layout, name)}" for name in DEGREES)
        for layout in (plan.layout, mesh.layout)
    )
    if own != needed:
        raise UserError(f"the plan has {needed}, the mesh {own}: Mesh.create(plan.layout, device)")
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
    """The part of a model that one rank trains; :func:`parallelize` makes it."""

    parallel: hub.RankModel
    config: RunConfig
    #: Steps done; keys the random numbers of a router with jitter.
    num_steps: int = 0
    _masters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])

    def __post_init__(self) -> None:
        for name, own in self.parallel.model.named_parameters():
            is_short = own.dtype == torch.bfloat16
            self._masters[name] = nn.Parameter(own.detach().float()) if is_short else own

    def facts(self) -> dict[str, object]:
        own = sum(one.numel() for one in self.parameters())
        return {"mesh": self.parallel.mesh, "own_parameters": own, "num_steps": self.num_steps}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Logical name -> this rank's shard, for an optimizer; of bfloat16 weights their fp32
        masters, from which each step rounds them."""
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
        """Run forward and backward of one global batch; the gradients are then in ``.grad``.

        `tokens` int64 [B, S] are **all** sequences of the step, the same on every rank: each takes
        its own. `targets` int64 [B, S]; None: tokens are [B, S + 1] and each predicts the next.
        `valid` bool [B, S]: False for padding, which is not routed; `loss_mask` bool [B, S]: False
        where a token carries no loss (both None: all True). `documents` int64 [B, S]: numbers of
        the documents in a sequence, which do not see each other; None: one document. `clip`:
        largest norm of the gradient of all ranks; 0: none.

        The objective is the mean over all tokens that carry loss, plus the auxiliary losses. The
        gradients are complete: sums over all ranks that share a parameter, never averages. They
        replace those of the step before. If one is not finite, ``skipped`` is set and no parameter
        has a gradient, on any rank. The result is the same on every rank.
        """
        tokens, targets = _pair(tokens, targets)
        others = (valid, loss_mask, documents)
        self._check(tokens, targets, *others)
        check_limit("clip", clip)
        with torch.no_grad():
            for name, own in self.parallel.model.named_parameters():
                self._masters[name].grad = own.grad = None
                if self._masters[name] is not own:
                    own.copy_(self._masters[name])
        self.num_steps += 1
        recorder = TimelineRecorder(self.parallel.mesh.rank)
        batches = self._own(tokens, targets, *others, self.config.plan.microbatches)
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
        """Returns the mean negative log-likelihood of a global batch in nats a token."""
        tokens, targets = _pair(tokens, targets)
        others = (valid, loss_mask, documents)
        self._check(tokens, targets, *others)
        return evaluate(self.parallel, self._own(tokens, targets, *others, 1))

    def state_dict(self) -> dict[str, Tensor | Sharded]:
        """Returns logical name -> this rank's part of a parameter, with global shape and offset, or
        a buffer, which is equal on all ranks.

        For :func:`moemesh.save_checkpoint` and :func:`moemesh.load_checkpoint`, which fills it in
        place, under any plan.
        """
        found: dict[str, Tensor | Sharded] = {}
        for name, master in self._masters.items():
            where = self.parallel.placements[name]
            offset = where.offset(self.parallel.mesh)
            found[name] = Sharded(master.detach(), where.shape, offset)
        return found | dict(self.parallel.model.named_buffers())

    def close(self) -> None:
        """Free what dispatchers hold outside of torch; all ranks call it, at the end."""
        self.parallel.close()

    def _check(self, tokens: Tensor, *others: Tensor | None) -> None:
        vocabulary = self.config.model.vocab_size
        names = ("tokens", "targets", "valid", "loss_mask", "documents")
        for name, one in zip(names, (tokens, *others), strict=True):
            if one is not None:
                check_kind(name, one, Tensor)
        if tokens.ndim != 2 or any(t is not None and t.shape != tokens.shape for t in others):
            shapes = [list(t.shape) for t in (tokens, *others) if t is not None]
            raise UserError(f"tokens, targets and masks must all be [B, S], not {shapes}")
        targets, *masks, documents = others
        for name, mask in zip(("valid", "loss_mask"), masks, strict=True):
            if mask is not None and mask.dtype != torch.bool:
                raise UserError(f"{name} must be torch.bool, not {mask.dtype}: {name}.bool()")
        for name, ids in (("tokens", tokens), ("targets", targets), ("documents", documents)):
            if ids is not None and ids.dtype != torch.int64:
                raise UserError(f"{name} must be torch.int64, not {ids.dtype}: {name}.long()")
        for name, ids in (("tokens", tokens), ("targets", targets)):
            assert ids is not None
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise UserError(
                    f"{name} hold ids from {int(ids.min())} to {int(ids.max())}, the vocabulary "
                    f"those from 0 to {vocabulary - 1} (model.vocab_size)"
                )

    def _own(
        self,
        tokens: Tensor,
        targets: Tensor,
        valid: Tensor | None,
        loss_mask: Tensor | None,
        documents: Tensor | None,
        num_parts: int,
    ) -> list[Batch]:
        """This data-parallel rank's sequences, in `num_parts` microbatches."""
        dp, device, found = self.parallel.mesh["dp"], self.parallel.mesh.device, list[Batch]()
        own = shard_range(len(tokens), dp.size, dp.index)
        for index in range(num_parts):
            part = shard_range(len(own), num_parts, index)
            rows = slice(own.start + part.start, own.start + part.stop)
            found.append(
                Batch(
                    tokens_BS=tokens[rows].to(device),
                    targets_BS=targets[rows].to(device),
                    sequences_B=torch.arange(rows.start, rows.stop, device=device),
                    valid_BS=None if valid is None else valid[rows].to(device),
                    loss_mask_BS=None if loss_mask is None else loss_mask[rows].to(device),
                    documents_BS=None if documents is None else documents[rows].to(device),
                    seed=self.config.train.seed,
                    step=self.num_steps,
                )
            )
        return found


def _section(kind: type[S], **values: object) -> tuple[S, list[Problem]]:
    """The section of these arguments of :func:`parallelize`, and what is wrong with them."""
    return build_section(
        kind,
        {
            f"{kind.section}.{name}": Leaf(value=value, origin=f"{name} of parallelize")
            for name, value in values.items()
        },
    )


def _pair(tokens: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and what each predicts; of [B, S + 1] tokens alone, the next."""
    check_kind("tokens", tokens, Tensor)
    if targets is not None:
        return tokens, targets
    if tokens.ndim != 2:
        raise UserError(
            f"tokens must be [B, S + 1] where targets are left out, not {list(tokens.shape)}"
        )
    return tokens[:, :-1], tokens[:, 1:]
