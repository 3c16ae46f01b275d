"""Cases that break without a warning in code of others: packed documents, ranks without rows,
jitter, empty microbatches, small models without a kind of layer."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from moemesh.comm.mesh import Mesh
from moemesh.config.huggingface.architecture import hub_model
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.batch import Batch
from moemesh.model.hub.architecture import read
from moemesh.model.hub.build import allocate, blueprint
from moemesh.model.hub.model import HubModel
from moemesh.model.hub.precision import exactly
from moemesh.model.hub.shrink import decoder_layers, kind_of, shrunken
from moemesh.model.transformer import ModelPart
from moemesh.parallel.parallelize import parallelize
from moemesh.trace.timeline import TimelineRecorder
from moemesh.train.step import gradients_of_step
from tests.hub.families import random_model
from tests.hub.training import architecture_of, model_of, plain_model, values_of
from tests.ranks import mesh_on_ranks


def model_with_weights(name: str, config: ModelConfig | None = None) -> HubModel:
    architecture = architecture_of(name)
    model = HubModel(config or model_of(architecture), dtype=torch.float64)
    allocate(model.net, dtype=torch.float64)
    model.net.load_state_dict(random_model(name).state_dict(), strict=False)
    return model


def batch_of(tokens: Tensor, **masks: Tensor) -> Batch:
    return Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        sequences_B=torch.arange(len(tokens)),
        **masks,
    )


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(1, 250, (rows, length), generator=torch.Generator().manual_seed(1))


#: One family for each way in which documents are kept apart.
WAYS = {"qwen3_moe": "positions", "gpt_oss": "masks", "qwen3_next": "rows", "lfm2_moe": "rows"}


@pytest.mark.representative("qwen3_moe", "gpt_oss")
@pytest.mark.parametrize("name", WAYS)
def test_documents_of_one_row_are_as_rows_of_their_own(name: str) -> None:
    assert architecture_of(name).documents == WAYS[name]
    model, tokens = model_with_weights(name), tokens_of(2, 34)
    lengths = (20, 13)
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).expand(2, -1)
    packed = model(batch_of(tokens, documents_BS=documents))
    starts = (range(20), range(20, 33))
    losses = torch.stack(
        [
            torch.cat(
                [
                    model(batch_of(tokens[row : row + 1, part.start : part.stop + 1])).losses_T
                    for part in starts
                ]
            )
            for row in range(2)
        ]
    )
    torch.testing.assert_close(packed.losses_T, losses.flatten(), rtol=0, atol=1e-9)
    # Not the same as one document: the test would see a mask that is left out.
    assert (model(batch_of(tokens)).losses_T - packed.losses_T).abs().max() > 1e-5


#: A fixed alpha, for Hunyuan alone, changes the frequencies at every position.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "alpha": 1000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [1.5] * 8, "short_mscale": 1.1, "long_mscale": 1.3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        *((name, DYNAMIC) for name in ("olmo2", "gemma3_text", "exaone_moe", "hunyuan_v1_moe")),
        ("phimoe", LONG),
    ],
)
def test_rope_whose_code_reads_positions(name: str, rope: dict[str, Any]) -> None:
    theirs = copy.deepcopy(random_model(name))
    values = values_of(name) | {"rope_scaling": rope, "router_jitter_noise": 0.0}
    config = theirs.config.from_dict(dict(values))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    expected = type(theirs)._from_config(config, **eager).double().eval()
    expected.load_state_dict(theirs.state_dict())
    architecture = read(values)
    assert any("longrope" in note for note in architecture.notes) == (rope is LONG)
    model = HubModel(hub_model(architecture), dtype=torch.float64)
    allocate(model.net, dtype=torch.float64)
    model.net.load_state_dict(theirs.state_dict(), strict=False)
    batch = batch_of(tokens_of(2, 34))
    with exactly(torch.float64), torch.no_grad():
        logits = expected(batch.tokens_BS).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(
            logits, batch.targets_BS.flatten(), reduction="none"
        )
        torch.testing.assert_close(model(batch).losses_T, losses, rtol=0, atol=1e-6)


def test_padding_is_not_routed() -> None:
    model, tokens = model_with_weights("gpt_oss"), tokens_of(2, 13)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 5:] = False
    output = model(batch_of(tokens, valid_BS=valid))
    assert output.counts_LE.sum(1).tolist() == [2 * 17] * len(model.moe_layers())
    alone = model(batch_of(tokens[1:, :6]))
    torch.testing.assert_close(output.losses_T[12:17], alone.losses_T, rtol=0, atol=1e-12)


def gradients_on_rank(
    mesh: Mesh, config: ModelConfig, weights: Mapping[str, Tensor], sequences: int
) -> tuple[float, list[int], dict[str, float]]:
    torch.set_num_threads(1)
    plan = Plan(dp=mesh.world_size, ep=mesh.world_size)
    parallel = parallelize(
        config, plan, mesh, seed=0, dtype=torch.float64, tokens_per_rank=12 * sequences
    )
    for name, parameter in parallel.model.named_parameters():
        part = weights[name]
        for dim, own in enumerate(parallel.placements[name].slices(mesh)):
            part = part.narrow(dim, own.start, len(own))
        with torch.no_grad():
            parameter.copy_(part)
    rows = shard_range(sequences, plan.dp, mesh["dp"].index)
    tokens = tokens_of(sequences, 13)[rows.start : rows.stop]
    result = gradients_of_step(parallel, [batch_of(tokens)], TimelineRecorder(mesh.rank))
    return result.loss, result.counts_LE.sum(0).tolist(), {"norm": result.grad_norm}


@pytest.mark.representative("4-gpt_oss", "1-qwen3_moe")
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("sequences", [4, 1])
def test_a_rank_without_rows_or_tokens_does_what_the_others_do(name: str, sequences: int) -> None:
    """Its exchanges are those of the others, in the backward too: none waits for ever."""
    architecture = architecture_of(name)
    weights = {key: one.double() for key, one in random_model(name).state_dict().items()}
    routers = [key for key in weights if key.endswith(("router.weight", "mlp.gate.weight"))]
    assert routers
    for key in routers:  # all tokens choose the same two experts, of one rank
        weights[key] = torch.zeros_like(weights[key])
        if key.endswith("router.weight"):
            weights[key.replace("weight", "bias")] = torch.arange(8.0, 0.0, -1.0).double()
    config = model_of(architecture)
    one = gradients_on_rank(Mesh.single("cpu"), config, weights, sequences)
    for found in mesh_on_ranks(
        Plan(dp=2, ep=2).layout, gradients_on_rank, config, weights, sequences
    ):
        assert found[0] == pytest.approx(one[0], abs=1e-12)
        assert found[1] == one[1]
        assert 0 in (sum(found[1][:4]), sum(found[1][4:]))
        assert found[2]["norm"] == pytest.approx(one[2]["norm"], abs=1e-12)


def test_jitter_and_dropout_are_off_and_told() -> None:
    """The mixer of this family reads the size of its noise as a threshold: in training it weighs
    experts as in evaluation, and its router has the gradient that transformers has there."""
    noise = {"router_jitter_noise": 0.25, "input_jitter_noise": 0.125}
    plan = blueprint({**values_of("phimoe"), **noise, "attention_dropout": 0.1})
    assert plan.config.attention_dropout == 0.0 and not plan.config.use_cache
    off = ("attention_dropout = 0.1 is set to 0", "router_jitter_noise = 0.25 draws no noise")
    assert all(any(note.startswith(text) for note in plan.notes) for text in off)
    model = HubModel(model_of(read({**values_of("phimoe"), **noise})), dtype=torch.float64)
    allocate(model.net, dtype=torch.float64)
    theirs = copy.deepcopy(random_model("phimoe"))
    model.net.load_state_dict(theirs.state_dict(), strict=False)
    batch = batch_of(tokens_of(3, 13))
    losses = model(dataclasses.replace(batch, training=True)).losses_T
    losses.mean().backward()
    config = theirs.config.from_dict({**values_of("phimoe"), **noise})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    expected = type(theirs)._from_config(config, **eager).double().eval()
    expected.load_state_dict(theirs.state_dict())
    with exactly(torch.float64):
        logits = expected(batch.tokens_BS).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets_BS.flatten())
    loss.backward()
    assert losses.mean().item() == pytest.approx(loss.item(), abs=1e-12)
    wanted = dict(expected.named_parameters())
    routers = {n: p for n, p in model.net.named_parameters() if n.endswith("router.weight")}
    assert routers and all(p.grad is not None and p.grad.abs().max() > 0 for p in routers.values())
    for name, parameter in routers.items():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [0.0, 0.25])
def test_a_loss_on_logits_that_is_not_added_is_reported(size: float) -> None:
    """transformers adds it to the loss of this family."""
    notes = blueprint({"model_type": "bamba", "z_loss_coefficient": size}).notes
    expected = ["z_loss_coefficient = 0.25 has no effect"] if size else []
    assert [note.partition(":")[0] for note in notes] == expected


def test_experts_pass_through_our_exchange() -> None:
    """The library's own default refuses float64 on a CPU."""
    net = blueprint(values_of("olmoe")).build(torch.float64)
    assert net.config._experts_implementation == "moemesh"


