"""Tuned runs of transformers' models by commands: adapters and chosen experts, from their folder to
their export."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moemesh.checkpoint.huggingface.convert import write_adapters
from moemesh.checkpoint.huggingface.pieces import slices
from moemesh.comm.mesh import Mesh
from moemesh.config.lora import is_adapter
from moemesh.model.batch import Batch
from moemesh.train.inference.evaluation import load as load_on
from moemesh.train.step import sum_losses
from moemesh.train.weights.weight_sources import config_of
from tests.hub.families import random_model, tiny_folder
from tests.hub.test_hub_runs import LENGTH, PAIR, loss_of, text_file
from tests.train.runs import moemesh, said, sets, settings


def words(**keys: object) -> list[str]:
    return sets(*settings(keys))


def evaluated(source: Path, text: Path, *more: str) -> float:
    command = ["evaluate", source, "--data", text, "--seq-len", LENGTH, "--json", *more]
    return json.loads(moemesh(*map(str, command)).stdout)["loss"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("phi3", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
        pytest.param(
            "qwen3_next",
            {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_folder_of_peft_is_a_model(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Modules that hold several projections, and a trained head."""
    folder, text = tiny_folder(kind, tmp_path / "base"), text_file(tmp_path)
    net = type(random_model(kind)).from_pretrained(folder)
    adapted = peft.get_peft_model(
        net, peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **options)
    )
    adapters = tmp_path / "adapters"
    adapted.save_pretrained(adapters)
    loss = loss_of(folder, text, adapters)
    assert evaluated(adapters, text) == pytest.approx(loss, abs=1e-5)
    said("convert", adapters, tmp_path / "merged")
    assert loss_of(tmp_path / "merged", text) == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_resume_on_one_rank_and_come_out_merged_and_for_peft(tmp_path: Path) -> None:
    folder, text, out = (
        tiny_folder("gpt_oss", tmp_path / "in"),
        text_file(tmp_path),
        tmp_path / "run",
    )
    lora = words(lora__rank=2, lora__alpha=8)
    keys = words(
        model__path=folder, data__path=text, data__seq_len=LENGTH, data__global_batch=4,
        train__steps=2, train__lr=0.05,
    )  # fmt: skip
    said("train", "--out", out, *keys, *lora, *PAIR)
    one_rank = words(train__steps=3, plan__dp=1, plan__ep=1)
    said("train", out / "config.toml", "--out", out, *one_rank)
    merged, adapters = tmp_path / "merged", tmp_path / "adapters"
    said("convert", out, merged)
    said("convert", out, adapters, "--adapter")
    loss = evaluated(out, text, *PAIR)
    assert abs(loss - loss_of(folder, text)) > 1e-3
    assert loss_of(merged, text) == pytest.approx(loss, abs=1e-5)
    assert loss_of(folder, text, adapters) == pytest.approx(loss, abs=1e-5)
    again = words(lora__path=adapters)
    assert evaluated(folder, text, *lora, *again) == pytest.approx(loss, abs=1e-5)
    before, after = (load_file(one / "model.safetensors") for one in (folder, merged))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.endswith(("_proj", "_proj.weight"))}
    said("generate", out, "--prompt", "12 is", "--max-tokens", 4)


@pytest.mark.slow
def test_the_experts_of_a_table_train_alone(tmp_path: Path) -> None:
    folder, text, out = (
        tiny_folder("qwen3_next", tmp_path / "in"),
        text_file(tmp_path),
        tmp_path / "run",
    )
    table = tmp_path / "table.json"
    said("esft", "scores", folder, text, "--seq-len", LENGTH, "--experts-per-layer", 3,
         "--out", table, *PAIR)  # fmt: skip
    experts = {int(key): one for key, one in json.loads(table.read_text())["experts"].items()}
    keys = words(
        model__path=folder, data__path=text, data__seq_len=LENGTH, data__global_batch=4,
        train__steps=2, train__lr=0.05, train__esft=table,
    )  # fmt: skip
    said("train", "--out", out, *keys, *PAIR)
    said("convert", out, tmp_path / "exported")
    before, after = (
        load_file(one / "model.safetensors") for one in (folder, tmp_path / "exported")
    )
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"
        for layer, chosen in experts.items()
        for expert in chosen
        for leaf in ("gate", "up", "down")
    }


