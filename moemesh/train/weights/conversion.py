"""`moemesh convert`: conversions between runs, checkpoints and folders of transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moemesh.checkpoint.files import CheckpointError
from moemesh.checkpoint.huggingface.adapters import weights_of_ends
from moemesh.checkpoint.huggingface.contents import WEIGHT_DTYPES
from moemesh.checkpoint.huggingface.convert import (
    Delta,
    Description,
    carry_along,
    checkpoint_weights,
    fingerprint,
    newest,
    stored_tensors,
    trained_sources,
    write_adapters,
    write_checkpoint,
    write_delta,
    write_huggingface,
)
from moemesh.checkpoint.huggingface.derived import equivalent, merged, upcycled
from moemesh.checkpoint.huggingface.logical import logical_tensors, names_of
from moemesh.checkpoint.huggingface.pieces import Read
from moemesh.checkpoint.huggingface.weight_folder import (
    AdapterFolder,
    HuggingFaceWeights,
    WeightFolder,
)
from moemesh.checkpoint.manifest import MANIFEST
from moemesh.checkpoint.retention import best_step
from moemesh.checkpoint.store import Checkpoint, open_checkpoint
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface import export
from moemesh.config.huggingface.adapters import is_adapter_folder
from moemesh.config.huggingface.folder import CONFIG, has_weights, read_config
from moemesh.config.huggingface.model import family_of, model_values, quantization_of
from moemesh.config.load import resolved_toml
from moemesh.config.lora import NO_ADAPTERS, is_adapter
from moemesh.config.model import ModelConfig
from moemesh.config.run import RunConfig
from moemesh.config.sources import RUN_CONFIG
from moemesh.data.tokenizer import DataError, Tokenizer
from moemesh.ops.nf4 import dequantize, quantize
from moemesh.parallel.parallelize import RankModel
from moemesh.sharding.load_run import load_recorded, load_run
from moemesh.sharding.parameters import tensors
from moemesh.train.records.run_folder import RunFolder, checkpoints_of
from moemesh.train.weights import saving, weight_sources
from moemesh.train.weights.end_of_turn import (
    end_of_turn,
    put_bytes,
    put_end_of_turn,
    put_tokenizer,
    text_ends,
)
from moemesh.train.weights.weight_sources import ExpertLayout, Target, UpcycleRecipe, refused

if TYPE_CHECKING:
    from moemesh.checkpoint.huggingface.hub_weights import HubWeights


def open_weights(
    config: RunConfig, log: Callable[[str], None] = lambda note: None
) -> HuggingFaceWeights | HubWeights:
    """The folder of transformers that a run starts from. Raises CheckpointError unless it holds
    the tensors of the run's model, and no others (with transformers' own code, it may hold more).
    `log` gets notes on them, before any tensor is read."""
    assert config.model_path is not None
    if config.model.architecture is not None:
        # Late: transformers takes seconds to import.
        from moemesh.checkpoint.huggingface.hub_weights import HubWeights

        hub = HubWeights(Path(config.model_path))
        if carried := sorted(hub.tensors.carried):
            more = f" and {len(carried) - 1} more" if len(carried) > 1 else ""
            log(
                f"{carried[0]}{more} of {hub.folder.path}: no part of the trained model; an export "
                "has them unchanged"
            )
        return hub
    weights = HuggingFaceWeights(Path(config.model_path), config.model)
    if weights.folder.packed:
        kind = f"{weights.folder.path}: weights in {weights.quantization}"
        log(f"{kind} are dequantized while they are read; training and export do not quantize them")
    return weights


def load_base(
    config: RunConfig, parallel: RankModel, state: Mapping[str, object] | None = None
) -> str:
    """Read the packed base of a run, which its checkpoints do not hold; returns its fingerprint.
    `state`: that of the checkpoint that was trained on it; see :func:`open_base`."""
    weights, digest = open_base(config, state)
    saving.load_base(weights, parallel)
    return digest


def open_base(
    config: RunConfig, state: Mapping[str, object] | None = None
) -> tuple[HuggingFaceWeights | HubWeights, str]:
    """The folder of a run's packed base, and its fingerprint. Raises CheckpointError if the
    checkpoint with this `state` was trained on another base."""
    assert config.model_path is not None
    weight_sources.check_folder(Path(config.model_path))
    weights = open_weights(config)
    digest, recorded = fingerprint(weights.folder), (state or {}).get("base")
    if recorded not in (None, digest):
        raise CheckpointError(
            f"{config.model_path}: other weights ({digest}) than those that the adapters of the "
            f"checkpoint were trained for ({recorded}): model.path = the folder of the first start"
        )
    return weights, digest


def run_weights(config: RunConfig, checkpoint: Checkpoint) -> Read:
    """The weights of a run by logical names, from a checkpoint. Those of a packed base come from
    its folder, rounded to the numbers that the run computes with."""
    saved = checkpoint_weights(checkpoint)
    if not config.lora.is_packed:
        return saved
    base, _ = open_base(config, checkpoint.state)
    by_name = {tensor.name: tensor for tensor in tensors(config.model, config.plan)}

    def read(name: str, box: Sequence[range]) -> Tensor:
        stack = re.sub(r"\.\d+(\.\w+)$", r"\1", name)  # name of an expert's weight without its id
        tensor = by_name.get(name) or by_name.get(stack)
        if tensor is None or tensor.trained_rows(config.tuning):
            return saved(name, box)
        if not tensor.is_packed:
            return base.read(name, box)
        # Whole rows, since a block of NF4 goes over columns.
        *rows, columns = box
        weight = base.read(name, [*rows, range(tensor.shape[-1])])
        rounded = dequantize(quantize(weight), torch.float32)
        return rounded[..., columns.start : columns.stop]

    return read


def keep_source(weights: HuggingFaceWeights | HubWeights, folder: RunFolder) -> None:
    """Record the facts of a run's source folder that its export needs."""
    if not isinstance(weights, HuggingFaceWeights):
        from moemesh.train.weights.hub_export import keep_record

        keep_record(weights, folder)


