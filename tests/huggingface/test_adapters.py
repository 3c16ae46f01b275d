"""Adapters in PEFT's format and merged into weights: the logits of transformers are ours."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.adapters import CONFIG, KNOWN_FIELDS, WEIGHTS
from moemesh.checkpoint.huggingface.convert import write_adapters, write_huggingface
from moemesh.checkpoint.huggingface.derived import merged
from moemesh.checkpoint.huggingface.weight_folder import AdapterFolder
from moemesh.checkpoint.store import Shard
from moemesh.comm.mesh import Mesh
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.folder import read_config
from moemesh.config.lora import LoraConfig, is_adapter
from moemesh.config.model import ModelConfig
from moemesh.model.batch import Batch
from moemesh.model.transformer import Transformer
from moemesh.sharding.load_run import load_run
from moemesh.train.inference.evaluation import load as load_on
from moemesh.train.preparation import check_inputs
from moemesh.train.weights.conversion import convert
from moemesh.train.weights.weight_sources import check_weights, config_of
from tests.checkpoint.simulate import whole
from tests.huggingface import ours
from tests.huggingface.ours import assert_near
from tests.huggingface.tiny import FAMILIES, build, load, logits, make, save

peft = pytest.importorskip("peft")

LORA = LoraConfig(rank=3, alpha=5.0)
TOKENS = torch.arange(2 * 40).view(2, 40) * 7 % 288


def shards(model: Transformer) -> list[Shard]:
    return [whole(f"model.{name}", tensor.detach()) for name, tensor in model.named_parameters()]


def adapted(folder: Path, lora: LoraConfig) -> tuple[ModelConfig, Transformer]:
    """Our model of a folder with adapters that are far from zero."""
    config = ours.config_of(folder).with_lora(lora)
    model = ours.load(folder, config=config)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_parameters():
        if is_adapter(name):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return config, model


def loaded(kind: str, folder: Path) -> Any:
    """PEFT's model over that of transformers. PEFT must not warn of an ignored key."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return peft.PeftModel.from_pretrained(copy.deepcopy(build(kind)), folder)


