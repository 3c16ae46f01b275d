"""Model shapes from a preset's name, a folder, config.json, a TOML file or a row of a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from moemesh.config.cluster import Cluster, load_cluster
from moemesh.config.errors import ConfigError, Problem, unknown_keys
from moemesh.config.experts import MOST_LAYERS
from moemesh.config.hub import local_folder, short_name
from moemesh.config.huggingface.folder import CONFIG, has_weights, read_config
from moemesh.config.huggingface.model import model_values
from moemesh.config.huggingface.sizes import alternating_windows
from moemesh.config.limits import parse_toml
from moemesh.config.load import build_section
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_CONFIG, Leaf, preset_names, read_preset_table
from moemesh.config.suggest import nearest_choice
from moemesh.config.toml import unreadable
from moemesh.planner.shapes.counted import shape_of, shape_of_folder
from moemesh.planner.shapes.shape import ModelShape, from_model_config

# Shapes from a table of architectures, and GPTs from three numbers.


_GPT = re.compile(r"gpt:(\d+)x(\d+)a(\d+)(?:v(\d+))?")
_TRUNCATED = re.compile(r"(.+)#L(\d+)")
_GPT_VOCABULARY = 51200
_GPT_POSITIONS = 2048


def gpt(num_layers: int, hidden: int, heads: int, vocab: int = _GPT_VOCABULARY) -> ModelShape:
    """A GPT as Megatron trains it: GELU, multi-head, width 4h, biases, learned positions, tied."""
    return ModelShape(
        name=f"gpt:{num_layers}x{hidden}a{heads}v{vocab}",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        activation="gelu",
        **_GPT_DETAILS,
    )


#: Fields of every GPT, implied by act = "gelu" in a table entry.
_GPT_DETAILS: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "norm": "layer_bias",
    "learned_positions": _GPT_POSITIONS,
    "tied_embeddings": True,
    "dropout": True,
}


def from_arch_table(arch: str, table: Mapping[str, Any]) -> ModelShape:
    """The model called `arch` of a table in the form of ``model_archs.json``.

    `arch` may also be ``gpt:<L>x<h>a<heads>[v<vocab>]`` or ``<arch>#L<n>``. Raises ConfigError for
    any other name, and for an entry with a missing or an unknown key.
    """
    if match := _GPT.fullmatch(arch):
        layers, hidden, heads, vocab = match.groups()
        return gpt(int(layers), int(hidden), int(heads), int(vocab or _GPT_VOCABULARY))
    if match := _TRUNCATED.fullmatch(arch):
        return from_arch_table(match.group(1), table).truncated(int(match.group(2)))
    if arch not in table or arch.startswith("_"):
        known = tuple(name for name in table if not name.startswith("_"))
        message = "no entry of the table of architectures has this name"
        fix = nearest_choice(arch, known)
        raise ConfigError([Problem.of("unknown-model", "arch", arch, message, fix)])
    entry = cast("Mapping[str, Any]", table[arch])
    # Of the keys on experts, the first three (number, top-k, width) have no default.
    needed = [*_CHOICES, *_SIZES, *(list(_EXPERTS)[:3] if entry.get("type") == "moe" else ("ffn",))]
    needed.remove("tied_embeddings")
    wrong = [("missing", key, f"the entry has no `{key}`") for key in needed if key not in entry]
    for key in entry:
        if key not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            message = f"unknown key `{key}` (known: {known})"
            wrong.append(("unknown-key", key, message))
    for key, choices in _CHOICES.items():
        if key in entry and entry[key] not in choices:
            message = f"unknown kind of layer (known: {', '.join(choices)})"
            wrong.append(("unknown-layer", key, message))
    if wrong:
        raise ConfigError(
            Problem.of(code, f"{arch}.{key}", entry.get(key), message)
            for code, key, message in wrong
        )
    layers, is_moe, gelu = entry["layers"], entry["type"] == "moe", entry["act"] == "gelu"
    fields: dict[str, Any] = {"tied_embeddings": False, "activation": entry["act"]}
    if gelu:
        fields = _GPT_DETAILS | fields
    given = {key: value for key, value in entry.items() if value}
    for key in given.keys() & (_SIZES.keys() | (_EXPERTS.keys() if is_moe else set())):
        fields[(_SIZES | _EXPERTS)[key]] = given[key]
    if given.get("attention_bias"):
        fields |= {"qkv_bias": True, "output_bias": True}
    if latent := cast("Mapping[str, int]", given.get("mla", {})):
        fields |= {"attention": "mla"} | {_LATENT[key]: value for key, value in latent.items()}
    if window := given.get("sliding_window"):
        every = entry.get("sliding_window_every", 1)
        fields["windows"] = alternating_windows(layers, window, every)
    if is_moe:
        fields["moe_layers"] = tuple(range(given.get("dense_layers", 0), layers))
        has_bias = bool(given.get("expert_bias"))
        fields |= {"expert_bias": has_bias, "router_logit_bias": has_bias}
    fields["intermediate_size"] = given.get("dense_ffn", 0) if is_moe else entry["ffn"]
    return ModelShape(name=arch, **fields)


#: Key of an entry -> field of ModelShape: sizes, sizes of experts, sizes of latent attention.
_SIZES = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads",
    "kv_heads": "num_kv_heads", "head_dim": "head_dim", "vocab": "vocab_size",
    "tied_embeddings": "tied_embeddings",
}  # fmt: skip
_EXPERTS = {
    "experts": "num_experts", "topk": "experts_per_token", "moe_ffn": "expert_intermediate_size",
    "shared_ffn": "shared_intermediate_size", "router_groups": "router_groups",
    "router_group_topk": "router_groups_kept",
}  # fmt: skip
_LATENT = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "qk_nope": "qk_nope_head_dim",
    "qk_rope": "qk_rotary_head_dim", "v_head": "v_head_dim",
}  # fmt: skip
_CHOICES = {"type": ("dense", "moe"), "act": ("swiglu", "gelu")}
_OTHERS = (
    "ffn", "dense_layers", "dense_ffn", "mla", "attention_bias", "expert_bias", "sliding_window",
    "sliding_window_every", "source",
)  # fmt: skip
_KNOWN = (*_CHOICES, *_SIZES, *_EXPERTS, *_OTHERS)


#: Sizes that a message proposes for missing keys: those of Llama 3 8B.
_EXAMPLE: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "num_heads": 32,
    "num_kv_heads": 8, "head_dim": 128,
}  # fmt: skip
#: Folder of presets that this library plans but does not train.
SHAPES = "shapes"
#: Sentence for messages: the sources of models that `moemesh train` accepts.
TRAINED = "`moemesh train` takes presets, [model] tables and folders with config.json and weights"


class Model(NamedTuple):
    """A shape, and the configuration with which `moemesh train` trains it: None if ModelConfig does
    not cover the shape, for the reason `why_not`.

    `path` is the folder of weights from which training starts.
    """

    shape: ModelShape
    config: ModelConfig | None
    path: str | None = None
    #: ``--set`` arguments for the sections other than [model], and the run that they configure.
    settings: tuple[str, ...] = ()
    run: RunConfig | None = None
    why_not: str = f"it is a shape, which is only planned: {TRAINED}"
    #: The configuration of a model that is not trained because its weights are missing.
    sizes: ModelConfig | None = None


#: Suffixes of a model's other releases on the hub: further training changes no size.
_VARIANTS = r"(-(base|instruct|chat|thinking|zero|hf|\d{4}|v\d\.\d|terminus))*"
#: Preset -> pattern of the names on the hub of the models that have its sizes.
_RELEASES = {
    "deepseek-v2": r"deepseek-ai/deepseek-v2(\.5)?(-\d{4})?",
    "deepseek-v2-lite": "deepseek-ai/deepseek-(v2|coder-v2)-lite",
    "deepseek-v3": r"deepseek-ai/deepseek-(v3(\.1)?|r1)",
    "gpt-oss-20b": "openai/gpt-oss-(safeguard-)?20b",
    "gpt-oss-120b": "openai/gpt-oss-(safeguard-)?120b",
    "kimi-k2": "moonshotai/kimi-k2",
    "llama3-8b": r"meta-llama/(meta-)?llama-?3(\.1)?-8b",
    "llama3-70b": r"meta-llama/(meta-)?llama-?3(\.[13])?-70b",
    "llama3-405b": r"meta-llama/(meta-)?llama-?3(\.1)?-405b",
    "mixtral-8x7b": "mistralai/mixtral-8x7b",
    "mixtral-8x22b": "mistralai/mixtral-8x22b",
    "qwen2-57b-a14b": "qwen/qwen2-57b-a14b",
    "qwen3-30b-a3b": "qwen/qwen3-(coder-)?30b-a3b",
    "qwen3-235b-a22b": "qwen/qwen3-235b-a22b",
}


def family_name(name: str) -> str:
    """A name on the hub without its owner and release: "Llama-2-7b" of "x/Llama-2-7b-chat-hf"."""
    short = name.rpartition("/")[2]
    match = re.fullmatch(rf"(.*?){_VARIANTS}", short, re.IGNORECASE)
    return match[1] if match else short


def preset_of(name: str, *, has_owner: bool = True) -> str:
    """The preset with the sizes of a model of this name on the hub, with or without its owner;
    other names as they are."""
    for preset, pattern in _RELEASES.items():
        pattern = pattern if has_owner else pattern.partition("/")[2]
        if re.fullmatch(pattern + _VARIANTS, name, re.IGNORECASE):
            return preset
    return name


def load_model(source: str | Path | ModelConfig | Model) -> Model:
    """The model of a preset's name, of a config.json (or its folder), or of a TOML file. A
    configuration gets the name of the preset that it equals.

    Raises ConfigError with every problem.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, ModelConfig):
        presets = (name for name in preset_names() if load_model(name).config == source)
        return Model(shape_of(source, next(presets, "model")), source)
    source = preset_of(str(source))
    path = local_folder(source, "model", "model", [CONFIG])
    if source in (*preset_names(), *preset_names(SHAPES)):
        table = read_preset_table(source, "" if source in preset_names() else SHAPES)
        name, origin = source, f"preset {source}"
    else:
        if path.is_dir() and has_weights(path):
            # As in `moemesh train`, extra prediction layers are trained on demand only.
            given = read_config(path, "model")
            shape, config = shape_of_folder(given, short_name(str(path.resolve())))
            if config is not None:
                return Model(shape, config, path=str(path))
            try:
                config = _config(model_values(given))
            except ConfigError as error:
                problem = error.problems[0]
                return Model(shape, None, why_not=f"{problem.key}: {problem.message}")
            if ahead := shape.num_mtp_layers:
                note = (
                    f"extra prediction layers ({ahead}) are trained with model.num_mtp_layers only"
                )
                shape = shape.changed(num_mtp_layers=0, notes=(*shape.notes, note))
            return Model(shape, config, path=str(path))
        if path.is_dir():  # folder of a run or of a Hugging Face model
            path /= RUN_CONFIG if (path / RUN_CONFIG).is_file() else CONFIG
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            known = (*preset_names(), *preset_names(SHAPES))
            message = "neither a model preset nor a readable config.json or TOML file"
            raise _refused("no-file", source, message, nearest_choice(source, known)) from None
        is_in_folder = path.name in (CONFIG, RUN_CONFIG)
        folder = short_name(str(path.parent.resolve()))
        name, origin = folder if is_in_folder else path.stem, str(path)
        if path.suffix == ".json":
            given = read_config(path, "model")
            shape, sizes = shape_of_folder(given, name)
            why_not = f"{CONFIG} has no weights beside it: {TRAINED}"
            with suppress(ConfigError):
                sizes = sizes or _config(model_values(given))
            return Model(shape, None, why_not=why_not, sizes=sizes)
        try:
            table = parse_toml(text)
        except ValueError as error:
            raise _refused("syntax", source, unreadable(error)) from None
    try:
        return _from_table(table, name)
    except ConfigError as error:
        raise ConfigError(replace(problem, origin=origin) for problem in error.problems) from None


