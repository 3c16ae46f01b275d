"""Training equals transformers: a step of every family, and 20 steps on the same batches.

In float64: what transformers computes in float32 whatever the dtype, it computes in float64 here.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moemesh.comm.mesh import Mesh
from moemesh.config.huggingface.model import model_values
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig
from moemesh.config.train import TrainConfig
from moemesh.model.batch import Batch
from moemesh.sharding.load_run import load_run
from moemesh.train.command import open_samples
from moemesh.train.opening import own_batches
from moemesh.train.weights.conversion import convert
from tests.huggingface import tiny
from tests.huggingface.conversations import add_tokenizer, write_sums
from tests.huggingface.ours import load
from tests.huggingface.tiny import COMMON, FAMILIES, build, make, save
from tests.huggingface.training_cases import AUXILIARY, CASES, OPTIMIZERS, PLANS, TOLERANCE, Case
from tests.train.runs import metrics, said, sets

pytest.importorskip("transformers")

STEPS = 10
SETTINGS: dict[str, Any] = {
    "data.seq_len": 32, "data.global_batch": 6, "train.steps": STEPS, "train.warmup_steps": 5,
    "train.clip": 1.0, "train.validation_batches": 1,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0,
    "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5,
}  # fmt: skip
_LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.1}
#: Ways to stretch positions.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500.0, **_LLAMA3},
    "yarn": _YARN,
    "yarn-long": _YARN | _MSCALES | {"factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn-fractions": _YARN | {"truncate": False},
    "yarn-factor": _YARN | {"attention_factor": 0.9},
}
#: Coefficient of auxiliary losses: large enough to change every digit.
COEFFICIENT = 0.05


def prepare(case: Case, tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder of transformers, and the settings of its training."""
    folder = add_tokenizer(save(case.kind, tmp_path / case.kind))
    path = folder / "config.json"
    # transformers does not train the embedding of the padding: here an id that no text has.
    values = {**json.loads(path.read_text()), "pad_token_id": COMMON["vocab_size"] - 1}
    if case.auxiliary:
        values |= {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    path.write_text(json.dumps(values))
    keys = SETTINGS | OPTIMIZERS[case.optimizer] | PLANS[case.plan]
    keys |= {"model.path": folder, "train.optimizer": case.optimizer, "train.dtype": case.dtype}
    if case.sft:
        keys["data.path"] = write_sums(tmp_path / "sums.jsonl", 400)
        # transformers reads on across conversations, of which two make a sequence.
        keys |= {"data.documents": "ignore", "data.seq_len": 84}
    else:
        text = tmp_path / "text.txt"
        text.write_text("".join(random.Random(1).choices("abcdefgh 0123", k=6000)))
        keys["data.path"] = text
    return folder, [f"{key}={value}" for key, value in keys.items()]


def steps_of(config: RunConfig, run: Path) -> list[Step]:
    """The batches of the run, as transformers takes them."""
    samples, size = open_samples(config, run), config.data.global_batch
    steps: list[Step] = []
    for step in range(config.train.steps):
        ids = samples.ids_at(step * size, size)
        (batch,) = own_batches(samples, Mesh.single("cpu"), ids, 1, seed=0)
        mask_BS = batch.loss_mask_BS
        targets_BS = batch.targets_BS
        if mask_BS is not None:
            assert 0 < mask_BS.sum() < 0.8 * mask_BS.numel()
            targets_BS = targets_BS.masked_fill(~mask_BS, -100)
        steps.append(Step(batch.tokens_BS, targets_BS, batch.valid_BS))
    return steps


@pytest.mark.representative("gpt_oss-sgd-float64-sft-auxiliary")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_of_steps(case: Case, tmp_path: Path) -> None:
    folder, settings = prepare(case, tmp_path)
    config = load_run([], settings).config
    options = {"output_router_logits": True} if case.auxiliary else {}
    steps = steps_of(config, tmp_path / "run")
    expected, model = train_plainly(folder, steps, config.train, **options)
    said("train", *sets(*settings), "--out", tmp_path / "run")
    rows = metrics(tmp_path / "run")
    losses = [row["loss"] + row["aux_loss"] for row in rows]
    assert any(row["grad_norm"] > config.train.clip for row in rows), "clipping is on"
    assert abs(expected[-1] - expected[0]) > 0.02, "it learns"
    assert [row["aux_loss"] > 0.01 for row in rows] == [case.auxiliary] * STEPS
    assert losses == pytest.approx(expected, rel=TOLERANCE[case.dtype], abs=0)
    convert(tmp_path / "run", tmp_path / "tuned", dtype="float32")
    ours = load_file(tmp_path / "tuned" / "model.safetensors")
    for name, theirs in model.state_dict().items():
        if name in ours:
            torch.testing.assert_close(
                ours[name], theirs.float(), rtol=0, atol=1e3 * TOLERANCE[case.dtype]
            )


#: A family, and keys besides those of its tiny model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in FAMILIES},
    # All channels of a head turn, or half of them.
    **{
        f"{kind}-{name}": (kind, {"rope_parameters": rope})
        for kind in ("llama", "glm4_moe")
        for name, rope in ROPES.items()
    },
    "mixtral-window": ("mixtral", {"sliding_window": 24}),
    "qwen2_moe-normalized": ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek_v2-yarn": ("deepseek_v2", {"q_lora_rank": None, "rope_parameters": _YARN | _MSCALES}),
    "deepseek_v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "attention_bias": True}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": _YARN | _MSCALES}),
    "deepseek_v3-half-pairs": (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "q_lora_rank": None},
    ),
    "glm4_moe-one-group": ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False}),
    "gpt_oss-clamped": ("gpt_oss", {"swiglu_limit": 0.5, "sliding_window": 16}),
    "granitemoe-bias": ("granitemoe", {"attention_bias": True}),
    "dots1-bias": ("dots1", {"attention_bias": True, "n_group": 2, "topk_group": 1}),
    "ernie4_5_moe-least": ("ernie4_5_moe", {"moe_norm_min": 0.3}),
}


