"""A model of transformers on the meta device, and memory for the part of it that a rank holds.

Its configuration is the text part of a ``config.json``, changed for training: no cache, no dropout,
no jitter of the router. Code in a model's folder is never run.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from moemesh.config.huggingface.architecture import unknown_family
from moemesh.config.huggingface.keys import off_note, wrong
from moemesh.config.lora import packed_bytes
from moemesh.model.hub.experts import IMPLEMENTATION, adopt
from moemesh.model.hub.precision import exactly
from moemesh.model.initialization import whole

#: (parameter name, logical shape) -> this rank's range of each dim; None: no part of the parameter.
Slices = Callable[[str, tuple[int, ...]], Sequence[range] | None]


class Blueprint(NamedTuple):
    """The class and the configuration of a model. `notes`: a sentence for each change of the
    configuration; `around`: the larger model whose text part this is; `is_own`: whether
    ``AutoModelForCausalLM`` makes a model of the same class from the larger model's folder (True
    without a larger model)."""

    kind: type[PreTrainedModel]
    config: PretrainedConfig
    notes: tuple[str, ...]
    around: Blueprint | None = None
    is_own: bool = True

    def build(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model on the meta device, in the mode of training."""
        config = copy.deepcopy(self.config)
        with torch.device("meta"), _quiet():
            model = self.kind._from_config(
                config, dtype=dtype, experts_implementation=IMPLEMENTATION
            )
        adopt(model)
        # RoPE of the type "dynamic" becomes "default" in all modules. The frequencies differ only
        # after the model's positions, which no run reaches; the code of "dynamic" reads positions
        # as numbers, which the meta device does not have. The configuration keeps its type, to
        # which some families give another meaning (``alpha`` of Hunyuan).
        for module in model.modules():
            kinds: Any = vars(module).get("rope_type")
            if kinds == "dynamic":
                module.rope_type = "default"  # type: ignore[assignment]
            elif isinstance(kinds, dict):  # one for each type of layers
                kinds.update(dict.fromkeys((k for k in kinds if kinds[k] == "dynamic"), "default"))
        set_mode(model, training=True)
        return model


def set_mode(model: PreTrainedModel, *, training: bool) -> None:
    """Set the mode. Modules with noise stay in evaluation: they draw no numbers, and a mixer that
    reads the size of its noise as a threshold (PhiMoE) weighs experts as in evaluation."""
    model.train(training)
    for module in model.modules():
        if any("jitter" in key and isinstance(size, float) for key, size in vars(module).items()):
            module.training = False


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' warnings, which are for its own users."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def blueprint(values: Mapping[str, Any]) -> Blueprint:
    """The model of a parsed ``config.json``, or of its text part if that has a class of its own.

    Raises ConfigError for a family that the installed transformers does not have, for one without a
    language model, for quantized weights, and for a value that the family's class refuses.
    """
    kind = str(values.get("model_type") or "")
    installed = transformers.__version__
    if kind not in CONFIG_MAPPING:
        raise unknown_family(values, installed)
    parts = (values, values.get("text_config") or {})
    if quantization := next(
        filter(None, (part.get("quantization_config") for part in parts)), None
    ):
        method = dict(quantization).get("quant_method")
        message = "quantized weights are not read into models of transformers"
        fix = "the folder of the original weights, or one converted to bfloat16"
        raise wrong("not-available", "quantization_config", method, message, fix)
    with _quiet():
        # transformers writes infinity to JSON in its own form.
        decoded = PretrainedConfig._decode_special_floats(dict(values))
        try:
            whole = CONFIG_MAPPING[kind].from_dict(decoded)
        except Exception as error:
            # Classes with checked fields: of which field the value has a wrong type.
            field = re.search(r"error for field '(\w+)'", str(error))
            key = field[1] if field else ""
            if key not in values:
                raise
            message = f"{key} has a value that transformers {installed} refuses for this family"
            fix = f"{key} = {json.dumps(getattr(CONFIG_MAPPING[kind](), key, None))}, its default"
            raise wrong("wrong-type", key, values[key], message, fix) from error
    # The class for the text part, or else for the whole model.
    text = whole.get_text_config()
    if (count := getattr(text, "num_hidden_layers", 1)) < 1:
        key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise wrong("out-of-range", key, count, f"{key} ({count}) must be at least 1")
    for config, classes in (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
        (whole, MODEL_FOR_CAUSAL_LM_MAPPING),
        (whole, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        if type(config) in classes:
            break
    else:
        message = f"transformers {installed} has no language model of this family"
        raise wrong("not-available", "model_type", kind, message, "a decoder-only language model")
    around = None
    if config is not whole and type(whole) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        larger: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(whole)]
        around = Blueprint(larger, whole, ())
    # Changes for training, each with a note.
    config = copy.deepcopy(config)
    notes: list[str] = []
    if text is not whole:
        notes.append(f"{kind}: text alone is trained; weights of images and sound stay as they are")
        # The value of the whole model counts: that of the text part may be a default.
        config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.use_cache = False
        rope: Any = getattr(part, "rope_parameters", None) or {}
        tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
        if any(table.get("rope_type") == "longrope" for table in tables):
            notes.append(
                "longrope has one set of factors in a forward, that of its last position: with "
                "documents of different lengths results depend on the layout"
            )
        for key, value in list(vars(part).items()):
            is_dropout = "dropout" in key or key.endswith(("pdrop", "layerdrop"))
            if is_dropout and value is None:  # legal in some classes, but no forward takes it
                setattr(part, key, 0.0)
            elif is_dropout and isinstance(value, (int, float)) and value:
                setattr(part, key, 0.0)
                notes.append(off_note(key, value))
            elif "jitter" in key and isinstance(value, float) and value:
                notes.append(
                    f"{key} = {value} draws no noise in training, where experts are chosen as in "
                    "evaluation: results would depend on the layout"
                )
        if size := getattr(part, "z_loss_coefficient", 0):
            notes.append(f"z_loss_coefficient = {size} has no effect: logits have no z-loss here")
    family: Any = classes[type(config)]
    is_own = config is whole or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(whole), None) is family
    return Blueprint(family, config, tuple(notes), around, is_own)


