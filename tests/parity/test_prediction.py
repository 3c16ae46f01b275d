"""Multi-token prediction: its objective by definition, and what it looks ahead to."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch, make_context
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.parity.models import AHEAD


def test_the_objective_by_its_definition() -> None:
    """Losses and gradients from whole logits, position by position, masks and all."""
    config = ModelConfig(**AHEAD["ahead_two"])
    parallel = parallelize(
        config, Plan(), Mesh.single("cpu"), seed=0, dtype=torch.float64, tokens_per_rank=64
    )
    model = parallel.model
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (3, 7), generator=generator)
    valid = torch.rand(3, 6, generator=generator) < 0.8
    carries = torch.rand(3, 6, generator=generator) < 0.8
    batch = Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        sequences_B=torch.arange(3),
        valid_BS=valid,
        loss_mask_BS=carries,
    )
    result = gradients_of_step(parallel, [batch], TimelineRecorder(0))
    got = {name: gradient.clone() for name, gradient in parallel.reducer.gradients.items()}

    assert model.embedding is not None and model.head is not None and model.norm is not None
    table, head = model.embedding.weight, model.head.weight
    context = make_context(batch, range(18), config)
    aux = torch.zeros((), dtype=torch.float64)
    x = table[tokens[:, :-1]].flatten(0, 1)
    for index in range(config.num_layers):
        x, routed = model.layers[str(index)](x, context)
        aux = aux if routed is None else aux + routed.aux
    sums, counts = [0 * aux] * 3, [0] * 3
    norms = [model.norm]
    streams = [x]
    for depth in (1, 2):
        layer = model.layers[str(config.num_layers + depth - 1)]
        # Token s + depth; none exists after the end of a sequence, and nothing is routed.
        ahead = F.pad(tokens[:, depth : 6 + depth], (0, depth - 1))
        known = valid & F.pad(valid[:, depth - 1 :], (0, depth - 1))
        joined = torch.cat(
            [layer.embedding_norm(table[ahead].flatten(0, 1)), layer.stream_norm(x)], 1
        )
        x, routed = layer(joined @ layer.projection.t(), replace(context, valid_T=known.flatten()))
        aux = aux + routed.aux
        streams.append(x)
        norms.append(model.ahead_norms[str(config.num_layers + depth - 1)])
    for depth, (norm, stream) in enumerate(zip(norms, streams, strict=True)):
        logits = (norm(stream) @ head.t()).view(3, 6, -1).log_softmax(-1)
        for sequence in range(3):
            for position in range(6 - depth):
                end = position + depth
                if valid[sequence, position] and valid[sequence, end] and carries[sequence, end]:
                    target = tokens[sequence, end + 1]
                    sums[depth] = sums[depth] - logits[sequence, position, target]
                    counts[depth] += 1
    assert min(counts) > 0 and len(set(counts)) == 3
    losses = [total / count for total, count in zip(sums, counts, strict=True)]
    scopes = int(valid.any(1).sum())
    objective = losses[0] + config.mtp_loss_weight * (losses[1] + losses[2]) / 2 + aux / scopes
    assert result.loss == pytest.approx(losses[0].item(), rel=1e-12)
    assert result.mtp_loss == pytest.approx((losses[1] + losses[2]).item() / 2, rel=1e-12)
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(objective, list(parameters.values()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


def test_what_is_known_and_predicted_ahead() -> None:
    """Packed documents and slices: no target lies after the end of its document."""
    tokens = torch.arange(10, 17)[None]
    batch = Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        sequences_B=torch.arange(1),
        documents_BS=torch.tensor([[0, 0, 0, 1, 1, 1]]),
    )
    one, two = batch.ahead(1), batch.ahead(2)
    assert one.tokens_BS.tolist() == [[11, 12, 13, 14, 15, 16]] and one.valid_BS is None
    assert one.targets_BS.tolist() == [[12, 13, 14, 15, 16, 0]]
    assert one.loss_BS.int().tolist() == [[1, 1, 0, 1, 1, 0]]
    assert two.valid_BS is not None and two.valid_BS.int().tolist() == [[1, 1, 0, 1, 1, 0]]
    assert two.tokens_BS.tolist() == [[12, 13, 14, 15, 16, 0]]
    assert two.loss_BS.int().tolist() == [[1, 0, 0, 1, 0, 0]]
    part = batch.take((range(1, 2), range(4, 6)))
    for depth, whole in ((1, one), (2, two)):
        for ours, theirs in zip(part.ahead(depth), whole, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs[:, [1, 4, 5]])