#: Variants of one model each, beside every family.
VARIANTS = (
    *("llama-linear", "llama-llama3", "glm4_moe-yarn-long", "deepseek_v2-yarn", "gpt_oss-clamped"),
    *("deepseek_v3-half-pairs", "mixtral-window", "dots1-bias"),
)


@pytest.mark.representative(*FAMILIES, *VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_a_step(name: str, tmp_path: Path) -> None:
    """With auxiliary losses, of sequences that end early: padding is left out."""
    kind, changes = MODELS[name]
    folder = tmp_path / "model"
    make(kind, **changes, pad_token_id=COMMON["vocab_size"] - 1).save_pretrained(folder)
    options = {"output_router_logits": True} if kind in AUXILIARY else {}
    if options:
        values = json.loads((folder / "config.json").read_text())
        values |= options | {"router_aux_loss_coef": COEFFICIENT}
        (folder / "config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(COMMON["vocab_size"] - 1, (3, 129), generator=generator)
    valid_BS = torch.arange(128) < torch.tensor([128, 90, 7])[:, None]
    batch = Batch(
        tokens_BS=tokens_BS[:, :-1],
        targets_BS=tokens_BS[:, 1:],
        sequences_B=torch.arange(3),
        valid_BS=valid_BS,
    )
    model = load(folder, torch.float64)
    output = model(batch)
    assert output.losses_T is not None and model.embedding is not None
    ours = output.losses_T[valid_BS.flatten()].mean() + output.aux
    ours.backward()
    assert (output.aux > 0.01) == bool(options)
    targets_BS = batch.targets_BS.masked_fill(~valid_BS, -100)
    settings = TrainConfig(dtype="float64", optimizer="sgd", lr=1e-9, clip=0.0, steps=1)
    step = Step(batch.tokens_BS, targets_BS, valid_BS)
    losses, theirs = train_plainly(folder, [step], settings, **options)
    assert float(ours.detach()) == pytest.approx(losses[0], rel=1e-12)
    expected = [
        parameter.grad
        for name, parameter in theirs.named_parameters()
        if name.endswith((".gate.weight", "router.weight", "router.layer.weight"))
    ]
    gates = [moe.router.weight.grad for moe in model.moe_layers().values()]
    pairs = zip(
        [*gates, model.embedding.weight.grad],
        [*expected, theirs.get_input_embeddings().weight.grad],
        strict=True,
    )
    for mine, of_transformers in pairs:
        torch.testing.assert_close(mine, of_transformers, rtol=1e-9, atol=1e-12)


def test_what_a_folder_trains_with(tmp_path: Path) -> None:
    """The auxiliary loss is on where transformers has it, with or without a key for it."""
    with_logits = {"output_router_logits": True}

    def keys(kind: str, **extra: object) -> ModelConfig:
        values = build(kind).config.to_dict()
        values.pop("router_aux_loss_coef", None)
        values |= extra
        return ModelConfig.model_validate(model_values(values))

    assert keys("qwen3_moe").aux_loss_coefficient == 0
    config = keys("qwen3_moe", **with_logits)
    assert config.aux_loss_coefficient == pytest.approx(0.001 * 2), "transformers' default, K = 2"
    assert (config.aux_loss_layers, config.aux_loss_scope) == ("together", "global")
    assert keys("olmoe", **with_logits).aux_loss_coefficient == pytest.approx(0.01 * 2)
    config = keys("minimax_m2", **with_logits, router_aux_loss_coef=0.25)
    assert (config.aux_loss_coefficient, config.aux_loss_probabilities) == (0.5, "softmax")
    config = keys("deepseek_v3", **with_logits, router_aux_loss_coef=0.25)
    assert config.aux_loss_coefficient == 0, "transformers adds none"
    assert config.router_selection_bias and config.router_bias_rate == 0


# Training by transformers and torch.optim: a plain loop, to compare ours with.


class Step(NamedTuple):
    """The inputs of one step, its targets with -100 where a token has no loss, and which tokens are
    valid, not padding: all [B, S]."""

    tokens_BS: Tensor
    targets_BS: Tensor
    valid_BS: Tensor | None = None


class InDouble(TorchFunctionMode):
    """transformers computes norms, rotary positions, gates and losses in float32 whatever the dtype
    of a model. This mode replaces a requested float32 by float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        keywords = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **keywords)


def arithmetic(dtype: torch.dtype) -> Any:
    """The context in which a model of this dtype is made and run."""
    return InDouble() if dtype == torch.float64 else nullcontext()


def groups(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Norms, biases and sinks do not decay."""
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_vector = parameter.ndim < 2 or name.endswith("_bias")
        (others if is_vector else decaying).append(parameter)
    return [{"params": decaying, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def schedule(train: TrainConfig) -> Callable[[int], float]:
    """For torch's LambdaLR, which counts from 0."""

    def factor(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        progress = (step + 1 - train.warmup_steps) / (train.steps - train.warmup_steps)
        low = train.final_lr_ratio
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def train_plainly(
    folder: Path, steps: Iterable[Step], train: TrainConfig, **options: Any
) -> tuple[list[float], Any]:
    """The loss of every step, auxiliary loss included, and the trained model."""
    dtype = getattr(torch, train.dtype)
    losses: list[float] = []
    with arithmetic(dtype):
        model = tiny.load(folder, dtype=dtype).train()
        parameters = groups(model, train.weight_decay)
        optimizer: torch.optim.Optimizer
        if train.optimizer == "adamw":
            optimizer = torch.optim.AdamW(
                parameters, lr=train.lr, betas=train.adam_betas, eps=train.epsilon
            )
        else:
            optimizer = torch.optim.SGD(parameters, lr=train.lr, momentum=train.momentum)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(train))
        for tokens_BS, targets_BS, valid_BS in steps:
            loss = model(
                tokens_BS,
                attention_mask=None if valid_BS is None else valid_BS.long(),
                labels=targets_BS,
                shift_labels=targets_BS.contiguous(),
                use_cache=False,
                **options,
            ).loss
            optimizer.zero_grad()
            loss.backward()
            if train.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            rates.step()
            losses.append(loss.item())
    return losses, model