def load_both(
    model: str | Path | ModelConfig | Model, cluster: str | Path | Cluster, problems: list[Problem]
) -> tuple[Model | None, Cluster | None]:
    """Model and cluster of a verb's options. One that cannot be read is None, and the reasons are
    added to `problems`."""
    loaded: Model | None = None
    machine: Cluster | None = None
    try:
        loaded = load_model(model)
    except ConfigError as error:
        problems += error.problems
    try:
        machine = load_cluster(cluster)
    except ConfigError as error:
        problems += error.problems
    return loaded, machine


def _from_table(table: Mapping[str, Any], name: str) -> Model:
    """The model of a section [model] as in `moemesh train`, or of a bare table with all sizes.

    A bare table has the fields of ModelConfig if one of its keys belongs to trained models only,
    else the fields of ModelShape.
    """
    table = dict(table)
    is_section = "model" in table
    if is_section:
        section = table["model"]
        if not isinstance(section, dict):
            message = "[model] is a section and takes keys, not a value"
            fix = f'preset = "{section}"' if section in preset_names() else "num_layers = 12"
            raise _refused("wrong-type", name, message, f"[model], and below it {fix}")
        table = dict(cast("dict[str, Any]", section))
    if preset := table.pop("preset", None):
        if preset not in preset_names():
            fix = nearest_choice(str(preset), preset_names())
            raise _refused("not-a-choice", str(preset), "unknown model preset", fix)
        table = read_preset_table(str(preset)) | table
    shape_fields, config_fields = ModelShape.model_fields, set(ModelConfig.model_fields)
    known = tuple({**ModelConfig.model_fields, **shape_fields})
    if problems := unknown_keys("model", table, known):
        raise ConfigError(problems)
    trained = set(table) - set(shape_fields)
    if is_section and set(table) <= config_fields:
        trained = trained or {"preset"}
    needed = [key for key, item in shape_fields.items() if item.is_required()]
    if not is_section and (missing := [key for key in needed if key not in table]):
        usual = _EXAMPLE | {key: table[key] for key in needed if key in table}
        hidden, heads = usual["hidden_size"], usual["num_heads"]
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            usual["head_dim"] = hidden // heads
        raise ConfigError(
            Problem.of("missing", f"model.{key}", None, f"the model has no {key}",
                       f"such as {key} = {usual[key]}")
            for key in missing
        )  # fmt: skip
    if trained and set(table) <= config_fields:
        config = _config(table if is_section else {"num_experts": 0} | table)
        return Model(from_model_config(config, name), config)
    if trained:
        code = "conflict"
        message = "is a key of trained models and does not go with keys of planned shapes"
        raise ConfigError(
            Problem.of(code, f"model.{key}", table[key], f"`{key}` {message}", f"leave `{key}` out")
            for key in sorted(trained)
        )
    # `moe_layers = "all"` is short for the list of all layers; one window is that of every layer.
    values = {"name": name, **table}
    layers, window = values.get("num_layers"), values.get("windows")
    size = min(layers, MOST_LAYERS) if isinstance(layers, int) else 0
    if values.get("moe_layers") == "all":
        values["moe_layers"] = tuple(range(size))
    if isinstance(window, int) and not isinstance(window, bool):
        values["windows"] = (window,) * size
    return Model(ModelShape(**values), None)


def _config(table: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a table [model]. Raises ConfigError with every problem."""
    leaves = {f"model.{key}": Leaf(value=value, origin="") for key, value in table.items()}
    config, broken = build_section(ModelConfig, leaves)
    if problems := broken or config.check():
        raise ConfigError(problems)
    return config


def _refused(code: str, source: str, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(code=code, key="model", value=source, message=message, fix=fix)])
