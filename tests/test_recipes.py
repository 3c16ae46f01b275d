"""Every recipe is short, legal and fits its machines; each runs on a small copy of its model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moemesh.data.corpus import between
from moemesh.data.indexed import IndexedWriter
from moemesh.data.tokenizer import Tokenizer
from tests.hub.families import random_model
from tests.huggingface.conversations import add_tokenizer, write_sums
from tests.huggingface.tiny import save
from tests.planner.published_configs import WITH_EXPERTS
from tests.train.runs import moemesh, said

pytestmark = pytest.mark.documents

RECIPES = Path(__file__).parent.parent / "recipes"
LINES = 40
#: The files of a user, as the recipes name them.
MODEL, CHATS, TOKENIZER, TOKENS = "Qwen3-30B-A3B", "chats.jsonl", "DeepSeek-V3", "tokens"
EXPERTS = "chats.json"
#: A model with linear attention, which transformers computes; the default sizes of its family.
HYBRID = "Qwen3.5-35B-A3B"
#: Sizes that keep a recipe's other keys and run in seconds on four processes at most.
SMALL = {
    "data.seq_len": 32,
    "data.global_batch": 4,
    "plan.microbatches": 2,
    "train.steps": 2,
    "train.validation_batches": 1,
}
SPREAD = SMALL | {"plan.dp": 2, "plan.tp": 1, "plan.ep": 2}


class Recipe(NamedTuple):
    """The machines that a recipe is for, the keys of a small run, None where there is none, the
    bytes of a smaller device, and the folder of the model."""

    cluster: str
    small: dict[str, object] | None
    device_bytes: int | None = None
    model: str = MODEL


TABLE = {
    "pretrain-tiny": Recipe("laptop_cpu", {**SMALL, "model.num_layers": 2}),
    "pretrain-muon": Recipe("laptop_cpu", {**SMALL, "model.num_layers": 2}),
    "finetune-qwen3-30b-a3b": Recipe("dgx_h100", SPREAD),
    "esft-qwen3-30b-a3b": Recipe("dgx_h100", SMALL),
    "lora-qwen3-30b-a3b": Recipe("dgx_h100", SMALL),
    "nf4-24gb-qwen3-30b-a3b": Recipe("one_h100", SMALL, 24 * 2**30),
    "nf4-80gb-qwen3-30b-a3b": Recipe("one_h100", SMALL),
    "nf4-24gb-qwen3.5-35b-a3b": Recipe("one_h100", SMALL, 24 * 2**30, HYBRID),
    "nf4-80gb-qwen3.5-35b-a3b": Recipe("one_h100", SMALL, None, HYBRID),
    "pretrain-deepseek-v3": Recipe("hgx_h800", None),
}
DEVICES = {
    "pretrain-tiny": 4,
    "pretrain-muon": 4,
    "finetune-qwen3-30b-a3b": 8,
    "esft-qwen3-30b-a3b": 2,
    "lora-qwen3-30b-a3b": 1,
    "nf4-24gb-qwen3-30b-a3b": 1,
    "nf4-80gb-qwen3-30b-a3b": 1,
    "nf4-24gb-qwen3.5-35b-a3b": 1,
    "nf4-80gb-qwen3.5-35b-a3b": 1,
    "pretrain-deepseek-v3": 2048,
}


def test_every_recipe_is_in_the_table_and_short() -> None:
    files = {path.stem: path.read_text().splitlines() for path in RECIPES.iterdir()}
    assert files.keys() == TABLE.keys()
    for name, lines in files.items():
        assert len(lines) <= LINES, name
        assert max(map(len, lines)) <= 100, name
        assert lines[0].startswith("# "), "what it is for"


def hybrid() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.CONFIG_MAPPING["qwen3_5_moe"]()


def write_table(folder: Path, layers: Iterable[int]) -> None:
    """Two experts of each of these layers."""
    table = {"experts": {str(layer): [0, 5] for layer in layers}}
    (folder / EXPERTS).write_text(json.dumps(table))


def write_data(folder: Path, model: str) -> None:
    """The files that the recipes name: a few tokens each, and a table of experts."""
    write_table(folder, range(48))
    write_sums(folder / CHATS, 3)
    add_tokenizer(folder / model)
    (folder / TOKENIZER).mkdir()
    tokenizer = Tokenizer.open(str(add_tokenizer(folder / TOKENIZER)))
    with IndexedWriter(
        folder / TOKENS,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        end_of_document=between(tokenizer),
        ends_last=True,
    ) as writer:
        writer.add(tokenizer.encode(b"a text", "a text"))


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_accepted_and_fits(name: str, tmp_path: Path) -> None:
    """With nothing of the model but its config.json and its tokenizer, as before a download."""
    pytest.importorskip("tokenizers")
    model = TABLE[name].model
    if model == HYBRID:
        hybrid().save_pretrained(tmp_path / model)
    else:
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(WITH_EXPERTS[model].config))
    write_data(tmp_path, model)
    path = RECIPES / f"{name}.toml"
    # The data of a test are too few for a step of such a run.
    assert f"ok: {DEVICES[name]} rank" in said("config", "check", "--elsewhere", path, cwd=tmp_path)
    words = ["estimate", "--config", str(path), "--cluster", TABLE[name].cluster, "--json"]
    memory = json.loads(moemesh(*words, cwd=tmp_path).stdout)["memory"]
    assert memory["fits"]
    device = TABLE[name].device_bytes or memory["device_bytes"]
    assert memory["needed_bytes"] < 0.95 * device


@pytest.mark.parametrize("name", [name for name, recipe in TABLE.items() if recipe.small])
def test_a_recipe_runs_on_a_small_copy(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / TABLE[name].model
    if model.name == HYBRID:
        random_model("qwen3_5_moe").save_pretrained(model)
    else:
        save("qwen3_moe", model)
    add_tokenizer(model)
    write_sums(tmp_path / CHATS, 100)
    write_table(tmp_path, (0, 2))
    small = TABLE[name].small
    assert small is not None
    given = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    printed = said("train", RECIPES / f"{name}.toml", *given, cwd=tmp_path)
    assert "step 2/2" in printed
    assert (tmp_path / "runs" / name / "report.html").exists()