def open_adapters(config: RunConfig, *, trains: bool = True) -> AdapterFolder | None:
    """The folder of adapters that a run starts from, if any. Raises CheckpointError unless it holds
    exactly the adapters of the run's model. `trains`: the run trains them, or only uses them."""
    if config.lora.path is None:
        return None
    family = weight_sources.family_of_run(config)
    folder = AdapterFolder(Path(config.lora.path), config.model, family, trains=trains)
    if trains:
        folder.contents.check_tuning(config.tuning)
    elif folder.contents.ends and config.lora.is_packed:
        raise CheckpointError(
            f"{config.lora.path} has whole weights beside its adapters, which are not put onto a "
            'base in 4 bits: set lora.base = "same"'
        )
    return folder


def write_adapter(source: Path, out: Path, *, dtype: str | None = None, best: bool = False) -> None:
    """Write the adapters of a run (or one of its checkpoints) as a folder of PEFT. Raises
    ConfigError for a run without adapters, or with other trained weights that PEFT cannot hold."""
    run, config, checkpoint = _opened(source, best)
    if not config.lora.rank:
        message = f"{run} has no adapters: its lora.rank is 0"
        raise refused("--adapter", str(source), message, "leave --adapter out")
    ends = {weight.ours: weight for weight in weights_of_ends(config.model)}
    trained = [
        tensor.name
        for tensor in tensors(config.model, config.plan)
        if tensor.trained_rows(config.tuning) and not is_adapter(tensor.name)
    ]
    # A folder of PEFT can hold whole weights of the ends of a model, but not tied embeddings.
    other = next((name for name in trained if name not in ends), None)
    if config.model.tied_embeddings and other is None:
        other = next((name for name in trained if len(ends[name].shape) > 1), None)
    if other is not None:
        message = f"{run} trains {other} besides its adapters, which PEFT cannot hold beside them"
        raise refused("--adapter", str(source), message, "leave --adapter out: all is merged")
    base = None if config.model_path is None else str(Path(config.model_path).resolve())
    write_adapters(
        checkpoint_weights(checkpoint),
        config.model,
        weight_sources.family_of_run(config),
        out,
        dtype=getattr(torch, dtype or config.train.dtype),
        base=base,
        saved=[ends[name] for name in trained],
    )
    if (end := end_of_turn(run, config)) is not None and end.id is not None:
        ids = sorted({end.id, *(text_ends(Path(base)) if base else ())})
        to_stderr(f"a turn ends with {end.token}: in transformers, generate(eos_token_id={ids})")