def check_written(
    folder: Path, written: Path, kind: str, config: ModelConfig, model: Transformer
) -> None:
    """PEFT computes the logits of `model` from the adapters; the loader reads the same adapters."""
    assert_near(logits(loaded(kind, written), TOKENS), ours.logits(model, TOKENS)[0])
    again = ours.load(folder, config=config)
    AdapterFolder(written, config, kind).load_into(shards(again))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.representative("qwen2_moe", "gpt_oss")
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_in_pefts_format(tmp_path: Path, kind: str) -> None:
    folder = save(kind, tmp_path / "base")
    config, model = adapted(folder, LORA)
    write_adapters(
        ours.weights(model), config, kind, tmp_path / "peft", dtype=torch.float32, base=None
    )
    expected = ours.logits(model, TOKENS)[0]
    assert (expected - logits(build(kind), TOKENS)).abs().max() > 1e-2
    check_written(folder, tmp_path / "peft", kind, config, model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.representative("qwen2_moe")
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_merged(tmp_path: Path, kind: str) -> None:
    folder = save(kind, tmp_path / "base")
    config, model = adapted(folder, LORA)
    own = merged(ours.weights(model), config)
    values = read_config(folder)
    write_huggingface(own, config, kind, tmp_path / "out", values, dtype=torch.float32)
    theirs = load(tmp_path / "out", dtype=torch.float32)
    assert_near(logits(theirs, TOKENS), ours.logits(model, TOKENS)[0])


@pytest.mark.representative("qwen2_moe-targets0", "mixtral-targets3")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2_moe", ("q_proj", "up_proj")),
        ("qwen2_moe", ("down_proj",)),
        ("qwen2_moe", ("k_proj", "o_proj")),
        # No module but stacks, and dense layers and shared experts beside them: one rank for all.
        ("mixtral", ("gate_proj", "up_proj")),
        ("gpt_oss", ("gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
        ("deepseek_v3", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_some_targets(tmp_path: Path, kind: str, targets: tuple[str, ...]) -> None:
    folder = save(kind, tmp_path / "base")
    config, model = adapted(folder, LoraConfig(rank=2, alpha=3.0, targets=targets, rslora=True))
    write_adapters(
        ours.weights(model), config, kind, tmp_path / "peft", dtype=torch.float32, base="x"
    )
    check_written(folder, tmp_path / "peft", kind, config, model)


def test_the_rank_of_a_wide_adapter_is_that_of_its_parts(tmp_path: Path) -> None:
    """The folder has twice the rank for gate and up together."""
    folder, written = save("mixtral", tmp_path / "base"), tmp_path / "peft"
    targets = ("q_proj", "gate_proj", "up_proj")
    config, model = adapted(folder, LoraConfig(rank=2, alpha=3.0, targets=targets))
    write_adapters(ours.weights(model), config, "mixtral", written, dtype=torch.float32, base=None)
    assert 4 in json.loads((written / CONFIG).read_text())["rank_pattern"].values()
    assert config_of(folder, [f"lora.path={written}"]).lora.rank == 2


def test_a_wide_adapter_that_is_full_is_refused(tmp_path: Path) -> None:
    """PEFT trained more rows than the adapters here have."""
    folder = save("mixtral", tmp_path / "base")
    targets = ("gate_proj", "up_proj", "down_proj")
    config, model = adapted(folder, LoraConfig(rank=2, alpha=3.0, targets=targets))
    write_adapters(ours.weights(model), config, "mixtral", tmp_path, dtype=torch.float32, base=None)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in (name for name in tensors if "base_layer" not in name and "lora_B" in name):
        tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="has other rows of A than its own"):
        AdapterFolder(tmp_path, config, "mixtral").load_into(shards(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_peft_are_read(tmp_path: Path, kind: str) -> None:
    """One A for gate and up together, as PEFT makes it by default."""
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(copy.deepcopy(build(kind)), settings)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            if "lora_" in name:
                tensor.mul_(0.5)
    theirs.save_pretrained(tmp_path / "peft")
    folder = save(kind, tmp_path / "base")
    targets = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    config, model = adapted(folder, LoraConfig(rank=3, alpha=5.0, targets=targets))
    # Of qwen3_moe, a dense layer has no adapters in the folder.
    AdapterFolder(tmp_path / "peft", config, kind).load_into(shards(model))
    assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))


#: Settings of PEFT other than one rank for all -> our settings, and whether it trains.
UNEVEN: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "two layers": ({"layers_to_transform": [0, 2]}, {}, True),
    "one layer, by a pattern": ({"target_modules": r".*\.1\.self_attn\.[qv]_proj"}, {}, True),
    "a smaller rank, one scaling": (
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {},
        True,
    ),
    "a larger rank, one scaling": (
        {"rank_pattern": {r"layers\.2\..*v_proj": 8}, "alpha_pattern": {r"2\..*v_proj": 12}},
        {"rank": 8, "alpha": 12.0},
        True,
    ),
    "a smaller rank": ({"rank_pattern": {"q_proj": 2}}, {}, False),
    "another alpha": ({"alpha_pattern": {"v_proj": 11}}, {}, False),
    "ranks by the root": (
        {"rank_pattern": {"^model.layers.1.self_attn.q_proj": 7}, "use_rslora": True},
        {"rank": 7, "alpha": 6 * 1.75**0.5, "rslora": True},
        False,
    ),
    "a smaller rank of experts": (
        {
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.gate_up_proj": 3, "experts.down_proj": 1},
        },
        {"targets": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")},
        False,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_adapters_of_peft(tmp_path: Path, name: str, kind: str) -> None:
    """Logits are PEFT's, and so are the gradients where the adapters train."""
    theirs_of, ours_of, trains = UNEVEN[name]
    if "target_parameters" in theirs_of and kind == "llama":
        pytest.skip("has no experts")
    usual = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    settings = peft.LoraConfig(
        **usual | theirs_of, task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.0
    )
    theirs = peft.get_peft_model(copy.deepcopy(build(kind)).eval(), settings)
    theirs.save_pretrained(tmp_path / "peft")
    folder = save(kind, tmp_path / "base")
    usual = {"rank": 4, "alpha": 6.0, "targets": ("q_proj", "v_proj")}
    lora = LoraConfig(**usual | ours_of)
    read = load_run([], [f"model.path={folder}", f"lora.path={tmp_path / 'peft'}"]).config.lora
    assert {*read.targets} == {*lora.targets}
    assert (read.rank, read.alpha, read.rslora) == (
        lora.rank,
        pytest.approx(lora.alpha),
        lora.rslora,
    )
    config, model = adapted(folder, lora)
    AdapterFolder(tmp_path / "peft", config, kind, trains=False).load_into(shards(model))
    assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))
    if not trains:
        with pytest.raises(CheckpointError, match=r"another scaling .* at another pace"):
            AdapterFolder(tmp_path / "peft", config, kind)
        return
    AdapterFolder(tmp_path / "peft", config, kind).load_into(shards(model))
    batch = Batch(tokens_BS=TOKENS, targets_BS=TOKENS, sequences_B=torch.arange(2), training=False)
    model.logits(batch).square().sum().backward()
    theirs(TOKENS).logits.square().sum().backward()
    expected = {
        name: tensor.grad for name, tensor in theirs.named_parameters() if tensor.grad is not None
    }
    norms = [float(grad.norm()) for grad in expected.values()]
    gradients = [
        float(tensor.grad.norm())
        for name, tensor in model.named_parameters()
        if is_adapter(name) and tensor.grad is not None and tensor.grad.any()
    ]
    assert sorted(gradients) == pytest.approx(sorted(norms), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.representative("qwen2_moe-targets1", "gpt_oss-targets2")
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj"), ("up_proj",)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_adapters_is_a_model(
    tmp_path: Path, kind: str, targets: tuple[str, ...]
) -> None:
    """Its base and its settings are those in adapter_config.json, as in transformers."""
    folder, written = save(kind, tmp_path / "base"), tmp_path / "peft"
    config, model = adapted(folder, LoraConfig(rank=3, alpha=5.0, targets=targets))
    weights, dtype = ours.weights(model), torch.float32
    write_adapters(weights, config, kind, written, dtype=dtype, base=str(folder))
    expected = ours.logits(model, TOKENS)[0]
    evaluated = load_on(config_of(written, []), Mesh.single("cpu"), written).model
    assert_near(ours.logits(evaluated, TOKENS)[0], expected)
    with pytest.raises(ConfigError, match=r"holds adapters of PEFT, and no config.json"):
        check_weights(written)  # of verbs that need a whole model
    convert(written, tmp_path / "merged", dtype="float32")
    assert_near(logits(load(tmp_path / "merged"), TOKENS), expected)


@pytest.mark.filterwarnings("ignore")
def test_adapters_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder, written = save("llama", tmp_path / "base"), tmp_path / "peft"
    config, model = adapted(folder, LORA)
    weights, dtype = ours.weights(model), torch.float32
    write_adapters(weights, config, "llama", written, dtype=dtype, base=str(folder))
    (link := tmp_path / "link").symlink_to(ours.as_cache(written))
    evaluated = load_on(config_of(link, []), Mesh.single("cpu"), link).model
    assert_near(ours.logits(evaluated, TOKENS)[0], ours.logits(model, TOKENS)[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"base_model_name_or_path": None}, "model.path", "names no base_model_name_or_path"),
        ({"r": "8"}, "model.path", "rank must be an integer"),
        ({"target_modules": ["wte"]}, "lora.path", "wte, and the model has no such projection"),
        ({"target_modules": ["gate"]}, "lora.path", "gate, and the router cannot have an adapter"),
        ([], "lora.path", "is not a JSON object"),
        (None, "lora.path", "holds no adapter_config.json"),
    ],
)
def test_settings_of_adapters_that_cannot_be_read(
    tmp_path: Path, changes: Any, given: str, words: str
) -> None:
    folder, written = save("llama", tmp_path / "base"), tmp_path / "peft"
    config, model = adapted(folder, LORA)
    weights, dtype = ours.weights(model), torch.float32
    write_adapters(weights, config, "llama", written, dtype=dtype, base=str(folder))
    values = json.loads((written / CONFIG).read_text())
    if isinstance(changes, dict) and (names := changes.get("target_modules")):
        # As after another tool has renamed the modules.
        tensors = load_file(written / WEIGHTS)
        save_file(
            {key.replace("q_proj", names[0]): value for key, value in tensors.items()},
            written / WEIGHTS,
        )
    values = values | changes if isinstance(changes, dict) else changes
    (written / CONFIG).write_text(json.dumps(values))
    if changes is None:
        (written / CONFIG).unlink()
    with pytest.raises(ConfigError, match=words) as refused:
        load_run([], [f"{given}={written}"])
    assert len(refused.value.problems) == 1


@pytest.mark.filterwarnings("ignore")
def test_adapters_beside_a_folder_are_evaluated(tmp_path: Path) -> None:
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], rank_pattern={"1.*q_proj": 2},
        task_type="CAUSAL_LM", init_lora_weights=False,
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(build("llama")).eval(), settings)
    theirs.save_pretrained(tmp_path / "peft")
    folder = save("llama", tmp_path / "base")
    given = ["lora.rank=4", "lora.alpha=6", 'lora.targets=["q_proj"]']
    config = config_of(folder, [*given, f"lora.path={tmp_path / 'peft'}"])
    model = load_on(config, Mesh.single("cpu"), folder).model
    assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings", "options"),
    [
        # The list of most recipes: PEFT adapts stacks, gate and up together with twice the rank.
        ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, {}),
        ("mixtral", {"target_modules": ["w1", "w3"], "use_rslora": True}, {}),
        ("llama", {"target_modules": ["v_proj"]}, {"save_embedding_layers": True}),
    ],
)
def test_what_peft_makes_of_usual_settings(
    tmp_path: Path, kind: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    base = make(kind, tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    given = peft.LoraConfig(
        r=2, lora_alpha=5, task_type="CAUSAL_LM", init_lora_weights=False, **settings
    )
    theirs = peft.get_peft_model(base, given)
    base.model.embed_tokens.weight.data.mul_(1.25 if options else 1)
    theirs.save_pretrained(tmp_path / "peft", **options)
    config = config_of(tmp_path / "base", [f"lora.path={tmp_path / 'peft'}"])
    model = load_on(config, Mesh.single("cpu"), tmp_path / "base").model
    assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))
    if options:  # the tied table under both names: only the same numbers are one table
        file = tmp_path / "peft" / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors["base_model.model.lm_head.weight"] += 1
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight does not belong to this model"):
            load_on(config, Mesh.single("cpu"), tmp_path / "base")