@pytest.mark.parametrize("name", ["jamba", "gemma4_text", "qwen3_moe"])
def test_a_small_model_has_every_kind_of_layer(name: str) -> None:
    real = blueprint({**values_of(name), "hidden_size": 64})
    small = shrunken(values_of(name)).build()
    kinds = [{kind_of(layer) for layer in decoder_layers(net)[1]} for net in (real.build(), small)]
    assert kinds[0] == kinds[1]


@pytest.mark.representative("qwen3_moe")
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "mixtral"])
def test_the_balance_loss_is_that_of_transformers(name: str) -> None:
    architecture = architecture_of(name)
    values = {**architecture.values, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    config = model_of(dataclasses.replace(architecture, values=values))
    assert config.aux_loss_coefficient == pytest.approx(0.6)
    model, tokens = model_with_weights(name, config), tokens_of(3, 13)
    own = model(batch_of(tokens)).aux
    net: Any = random_model(name).double()
    net.set_experts_implementation("eager")
    with torch.no_grad():
        theirs = 0.3 * net(input_ids=tokens[:, :-1], output_router_logits=True).aux_loss
    assert own.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert math.isfinite(own.item())


@pytest.mark.representative("qwen3_next-together")
@pytest.mark.parametrize("layers", ["together", "each"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm_moe_dsa", "zaya", "deepseek_v4", "qwen3_next"])
def test_stages_pass_on_the_stream_and_the_sums_of_the_balance_loss(name: str, layers: str) -> None:
    """The documents are packed: in some families they have rows of their own in the stream."""
    architecture = architecture_of(name)
    changes = {"aux_loss_coefficient": 0.3, "aux_loss_layers": layers}
    config = model_of(architecture, **changes)
    documents = torch.tensor([[0] * 9 + [1] * 3]).expand(2, 12)
    batch = batch_of(tokens_of(2, 13), documents_BS=documents)
    whole = model_with_weights(name, config)
    expected = whole(batch)
    assert expected.losses_T is not None
    (expected.losses_T.sum() + expected.aux).backward()

    count = config.num_layers
    parts = (ModelPart(range(1), True, False), ModelPart(range(1, count), False, True))
    stages = [HubModel(config, [part], torch.float64) for part in parts]
    weights = dict(whole.named_parameters())
    for stage in stages:
        held = dict(stage.named_parameters())
        allocate(
            stage.net,
            dtype=torch.float64,
            slices=lambda path, shape: [*map(range, shape)] if path in held else None,  # noqa: B023
        )
        state = {path: one for path, one in whole.net.state_dict().items() if path not in weights}
        stage.net.load_state_dict(state, strict=False)
        with torch.no_grad():
            for path, parameter in stage.named_parameters():
                parameter.copy_(weights[path])
    first = stages[0](batch, parts[0])
    assert first.x_TH is not None
    specs = [(tuple(x.shape), x.dtype) for x in (first.x_TH, *first.more)]
    assert specs == stages[1].stream_specs(batch)
    received = [x.detach().requires_grad_(x.is_floating_point()) for x in first.for_next]
    last = stages[1](batch, parts[1], *received)
    assert last.losses_T is not None
    (last.losses_T.sum() + last.aux).backward()
    roots = [(x, y.grad) for x, y in zip(first.for_next, received, strict=True)]
    roots.append((first.aux, torch.ones_like(first.aux)))
    # The first layers of some families have no router whose logits are recorded.
    roots = [(x, gradient) for x, gradient in roots if x.requires_grad]
    torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    torch.testing.assert_close(last.losses_T, expected.losses_T, rtol=0, atol=1e-12)
    torch.testing.assert_close(first.aux + last.aux, expected.aux, rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([first.counts_LE, last.counts_LE]), expected.counts_LE)
    for stage in stages:
        for path, parameter in stage.named_parameters():
            other, own = weights[path].grad, parameter.grad
            if config.tied_embeddings:  # what is read before the layers is on both stages
                continue
            if other is None or own is None:
                assert other is own, path
            else:
                torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.representative("zaya")
@pytest.mark.parametrize("name", ["lfm2_moe", "zaya", "gemma4_text"])
def test_buffers_of_a_module_without_parameters_are_held(name: str) -> None:
    architecture = architecture_of(name)
    assert {key for key, _ in HubModel(model_of(architecture)).named_buffers()} == {
        *architecture.buffers
    }
    first = HubModel(model_of(architecture), [ModelPart(range(1), True, False)])
    layer = f"{architecture.layers}.0."
    assert {key for key, _ in first.named_buffers()} == {
        key for key in architecture.buffers if key.startswith(layer)
    }


def test_buffers_that_a_larger_module_sets_are_those_of_transformers() -> None:
    """The base model of Falcon-H1 writes the multipliers into its layers."""
    assert any("mup_vector" in key for key, _ in plain_model("falcon_h1").named_buffers())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_the_decoder_is_found_beside_an_encoder_of_as_many_layers(name: str) -> None:
    """The small models of these families have two layers of each."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"num_hidden_layers": 2, "vocab_size": 320, "rope_parameters": rope}
    vision = {"depth": 2, "deepstack_visual_indexes": [0]}
    values = CONFIG_MAPPING[name](text_config=text, vision_config=vision).to_dict()
    assert decoder_layers(blueprint(values).build())[0] == "model.language_model.layers"