@pytest.mark.slow
def test_our_code_and_that_of_transformers_tune_alike(tmp_path: Path) -> None:
    folder, text = tiny_folder("qwen3_moe", tmp_path / "in"), text_file(tmp_path)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"experts": {"0": [1, 2, 5], "1": [0]}}))
    keys = words(
        model__path=folder, data__path=text, data__seq_len=LENGTH, data__global_batch=4,
        train__steps=3, train__lr=0.01, train__dtype="float64",
    )  # fmt: skip
    lora = words(lora__rank=2, lora__alpha=8)
    said("train", "--out", tmp_path / "first", *keys, *lora)
    said("convert", tmp_path / "first", tmp_path / "start", "--adapter")
    lora += words(lora__path=tmp_path / "start")
    results: dict[str, list[dict[str, torch.Tensor]]] = {"adapters": [], "experts": []}
    for whose in ("moemesh", "transformers"):
        same = [*keys, *words(model__implementation=whose)]
        runs = {"adapters": lora, "experts": words(train__esft=table)}
        for kind, more in runs.items():
            run, out = tmp_path / f"{kind}-{whose}", tmp_path / f"{kind}-{whose}-out"
            said("train", "--out", run, *same, *more)
            form = ["--adapter"] if kind == "adapters" else []
            said("convert", run, out, "--dtype", "float64", *form)
            (file,) = out.glob("*.safetensors")
            results[kind].append(load_file(file))
    for ours, theirs in results.values():
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key].double(), tensor.double(), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_text_part_are_those_of_the_larger_model(tmp_path: Path) -> None:
    """PEFT finds them in the model that transformers makes of the folder, and not the modules of
    its encoder with the same names; those of the text part alone are read, too."""
    folder = tiny_folder("gemma3", tmp_path / "in")
    given = ["lora.rank=2", "lora.alpha=3", 'lora.targets=["q_proj"]', f"data.path={folder}"]
    config = config_of(folder, [*given, "data.tokenizer=bytes"])
    tokens = torch.arange(24)[None]
    batch = Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        sequences_B=torch.zeros(1, dtype=torch.int64),
        training=False,
    )

    def loss_and_adapters(more: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
        model = load_on(config_of(folder, [*given, *more]), Mesh.single("cpu"), folder)
        named = {name: one for name, one in model.model.named_parameters() if is_adapter(name)}
        if not more:
            for number, one in enumerate(named.values()):
                generator = torch.Generator().manual_seed(number)
                one.data.copy_(torch.randn(one.shape, generator=generator) * 0.3)
        with torch.no_grad():
            total, count = sum_losses(model, [batch])
        return total / count, named

    loss, named = loss_and_adapters([])
    write_adapters(
        lambda name, box: named[name].detach()[slices(box)],
        config.model,
        "gemma3",
        tmp_path / "peft",
        dtype=torch.float32,
        base=None,
    )
    net = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        net = peft.PeftModel.from_pretrained(net, tmp_path / "peft").eval()
    assert not any("lora" in name and "vision" in name for name, _ in net.named_modules())
    with torch.no_grad():
        expected = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert loss == pytest.approx(float(expected), abs=2e-6)
    assert loss_and_adapters([f"lora.path={tmp_path / 'peft'}"])[0] == loss
    file, settings = (
        tmp_path / "peft" / name for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    stored = load_file(file)
    save_file({key.replace("language_model.", ""): one for key, one in stored.items()}, file)
    settings.write_text(settings.read_text().replace(r"\\.language_model", ""))
    assert loss_and_adapters([f"lora.path={tmp_path / 'peft'}"])[0] == loss
