"""A step of packed conversations has the loss and the gradients of the conversations one by one.

Float64, one device and several. The oracle is plain autograd over each conversation as a sequence
of its own, divided by the number of all tokens that carry loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.data.samples import Samples
from moemesh.model.batch import Batch
from moemesh.model.initialization import initialize
from moemesh.model.transformer import Transformer
from moemesh.schedule.plan_schedule import build_step
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.opening import own_batches
from moemesh.train.step import gradients_of_step
from tests.data.test_packing import corpus_of, drawn
from tests.parity.training import Shape, assemble, build, on_ranks_of, owned

MODEL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "intermediate_size": 24, "num_experts": 4, "experts_per_token": 2,
    "expert_intermediate_size": 8, "aux_loss_coefficient": 0.0,
}  # fmt: skip
SEED, SEQ_LEN = 5, 19
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "dp": {"dp": 2},
    "cp": {"cp": 2, "context": "ring"},
    "tp and microbatches": {"tp": 2, "ep": 2, "microbatches": 3},
    "pp": {"pp": 2, "microbatches": 2},
}


def samples_of(count: int) -> Samples:
    """Conversations of up to a sequence and beyond; few leave most of a step to padding."""
    corpus = corpus_of(drawn(count, SEQ_LEN + 4, seed=count))
    return Samples(corpus, seq_len=SEQ_LEN, seed=0, global_batch=7)


def step_on_rank(mesh: Mesh, plan_keys: dict[str, Any], count: int) -> tuple[float, list[Any]]:
    config, plan = ModelConfig(**MODEL), Plan(**plan_keys)
    schedule = build_step(plan, config, SEQ_LEN)
    parallel = build(mesh, config, plan, Shape(7, SEQ_LEN), "float64", seed=SEED, schedule=schedule)
    samples = samples_of(count)
    ids = samples.ids_at(0, 7)
    batches = own_batches(samples, mesh, ids, plan.microbatches, seed=SEED, step=1)
    result = gradients_of_step(parallel, batches, TimelineRecorder(mesh.rank))
    return result.loss, owned(parallel, parallel.reducer.gradients)


def one_by_one(count: int) -> tuple[float, dict[str, Tensor]]:
    model = Transformer(ModelConfig(**MODEL))
    initialize(model, seed=SEED, dtype=torch.float64, device="cpu")
    samples = samples_of(count)
    ids = samples.ids_at(0, 7)
    documents, (corpus,) = samples.documents(ids), samples.corpora
    assert documents is not None and corpus.learned is not None
    numbers = np.unique(documents[documents >= 0])
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    ends = np.append(corpus.starts[1:], len(corpus.tokens))
    for number in numbers:
        start = int(corpus.starts[number])
        own = slice(start, min(int(ends[number]), start + SEQ_LEN))
        tokens = torch.from_numpy(corpus.tokens[own].astype(np.int64))[None]
        mask = torch.from_numpy(corpus.learned[own][1:])
        alone = Batch(
            tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], sequences_B=torch.arange(1)
        )
        total = total + model(alone).losses_T[mask].sum()
        num_tokens += int(mask.sum())
    (total / num_tokens).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return float(total.detach()) / num_tokens, gradients


@pytest.mark.representative("cp-40", "pp-4", "dp-4")
@pytest.mark.parametrize("count", [40, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_packed_conversations_are_those_one_by_one(plan: str, count: int) -> None:
    keys = PLANS[plan]
    ranks = on_ranks_of(ModelConfig(**MODEL), Plan(**keys), step_on_rank, keys, count)
    loss, expected = one_by_one(count)
    for found, _ in ranks:
        assert found == pytest.approx(loss, rel=1e-12)
    gradients = assemble([parts for _, parts in ranks])
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)