#: Changes of a written adapter_config.json with which PEFT ignores some tensors, starts some
#: modules at random, or raises -> words of the refusal.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer modules": ({"target_modules": ["q_proj"]}, r"v_proj.*that adapter_config.json does not"),
    "more modules": ({"target_modules": "all-linear"}, r"k_proj.* is missing, .* random numbers"),
    "other modules": ({"target_modules": r".*mlp\..*"}, "q_proj.* does not name"),
    "no module": ({"target_modules": None}, "q_proj.* does not name"),
    "parameters": (
        {"target_modules": ["v_proj"], "target_parameters": ["q_proj.bias"]},
        "q_proj.* does not name",
    ),
    "an excluded module": ({"exclude_modules": ["v_proj"]}, "v_proj.* does not name"),
    "excluded by a pattern": ({"exclude_modules": r".*\.0\..*"}, r"layers\.0.* does not name"),
    "fewer layers": ({"layers_to_transform": [0, 2]}, r"layers\.1.* does not name"),
    "one layer": ({"layers_to_transform": 2}, r"layers\.0.* does not name"),
    "layers elsewhere": (
        {"layers_to_transform": [0, 1, 2], "layers_pattern": ["h"]},
        "does not name",
    ),
    "a broken pattern": ({"target_modules": "("}, "names of modules are broken"),
    "modules by number": ({"target_modules": 3}, "names of modules are broken"),
    "the usual rank": ({"r": None}, "r = None must be a whole number"),
    "a rank in words": ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern.q_proj = '2' must be"),
    "a rank of 0": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj = 0 must be a whole"),
    "a list of ranks": ({"rank_pattern": [2]}, "rank_pattern must be an object"),
    "an alpha in words": ({"alpha_pattern": {"v": "2"}}, "alpha_pattern.v = '2' must be a number"),
    "an empty table of a method": ({"kasa_config": {}}, "uses kasa_config"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_names_and_tensors_that_contradict_each_other(tmp_path: Path, name: str) -> None:
    changes, words = CONTRADICTIONS[name]
    usual = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    settings = peft.LoraConfig(**usual, task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(build("llama")), settings).save_pretrained(tmp_path)
    lora = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "v_proj"))
    config = ours.config_of(save("llama", tmp_path / "base")).with_lora(lora)
    AdapterFolder(tmp_path, config, "llama")
    given = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(given | changes))
    with pytest.raises(CheckpointError, match=words):
        AdapterFolder(tmp_path, config, "llama")


