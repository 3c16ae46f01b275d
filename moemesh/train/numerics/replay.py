"""`moemesh replay`: run a step that was not finite again, from its bundle, and find its origin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moemesh.checkpoint import together
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError
from moemesh.config.trainable import refusals
from moemesh.trace.strict_json import strict_json
from moemesh.train.inference.loading import on_ranks
from moemesh.train.numerics.bundle import Bundle
from moemesh.train.numerics.examination import examine
from moemesh.train.numerics.finding import Finding
from moemesh.train.opening import construct, own_batches
from moemesh.train.optimizer import Optimizer
from moemesh.train.weights import saving

#: Overrides that make one rank of any plan: weights and samples are the same in all of them.
ALONE = (
    "plan.dp=1",
    "plan.tp=1",
    "plan.cp=1",
    "plan.pp=1",
    "plan.ep=1",
    "plan.schedule=1f1b",
    "plan.data=replicate",
    "plan.dispatcher=auto",
)


def replay(
    folder: Path, overrides: Sequence[str] = (), *, alone: bool = False, as_json: bool = False
) -> int:
    """Replay the bundle in `folder` on the ranks of its plan, or on one, and print; returns the
    exit code. Raises UserError when it is no bundle."""
    given = [*(ALONE if alone else ()), *overrides]
    bundle = Bundle(folder, given)
    if problems := refusals(bundle.config):
        raise ConfigError(problems)
    arguments = ["replay", str(folder), *(["--alone"] if alone else [])]
    arguments += ["--json"] if as_json else []

    def work(mesh: Mesh) -> str:
        found = run(bundle, mesh)
        if as_json:
            return strict_json({"step": bundle.step, "text": str(found), **found.facts()})
        before = f"the run found   {bundle.text}\n" if bundle.text else ""
        return f"step {bundle.step}, {len(bundle.ids)} samples\n{before}the replay finds  {found}"

    return on_ranks(bundle.config, arguments, overrides, work)


def run(bundle: Bundle, mesh: Mesh) -> Finding:
    """Run the step again; all ranks call."""
    config = bundle.config
    train = config.train
    parallel = construct(config, mesh)
    optimizer = Optimizer.of(parallel, train.model_copy(update={"optimizer": "sgd"}))
    checkpoint, _ = together.open_together(bundle.weights, mesh.control, bundle.step)
    assert checkpoint is not None, "a step that is named is opened or refused"
    saving.load_weights(checkpoint, parallel, optimizer)
    batches = own_batches(
        bundle.samples,
        mesh,
        bundle.ids,
        config.plan.microbatches,
        seed=train.seed,
        step=bundle.step,
    )
    found = examine(parallel, optimizer, batches, bundle.ids.tolist())
    parallel.close()
    return found