def place_in(whole: PreTrainedModel, model: PreTrainedModel) -> str:
    """Name of the module of the larger model `whole` that is the base model of its text part
    `model`; "" without one."""
    base = type(model.base_model)
    return next((name for name, module in whole.named_modules() if type(module) is base), "")


@torch.no_grad()
def allocate(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    slices: Slices = whole,
    is_packed: Callable[[str], bool] = lambda name: False,
) -> None:
    """Allocate this rank's part of every parameter, as zeros, and all buffers with their values.
    Parameters that transformers keeps in float32 stay in it in a bfloat16 model; those of other
    ranks stay on the meta device. `is_packed`: whether a parameter is held in NF4, by its name."""
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    owners = {"": model}
    for prefix, module in list(model.named_modules()):
        parent = owners[prefix.rpartition(".")[0]] if prefix else model
        owners[prefix] = module if isinstance(module, PreTrainedModel) else parent
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in parameters:  # tied parameters share memory
                name = f"{prefix}.{leaf}" if prefix else leaf
                if (parts := slices(name, tuple(parameter.shape))) is None:
                    continue
                sizes = [len(part) for part in parts]
                stored_dtype = parameter.dtype if dtype == torch.bfloat16 else dtype
                if is_packed(name):
                    sizes[-1], stored_dtype = packed_bytes(sizes[-1]), torch.uint8
                zeros = torch.zeros(sizes, dtype=stored_dtype, device=device)
                is_float = stored_dtype.is_floating_point
                parameters[parameter] = nn.Parameter(zeros, requires_grad=is_float)
            module._parameters[leaf] = parameters[parameter]
        if any(buffer is not None for buffer in module._buffers.values()):
            with exactly(dtype):
                for leaf, buffer in _buffers(module, owners[prefix], dtype).items():
                    module._buffers[leaf] = buffer.to(device)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model:
            # A model may set buffers of modules inside of it (the multipliers of Falcon-H1).
            with exactly(dtype):
                module._init_weights(_with_meta_parameters(module))


def _buffers(module: nn.Module, owner: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The initial values of a module's buffers, set by the model that owns it, on a copy of the
    module; in a float64 model they are computed in float64."""
    clone, widens = _with_meta_parameters(module), dtype == torch.float64
    clone.__dict__["_buffers"] = {
        leaf: None
        if buffer is None
        else torch.zeros_like(
            buffer, device="cpu", dtype=dtype if widens and buffer.is_floating_point() else None
        )
        for leaf, buffer in module._buffers.items()
    }
    owner._init_weights(clone)
    return {leaf: buffer for leaf, buffer in clone._buffers.items() if buffer is not None}


def _with_meta_parameters(module: nn.Module) -> Any:
    """A copy of a module whose own parameters are on the meta device, where initialization costs
    nothing and changes nothing."""
    clone = copy.copy(module)
    clone.__dict__["_parameters"] = {
        leaf: None
        if parameter is None
        else nn.Parameter(torch.empty_like(parameter, device="meta"))
        for leaf, parameter in module._parameters.items()
    }
    return clone


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int) -> None:
    """Allocate and draw float64 weights of a small model on the meta device: those of transformers
    plus noise. Biases of exactly 0 and norms of exactly 1 would hide errors in a test."""
    allocate(model, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), exactly(torch.float64):
        torch.manual_seed(seed)
        model.initialize_weights()
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