@pytest.mark.filterwarnings("ignore")
def test_fields_that_are_left_out_are_those_of_peft(tmp_path: Path) -> None:
    settings = peft.LoraConfig(
        target_modules=["q_proj"], rank_pattern={"1.*q_proj": 2}, task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(build("llama")).eval(), settings)
    theirs.save_pretrained(tmp_path / "peft")
    given = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert given.pop("r") == given.pop("lora_alpha") == 8
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(given))
    lora = LoraConfig(rank=8, alpha=8.0, targets=("q_proj",))
    config, model = adapted(save("llama", tmp_path / "base"), lora)
    AdapterFolder(tmp_path / "peft", config, "llama", trains=False).load_into(shards(model))
    assert_near(ours.logits(model, TOKENS)[0], logits(theirs, TOKENS))


#: Fields of PEFT's that give a folder another meaning.
OTHER_METHODS: dict[str, Any] = {
    "bias": "all", "trainable_token_indices": [1], "use_dora": True,
    "velora_config": {"a": 1}, "alora_invocation_tokens": [1, 2], "use_qalora": True,
    "monteclora_config": {"a": 1}, "layer_replication": [[0, 2]], "lora_bias": True,
    "use_bdlora": {"a": 1}, "arrow_config": {"a": 1}, "kasa_config": {"a": 1},
    "init_lora_weights": "pissa_niter_4",
}  # fmt: skip