def convert(
    source: Path,
    out: Path,
    to: Target | None = None,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    expert_layout: ExpertLayout | None = None,
    delta: Delta | None = None,
    best: bool = False,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> Target:
    """Convert `source` (a run, one of its checkpoints, or a folder of transformers) into the new
    folder `out`; returns the format that was written.

    `dtype`: that of the written weights (default: for a run's export its training dtype, for a new
    run float32, from folder to folder that of config.json; for a model of transformers' own code
    that of each tensor of the source folder). `like`: a folder of transformers whose config.json,
    tokenizer and family are used. `expert_layout`: that of a written folder (default: that of
    transformers). `delta`: tensors that replace those of a folder.
    """
    to = weight_sources.target_of(source, to, dtype, expert_layout)
    if to == "moemesh":
        overrides = [f"model.path={source.resolve()}", f"train.dtype={dtype or 'float32'}"]
        config = load_run([], overrides, {}).config
        folder = open_weights(config, to_stderr)
        keep_source(folder, write_run(folder.read, config, out))
        return to
    run: Path | None = None
    adapters: AdapterFolder | None = None
    # From folder to folder: another layout or dtype, dequantized, or with merged adapters.
    if (source / CONFIG).exists() or is_adapter_folder(source):
        config = load_run([], [f"model.path={source.resolve()}"], {}).config
        weights = open_weights(config, to_stderr).read
        if (adapters := open_adapters(config, trains=False)) is not None:
            weights = adapters.joined(weights)
        origin = like or Path(str(config.model_path))
    else:
        run, config, checkpoint = _opened(source, best)
        origin = like or (Path(config.model_path) if config.model_path else None)
        weights = run_weights(config, checkpoint)
        if origin is not None and not (origin / CONFIG).exists():
            if like is not None:
                raise refused("--like", str(like), f"{like} holds no {CONFIG}")
            origin = None
    if config.lora.rank:
        weights = merged(weights, config.model)
    if config.model.architecture is not None:
        if expert_layout is not None:
            message = "experts of a model of transformers are laid out as in the folder it is from"
            raise refused("--expert-layout", expert_layout, message, "leave it out")
        from moemesh.train.weights import hub_export  # late: transformers takes seconds to import

        layout = hub_export.open_source(origin, run)
        is_changed = hub_export.changes(config)
        ends = () if adapters is None else {weight.ours for weight in adapters.contents.ends}
        hub_export.export(
            weights,
            layout,
            out,
            trains=lambda name: is_changed(name) or name in ends,
            dtype=dtype,
            delta=delta,
            on_file=on_file,
        )
    else:
        model = config.model
        if run is None:
            base = Path(str(config.model_path))
            dtype = dtype or _dtype_of(base)
            if dtype not in WEIGHT_DTYPES:
                message = f"{base / CONFIG} names the dtype {dtype}"
                raise refused("--dtype", dtype, message, f"one of {', '.join(WEIGHT_DTYPES)}")
        else:
            dtype = dtype or config.train.dtype
            if origin is None:
                model = export.exported(model.with_lora(NO_ADAPTERS))
                weights = equivalent(weights, config.model, model)
        _write(weights, model, out, dtype, expert_layout, origin, delta, on_file)
    # The folder gets the tokenizer of the run, or that of `source`, unless `like` is given. After a
    # run on conversations, generation also stops at the end of a turn.
    if like is None and (run is not None or config.data.tokenizer == str(source.resolve())):
        try:
            tokenizer = Tokenizer.open(config.data.tokenizer)
            put_tokenizer(out, tokenizer)
            if tokenizer.folder is None and origin is None:
                to_stderr(put_bytes(out))
        except DataError as error:
            to_stderr(f"note: the tokenizer {config.data.tokenizer} is not in {out}: {error}")
    if run is not None and (end := end_of_turn(run, config)) is not None:
        to_stderr(put_end_of_turn(out, end))
    return to


def _write(
    weights: Read,
    model: ModelConfig,
    out: Path,
    dtype: str,
    expert_layout: ExpertLayout | None,
    origin: Path | None,
    delta: Delta | None,
    on_file: Callable[[int, int], None],
) -> None:
    """Write a folder of transformers, with the config.json and the other files of `origin`."""
    # `kind`: the family to write; `values`: its config.json.
    values: dict[str, Any] | None
    if origin is None:
        kind = export.family_or_refusal(model)
        values = export.config_json(model, kind, dtype)
        # Unset: the defaults of the family's class are ids of another tokenizer.
        values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    else:
        theirs = read_config(origin)
        kind = family_of(theirs)
        ours = export.config_json(model, kind, dtype)
        stored: dict[str, Any] = {"torch_dtype": dtype, "dtype": dtype}
        if ahead := model.num_mtp_layers:
            # Layers that are not trained are copied: the folder has at least those of `origin`.
            stored[export.AHEAD_KEY] = max(ahead, int(theirs.get(export.AHEAD_KEY) or 0))
        theirs.pop("quantization_config", None)
        # The keys of `origin`; if they describe another model, with our keys over them.
        added = {key: ours[key] for key in export.VERSION_KEYS if key in ours}
        choices = ({**added, **theirs, **stored}, {**theirs, **ours, **stored})
        fits = (x for x in choices if not export.differences(model, kind, model_values(x)))
        if (values := next(fits, None)) is None:
            differing = ", ".join(sorted(export.differences(model, kind)))
            message = f"a model of {origin} differs from the run's in {differing}"
            raise refused("--like", str(origin), message)
    is_stacked = names_of(kind, fused=False).stack is not None
    if is_stacked and expert_layout == "per-expert":
        message = f"folders of the family {kind} hold all experts of a layer in one tensor"
        raise refused("--expert-layout", expert_layout, message, "fused")
    origin_weights: WeightFolder | None = None
    if origin is not None and has_weights(origin):
        origin_weights = WeightFolder(origin, quantization_of(read_config(origin)))
    write_huggingface(
        weights,
        model,
        kind,
        out,
        values,
        dtype=getattr(torch, dtype),
        fused=expert_layout == "fused" and not is_stacked,
        origin=origin_weights,
        delta=delta,
        on_file=on_file,
    )
    if origin is not None:  # last, so that a refused conversion leaves nothing in `out`
        carry_along(origin, out)


def _dtype_of(folder: Path) -> str:
    """The dtype that the config.json of a folder names."""
    values = read_config(folder)
    return str(values.get("dtype") or values.get("torch_dtype") or "float32")


def write_trained(source: Path, out: Path, *, dtype: str | None = None, best: bool = False) -> None:
    """Write the tensors that a run (or one of its checkpoints) trained as a delta on its source
    folder. Raises ConfigError for a run without one, or with adapters."""
    run, config, checkpoint = _opened(source, best)
    if config.model_path is None or not has_weights(Path(config.model_path)):
        message = f"{run} started from no existing folder of weights: a delta needs it as its base"
        raise refused("--delta", str(source), message, "leave --delta out: all is written")
    if config.lora.rank:
        message = f"{run} trains adapters, which are separate from the weights"
        raise refused("--delta", str(source), message, "--adapter")
    base = Path(config.model_path)
    kind = weight_sources.family_of_run(config)
    if config.model.architecture is not None:
        from moemesh.train.weights import hub_export  # late: transformers takes seconds to import

        layout = hub_export.open_source(base)
        weights = checkpoint_weights(checkpoint)
        exported, names = hub_export.export_tensors(weights, layout, config.tuning.trains, dtype)
        folder = WeightFolder(base)
        description = Description(kind, dtype or layout.dtype, fingerprint(folder), str(base))
        write_delta(out, {name: exported[name] for name in exported if name in names}, description)
        return
    logical = logical_tensors(config.model, kind)
    trained = trained_sources(logical, config.tuning.trains)
    dtype = dtype or config.train.dtype
    stored = stored_tensors(checkpoint_weights(checkpoint), logical, getattr(torch, dtype))
    description = Description(kind, dtype, fingerprint(open_weights(config).folder), str(base))
    write_delta(out, {name: stored[name] for name in stored if name in trained}, description)


def apply_delta(
    source: Path,
    out: Path,
    path: Path,
    *,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the folder of transformers `source` with the tensors of the delta in `path`, as an
    export of the run would be. Raises ConfigError for a delta of another base."""
    delta = Delta(path)
    config = load_run([], [f"model.path={source.resolve()}"], {}).config
    base = weight_sources.family_of_run(config), fingerprint(open_weights(config).folder)
    if base != (delta.description.family, delta.description.fingerprint):
        message = f"the delta in {path} was made for other weights ({delta.description.base})"
        raise refused("--apply", str(source), message, "the folder that the run started from")
    dtype = delta.description.dtype
    convert(source, out, "huggingface", dtype=dtype, delta=delta, on_file=on_file)


def write_run(weights: Read, config: RunConfig, out: Path) -> RunFolder:
    """Write a run of `config` before its first step, without optimizer state; returns the run
    folder."""
    folder = RunFolder.open(out, "never")
    state: dict[str, Any] = {"step": 0, "position": 0, "moments": [], "updates": 0}
    dtype = "float32" if config.train.dtype == "bfloat16" else config.train.dtype
    write_checkpoint(weights, config.model, folder.checkpoints, state, getattr(torch, dtype))
    (out / RUN_CONFIG).write_text(resolved_toml(config), encoding="utf-8")
    return folder


def _opened(source: Path, best: bool) -> tuple[Path, RunConfig, Checkpoint]:
    """The folder of a run, its configuration, and a checkpoint: `source` itself if it is one, else
    the newest or the `best` one of the run `source`."""
    run = source
    if (source / MANIFEST).exists():
        run = source.resolve().parent.parent
        checkpoint = open_checkpoint(source.parent, int(source.name.rpartition("-")[2]))
    elif (source / RUN_CONFIG).exists() and checkpoints_of(source).is_dir():
        folder = checkpoints_of(source)
        checkpoint = open_checkpoint(folder, best_step(folder)) if best else newest(folder)
    else:
        message = "neither a run, nor a checkpoint of one, nor a folder with config.json"
        raise refused("IN", str(source), message)
    return run, load_recorded(run / RUN_CONFIG), checkpoint


def to_stderr(note: str) -> None:
    """Print a note on stderr, since stdout has the result."""
    print(note, file=sys.stderr, flush=True)


# `moemesh convert --upcycle`: a dense folder of transformers becomes a mixture of experts.


def upcycle(
    source: Path,
    out: Path,
    recipe: UpcycleRecipe,
    to: Target = "huggingface",
    *,
    dtype: str | None = None,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the dense folder `source` as a mixture of experts: a folder of transformers of a family
    that computes it, or a run before its first step.

    Raises ConfigError for a model that has experts, and for a folder of a model that no family
    computes.
    """
    fix = "a dense folder of transformers"
    if not (source / CONFIG).exists():
        raise refused("--upcycle", str(source), f"{source} holds no {CONFIG}", fix)
    config = load_run([], [f"model.path={source.resolve()}"], {}).config
    dense = config.model
    if dense.num_moe_layers:
        message = f"{source} has {dense.num_experts} experts already"
        raise refused("--upcycle", str(source), message, fix)
    model = upcycled_model(dense, recipe)
    kind = export.family_or_refusal(model) if to == "huggingface" else None
    dtype = dtype or _dtype_of(source)
    dense_weights = open_weights(config).read
    weights = upcycled(dense_weights, model, noise=recipe.noise, drop=recipe.drop, seed=recipe.seed)
    if kind is None:
        train = config.train.model_copy(update={"dtype": dtype})
        write_run(weights, replace(config, model=model, train=train, model_path=None), out)
        return
    ids = {key: id_ for key, id_ in read_config(source).items() if key.endswith("_token_id")}
    values = {**export.config_json(model, kind, dtype), **ids}
    torch_dtype = getattr(torch, dtype)
    write_huggingface(weights, model, kind, out, values, dtype=torch_dtype, on_file=on_file)
    carry_along(source, out)


def upcycled_model(dense: ModelConfig, recipe: UpcycleRecipe) -> ModelConfig:
    """The mixture of experts; the weights of the experts of a token sum to one. Raises ConfigError
    if no layer would have experts, or with every rule that the model would break."""
    layers = range(recipe.every - 1, dense.num_layers, recipe.every)
    if not layers:
        message = f"every={recipe.every} leaves none of {dense.num_layers} layers"
        raise refused("--upcycle", f"every={recipe.every}", message, f"every={dense.num_layers}")
    values = {name: getattr(dense, name) for name in type(dense).model_fields}
    values |= {
        "num_experts": recipe.experts,
        "experts_per_token": recipe.k,
        "expert_intermediate_size": dense.intermediate_size,
        "first_dense_layers": 0 if recipe.every == 1 else ModelConfig().first_dense_layers,
        "moe_layers": None if recipe.every == 1 else tuple(layers),
        "num_shared_experts": 0,
        "router_score": "softmax",
    }
    # Two equivalent settings; each family has only one of them.
    models = [
        ModelConfig.model_validate({**values, "router_when": when, "router_normalize": normalizes})
        for when, normalizes in (("before", True), ("after", False))
    ]
    if problems := models[0].check():
        raise ConfigError(problems)
    return next((model for model in models if export.families_for(model)), models[0])
