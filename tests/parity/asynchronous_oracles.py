"""Two oracles for asynchronous training: one process, no pipeline, no weight versions.

The delayed-gradient reference evaluates microbatch k with each stage's weights at the version of
the papers' table, from a history of all versions. The replay carries out recorded lists in
some topological order, on one set of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.transformer import ModelPart, Output, Transformer
from moemesh.parallel.norm import sums_of_squares
from moemesh.parallel.pipeline.pipeline import stage_parts
from moemesh.schedule.action import Op, Schedule
from moemesh.schedule.plan_schedule import build_step
from moemesh.train.optimizer import Optimizer
from tests.parity.asynchronous import Streamed
from tests.parity.training import Shape, microbatches

Batches = Callable[[int, int], list[Batch]]


class Reference:
    """Base of both oracles: the whole model on one device, its stages, their optimizers."""

    def __init__(
        self,
        model_keys: dict[str, Any],
        plan_keys: dict[str, Any],
        train_keys: dict[str, Any],
        shape: Shape,
        batches: Batches | None = None,
    ) -> None:
        self.config, self.plan = ModelConfig(**model_keys), Plan(**plan_keys)
        self.train = TrainConfig(**train_keys)
        self.window = self.plan.num_update_microbatches
        self.model = Transformer(self.config)
        dtype = getattr(torch, self.train.dtype)
        initialize(self.model, seed=self.train.seed, dtype=dtype)
        self.parts = stage_parts(self.config, self.plan, build_step(self.plan))
        self.names = [self._names(part) for part in self.parts]
        parameters = dict(self.model.named_parameters())
        #: Parameters that the optimizers step; the model's own weights are set from them.
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        self.optimizers = [
            Optimizer({name: self.masters[name] for name in names}, self.train)
            for names in self.names
        ]
        self._batches = batches or self._parity_batches(shape)
        #: Batches by (data rank, sample).
        self.batch: dict[tuple[int, int], Batch] = {}
        count = self.plan.microbatches
        #: Added up window by window, then the windows of a step: as the ranks add.
        windows = self.train.steps * count // self.window
        self.losses = torch.zeros(windows, self.plan.dp, dtype=torch.float64)
        self.aux = torch.zeros_like(self.losses)
        self.counts: dict[tuple[int, int], Tensor] = {}
        for step in range(self.train.steps):
            for dp in range(self.plan.dp):
                for place, batch in enumerate(self._batches(step + 1, dp)):
                    self.batch[dp, step * count + place] = batch

    def _names(self, part: ModelPart) -> list[str]:
        starts = tuple(f"layers.{index}." for index in part.layers)
        starts += ("embedding.",) * part.first + ("norm.", "head.") * part.last
        return [name for name, _ in self.model.named_parameters() if name.startswith(starts)]

    def _parity_batches(self, shape: Shape) -> Batches:
        def find(step: int, dp: int) -> list[Batch]:
            mesh = cast(Mesh, OneRank(dp))
            return microbatches(self.config, self.plan, shape, step, mesh)

        return find

    def objective(self, dp: int, sample: int, output: Output, *, counted: bool = True) -> Tensor:
        """The share of `output` in what is differentiated; its numbers enter the sums."""
        first = sample - sample % self.window
        window = [
            self.batch[rank, first + place]
            for rank in range(self.plan.dp)
            for place in range(self.window)
        ]
        tokens = sum(batch.num_loss_tokens() for batch in window)
        scopes = sum(batch.num_routed_sequences() for batch in window)
        place = sample // self.window
        share = output.aux / scopes
        if counted:
            self.aux[place, dp] += output.aux.detach()
        if output.losses_T is None:
            return share
        mask_T = self.batch[dp, sample].loss_mask_T()
        losses_T = output.losses_T
        loss = losses_T.sum() if mask_T is None else losses_T.masked_fill(~mask_T, 0.0).sum()
        if counted:
            self.losses[place, dp] += loss.detach()
        return loss / tokens + share

    def count(self, stage: int, sample: int, output: Output) -> None:
        """Loads of `stage`'s layers add up over a window, for its routers' biases."""
        part, counts = self.parts[stage], self.counts
        key = (stage, sample // self.window)
        end = part.layers.stop - self.config.num_dense_layers
        layers = [i for i in part.layers if self.config.is_moe_layer(i)]
        # Of the whole model's loads or of the stage's own: the last of them are the stage's.
        loads = output.counts_LE[: end if output.losses_T is not None and not part.last else None]
        loads = loads[len(loads) - len(layers) :]
        counts[key] = counts[key] + loads if key in counts else loads

    @torch.no_grad()
    def update(self, stage: int, window: int, gradients: dict[str, Tensor]) -> None:
        """Clip by the stage's own norm, step its masters and biases."""
        pieces: list[Tensor] = []
        for name in self.names[stage]:
            stacked = ".experts." in name
            gradient = gradients[name]
            pieces.append(gradient.flatten(1) if stacked else gradient.reshape(1, -1))
        # The sums of tests/parallel/test_norm.py: the bits of a step depend on them.
        norm = math.sqrt(float(sums_of_squares(pieces).sum()))
        if self.train.clip and norm > self.train.clip:
            for name in self.names[stage]:
                gradients[name] = gradients[name] * (self.train.clip / (norm + 1e-6))
        step = window * self.window // self.plan.microbatches + 1
        self.optimizers[stage].step(gradients, self.train.learning_rate(step))
        for place, layer in enumerate(
            i for i in self.parts[stage].layers if self.config.is_moe_layer(i)
        ):
            router = self.model.moe_layers()[layer].router
            if router.selection_bias is not None:
                router.update_selection_bias(self.counts[stage, window][place])

    def weights(self, stage: int) -> dict[str, Tensor]:
        """A snapshot of the stage, buffers included."""
        buffers = dict(self.model.named_buffers())
        layers = tuple(f"layers.{index}." for index in self.parts[stage].layers)
        own = [name for name in buffers if name.startswith(layers)]
        return {name: self.masters[name].detach().clone() for name in self.names[stage]} | {
            name: buffers[name].clone() for name in own
        }

    def result(self, copies: list[int], lags: list[int]) -> Streamed:
        count = self.plan.microbatches
        tokens, scopes = [], []
        for step in range(self.train.steps):
            of_step = [b for (_, sample), b in self.batch.items() if sample // count == step]
            tokens.append(sum(batch.num_loss_tokens() for batch in of_step))
            scopes.append(sum(batch.num_routed_sequences() for batch in of_step))
        return Streamed(
            losses=self._means(self.losses, tokens),
            aux=self._means(self.aux, scopes),
            weights={name: master.detach() for name, master in self.masters.items()},
            biases={name: buffer.clone() for name, buffer in self.model.named_buffers()},
            copies=copies,
            lags=lags,
        )

    def _means(self, sums: Tensor, counts: list[int]) -> list[float]:
        per_step = sums.view(self.train.steps, -1, self.plan.dp)
        ranks = sum(per_step.unbind(1), torch.zeros(())).unbind(1)
        return (sum(ranks, torch.zeros(())) / torch.tensor(counts)).tolist()


class OneRank:
    """The part of a mesh that batches are cut by."""

    device = torch.device("cpu")

    def __init__(self, dp: int = 0) -> None:
        self._dp = dp

    def __getitem__(self, axis: str) -> SimpleNamespace:
        return SimpleNamespace(index=self._dp, size=1)


def delayed_gradients(reference: Reference) -> Streamed:
    """PipeDream and 2BW by their table of versions."""
    plan, window, parts = reference.plan, reference.window, reference.parts
    stages = range(len(parts))
    history = [[reference.weights(stage)] for stage in stages]
    lags = [0 for _ in stages]
    sums: list[dict[str, Tensor]] = []
    for sample in range(reference.train.steps * plan.microbatches):
        if plan.schedule == "pipedream":
            used = [max(0, sample - (len(parts) - 1 - stage)) for stage in stages]
        else:
            used = [max(sample // window - 1, 0) for _ in stages]
        weights: dict[str, Tensor] = {}
        for stage in stages:
            weights |= history[stage][used[stage]]
            lags[stage] = max(lags[stage], len(history[stage]) - 1 - used[stage])
        if not sums:
            zeros = {
                name: torch.zeros_like(m.data, dtype=torch.promote_types(m.dtype, torch.float32))
                for name, m in reference.masters.items()
            }
            sums = [{n: zero.clone() for n, zero in zeros.items()} for _ in range(plan.dp)]
        for dp in range(plan.dp):
            batch = reference.batch[dp, sample]
            output = functional_call(reference.model, leaves(reference, weights), (batch,))
            reference.objective(dp, sample, output).backward()
            for name, total in sums[dp].items():
                if (gradient := weights[name].grad) is not None:
                    total += gradient
                weights[name].grad = None
            for stage in stages:
                reference.count(stage, sample, output)
        if (sample + 1) % window == 0:
            whole = {n: sum((part[n] for part in sums[1:]), sums[0][n]) for n in sums[0]}
            sums = []
            for stage in stages:
                reference.update(stage, sample // window, cast(dict[str, Tensor], whole))
                history[stage].append(reference.weights(stage))
    if plan.schedule == "pipedream":
        copies = [len(parts) - stage for stage in stages]
    else:
        copies = [2 for _ in stages]
    return reference.result(copies, lags)


def leaves(reference: Reference, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters among `weights` take gradients, in the precision in which they are summed."""
    for name, weight in weights.items():
        if name in reference.masters:
            weight.requires_grad_()
            weight.grad_dtype = torch.promote_types(weight.dtype, torch.float32)
    return weights


def replay(reference: Reference, schedule: Schedule) -> Streamed:
    """AMPNet: the recorded lists, rank after rank as far as each can go."""
    assert reference.plan.dp == 1
    live, model = reference.plan.ampnet_backward == "live", reference.model
    parameters = dict(model.named_parameters())
    leaves(reference, cast(dict[str, Tensor], parameters))
    orders = [list(schedule.ops(rank)) for rank in range(schedule.num_ranks)]
    done: dict[Op, Any] = {}
    kept: dict[tuple[int, int], Any] = {}
    counted, versions, lags = [0] * len(orders), [0] * len(orders), [0] * len(orders)

    def forward(op: Op) -> Tensor | None:
        stage, sample = op.stage, op.microbatch
        x = None if stage == 0 else done[op._replace(stage=stage - 1)].clone().requires_grad_()
        with torch.set_grad_enabled(live):
            output = model(reference.batch[0, sample], reference.parts[stage], x)
            objective = reference.objective(0, sample, output)
        reference.count(stage, sample, output)
        kept[stage, sample] = (x, output, objective, versions[stage])
        return None if output.x_TH is None else output.x_TH.detach()

    def backward(op: Op) -> Tensor | None:
        stage, sample = op.stage, op.microbatch
        x, output, objective, version = kept.pop((stage, sample))
        lags[stage] = max(lags[stage], versions[stage] - version)
        if not live:
            output = model(reference.batch[0, sample], reference.parts[stage], x)
            objective = reference.objective(0, sample, output, counted=False)
        roots, gradients = [objective], [torch.ones_like(objective)]
        if output.x_TH is not None:
            roots.append(output.x_TH)
            gradients.append(done[op._replace(stage=stage + 1)])
        if not objective.requires_grad:  # dense layers alone have no part of the objective
            roots, gradients = roots[1:], gradients[1:]
        torch.autograd.backward(roots, gradients)
        counted[stage] += 1
        if counted[stage] % reference.window == 0:
            update(stage, counted[stage] // reference.window - 1)
        return None if x is None else x.grad

    def update(stage: int, window: int) -> None:
        names = reference.names[stage]
        gradients = {n: parameters[n].grad for n in names}
        reference.update(
            stage,
            window,
            {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in gradients.items()},
        )
        versions[stage] += 1
        for name in names:
            # Not seen by autograd: what a live backward has kept changes with it.
            parameters[name].data.copy_(reference.masters[name].data)
            parameters[name].grad = None

    while any(orders):
        for ops in orders:
            while ops and all(needed in done for needed in schedule.dependencies(ops[0])):
                op = ops.pop(0)
                done[op] = forward(op) if op.kind == "F" else backward(op)
    return reference.result([1] * len(lags), lags)