def test_every_field_of_peft_is_known_or_refused() -> None:
    """A field of a later version is refused, too, until one of the two lists has it."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == KNOWN_FIELDS | OTHER_METHODS.keys()


@pytest.mark.parametrize("init", ["pissa", "olora", "corda", "loftq", "lora_ga", "mica"])
def test_a_changed_base_is_refused(tmp_path: Path, init: str) -> None:
    folder = save("mixtral", tmp_path / "base")
    config, model = adapted(folder, LORA)
    write_adapters(ours.weights(model), config, "mixtral", tmp_path, dtype=torch.float32, base=None)
    given = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(given | {"init_lora_weights": init}))
    with pytest.raises(CheckpointError, match=f"init_lora_weights = '{init}' changes the weights"):
        AdapterFolder(tmp_path, config, "mixtral")


def test_folders_of_other_adapters_are_refused(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "base")
    config, model = adapted(folder, LORA)
    write_adapters(
        ours.weights(model), config, "mixtral", tmp_path / "peft", dtype=torch.float32, base=None
    )

    def refused(words: str, kind: str = "mixtral", **keys: Any) -> None:
        other = ours.config_of(folder).with_lora(LORA.model_copy(update=keys))
        with pytest.raises(CheckpointError, match=words):
            AdapterFolder(tmp_path / "peft", other, kind)

    refused("rank 3 and alpha 5, another scaling than lora.alpha 5.0 with lora.rank 4", rank=4)
    refused("has rank 3, and lora.rank is 2: lora.rank must be the largest rank", rank=2)
    refused("alpha 5, another scaling than lora.alpha 6.0", alpha=6.0)
    refused("does not belong to this model .* adapters of .*o_proj", targets=("q_proj",))
    (tmp_path / "a.txt").write_text("some text\n" * 800)
    keys = [f"model.path={folder}", f"lora.path={tmp_path / 'peft'}", "lora.rank=4"]
    keys += [
        "lora.alpha=16",
        f"data.path={tmp_path / 'a.txt'}",
        "data.tokenizer=bytes",
        "data.seq_len=32",
    ]
    # What `config check` and `train` look at before torch.
    with pytest.raises(CheckpointError, match=r"another scaling than lora.alpha 16\.0"):
        check_inputs(load_run([], keys, {}))
    keys = [*keys, "lora.rank=3", "lora.alpha=5"]
    check_inputs(load_run([], keys, {}))
    path = tmp_path / "peft" / CONFIG
    given = json.loads(path.read_text())
    path.write_text(json.dumps(given | {"alpha_pattern": given["alpha_pattern"] | {"q_proj": 9}}))
    refused("q_proj has rank 3 and alpha 9, another scaling")
    for key, value in OTHER_METHODS.items():
        path.write_text(json.dumps(given | {key: value}))
        refused(rf"{key}.*(changes the weights|is not known here)")
    weights = tmp_path / "peft" / WEIGHTS
    pickled = weights.rename(weights.with_name("adapter_model.bin"))
    path.write_text(json.dumps(given))
    refused(r"holds no adapter_model\.safetensors; adapter_model\.bin is never read")
    pickled.rename(weights)
    path.write_text(json.dumps(given | {"peft_type": "IA3"}))
    refused("is of the type IA3, not LORA")
    path.write_text(json.dumps(given))
    tensors = load_file(weights)
    expert = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    save_file(tensors | {expert: torch.ones(3, 48)}, weights)
    refused(r"experts\.0\.w1.* adapts one expert, as saved over transformers 4")
    save_file(tensors, weights)
    small = ours.config_of(folder).model_copy(update={"num_layers": 2}).with_lora(LORA)
    with pytest.raises(CheckpointError, match=r"layers\.2.* does not belong to this model"):
        AdapterFolder(tmp_path / "peft", small, "mixtral")
