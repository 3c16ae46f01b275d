"""The record of a model of transformers, read from its modelling code on the meta device.

As a program it takes a ``config.json`` from its standard input and prints the record in one line;
exit code 2, with the problem in that line, where the model cannot be trained.

Legend: B sequences, S positions, T tokens, H hidden, K slots per token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from transformers import PreTrainedModel

from moemesh.config.architecture import Architecture, ParameterRecord
from moemesh.config.errors import ConfigError
from moemesh.config.huggingface.architecture import hub_model
from moemesh.config.huggingface.keys import wrong
from moemesh.model.batch import Batch
from moemesh.model.hub.build import blueprint, initialize, place_in
from moemesh.model.hub.costs import count_costs, unpacked_masks
from moemesh.model.hub.experts import adds_up, is_experts, set_exchange, width_of
from moemesh.model.hub.model import HubModel, masks, tail
from moemesh.model.hub.precision import exactly
from moemesh.model.hub.shrink import decoder_layers, shrunken
from moemesh.model.transformer import ModelPart

#: Positions of the forward on the meta device.
_LENGTH = 16
#: Positions of two packed documents: together longer than the windows of the small model, each
#: shorter than the number of keys that its indexers choose.
_DOCUMENTS = (20, 13)
#: Largest length that :func:`_layer_output` tries: it needs one that differs from all other sizes.
_LONGEST = 1 << 15
#: Largest difference of a token's logits or loss, in float64, that counts as equal.
_SAME = 1e-8


class _Watched(nn.Linear):
    """A linear layer that counts its forwards, and the reads of its weight. More reads than
    forwards: other code reads the weight, and would lack what an adapter adds in the forward."""

    num_forwards = num_reads = 0

    def __getattr__(self, name: str) -> Any:
        self.num_reads += name == "weight"
        return super().__getattr__(name)

    def forward(self, input: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(input)


class _Uses(TorchFunctionMode):
    """Records of a forward: the phases in which each parameter is read (0 before the layers, 1 in
    them, 2 after them), and the result of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0
        self.results: list[Any] = []
        self.phases: dict[int, set[int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in _pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, nn.Parameter):
                self.phases.setdefault(id(leaf), set()).add(self.phase)
        return func(*args, **(kwargs or {}))


def read(values: Mapping[str, Any], documents: str | None = None) -> Architecture:
    """The record of the model of a ``config.json``. `documents`: a value of
    `Architecture.documents`, if it is known (for a small model); None determines it. Raises
    ConfigError for a model that cannot be trained."""
    source = blueprint(values)
    model = source.build(torch.bfloat16)
    kind = str(values["model_type"])
    whole = source.around and source.around.build()
    if source.around is not None and whole is not None and _differs(model, whole):
        kinds = f"{source.kind.__name__} and {source.around.kind.__name__}"
        message = f"{kinds} compute other logits from the same hidden states"
        raise wrong("not-available", "model_type", kind, message, "the folder of a text model")
    try:
        name, layers = decoder_layers(model)
    except ValueError as error:
        fix = "model.implementation = moemesh, where it knows the family"
        raise wrong("not-available", "model_type", kind, str(error), fix) from None
    if model.base_model is model:
        message = f"{source.kind.__name__} has no base model of the name {model.base_model_prefix}"
        raise wrong("not-available", "model_type", kind, message, "another family")
    experts = {
        int(path.removeprefix(name + ".").split(".")[0]): (path, module)
        for path, module in model.named_modules()
        if is_experts(module)
    }
    numbers = {int(module.num_experts) for _, module in experts.values()}  # type: ignore[call-overload]
    if len(numbers) > 1:
        message = f"its layers have different numbers of experts: {sorted(numbers)}"
        raise wrong("not-available", "model_type", kind, message, "layers that are alike")
    num_experts = max(numbers, default=0)
    # Kinds of parameters, from a forward and backward on the meta device.
    uses, experts_per_token = _trace(model, layers)
    stacks = {
        f"{path}.{leaf}"
        for path, module in experts.values()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.shape[0] == num_experts
    }
    # Linear layers with several outputs, whose weight only their own forward reads, outside of
    # routers (transformers calls these gate or router).
    layouts = {
        f"{path}.weight": "o i -> o i"
        for path, linear in layers.named_modules(prefix=name)
        if isinstance(linear, _Watched) and 0 < linear.num_forwards == linear.num_reads
        if linear.out_features > 1 and not {"gate", "router"} & {*path.split(".")}
    }
    for path, module in experts.values():
        layouts |= {f"{path}.{leaf}": text for leaf, text in _stack_layouts(module).items()}
    config = model.config.get_text_config()
    width = getattr(config, "intermediate_size", None)
    width = width if isinstance(width, int) else config.hidden_size
    for _, module in experts.values():
        down: Any = module.down_proj
        width = down.shape[1] if module.is_transposed else down.shape[2]
    # Tests on a small model with random weights. The record of a small model (`documents` is given)
    # has no costs and is not tested. `is_cut`: whether ranks can shard the width of experts.
    is_counted = documents is None
    is_cut = not is_counted
    if documents is None:
        documents, refusal, fix = "rows", "", "a decoder-only model"
        try:
            small = shrunken(values).build()
            initialize(small, seed=0)
            with suppress(Exception), exactly(torch.float64):
                is_cut = all(adds_up(module) for module in small.modules() if is_experts(module))
            if _reads_later(small):
                refusal = "logits of a position depend on later tokens"
        except Exception as error:  # raised by the modelling code of any family
            if not experts:
                reason = str(error).partition("\n")[0]
                refusal = "whether logits depend on later tokens is tested on a small model of the "
                refusal += f"family, which fails: {reason}"
                fix = "a family of docs/huggingface.md"
        else:
            with suppress(Exception):
                documents = _documents(small)
        if refusal:
            raise wrong("not-available", "model_type", kind, refusal, fix)

    def record(path: str, parameter: Tensor) -> ParameterRecord:
        index, leaf = path.removeprefix(name + ".").split(".")[0], path.rpartition(".")[2]
        is_stack = path in stacks
        dim_and_blocks = width_of(experts[int(index)][1], leaf) if is_stack and is_cut else None
        cut, blocks = dim_and_blocks or (None, 1)
        unit = "embedding" if 0 in uses.phases.get(id(parameter), ()) else "head"
        if path.startswith(name + "."):
            unit = f"layers.{index}"
        return ParameterRecord(
            name=path,
            shape=tuple(parameter.shape),
            unit=unit,
            is_expert=is_stack,
            is_fp32=parameter.dtype == torch.float32,
            is_idle=parameter.grad is None,
            cut=cut,
            blocks=blocks,
            layout=layouts.get(path, "") if parameter.grad is not None else "",
        )

    parameters = tuple(record(*pair) for pair in model.named_parameters())
    # A tied table is read both before the layers and after them.
    is_tied = any({0, 2} <= phases for phases in uses.phases.values())
    reads_between = any(
        1 in uses.phases.get(id(parameter), ())
        for path, parameter in model.named_parameters()
        if not path.startswith(name + ".")
    )
    layer_output = _layer_output(model, layers[0], uses.results)
    saved = model.state_dict()
    uncut, notes = "", list(source.notes)
    if reads_between:
        uncut = "parameters outside of its layers are read between them"
    elif not layer_output:
        uncut = "its layers return different tensors"
    elif is_counted:
        uncut = _against_stages(values)
    if documents == "rows":
        notes.append(f"{kind}: documents of one sequence are computed in rows of their own")
    return Architecture(
        model_type=kind,
        transformers=transformers.__version__,
        values=dict(values),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(layers),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_width=int(width),
        routed_layers=tuple(sorted(experts)),
        max_positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        tied_embeddings=is_tied,
        has_plain_head=_has_plain_head(model),
        layers=name,
        parameters=parameters,
        buffers={
            path: tuple(buffer.shape) for path, buffer in model.named_buffers() if path in saved
        },
        documents=documents,
        reads_between=reads_between,
        layer_output=layer_output,
        layer_items=_items(uses.results[0]),
        uncut=uncut,
        around="" if whole is None or source.is_own else place_in(whole, model),
        notes=tuple(notes),
        costs=count_costs(model, source.build(), name) if is_counted else {},
    )


def _stack_layouts(module: Any) -> dict[str, str]:
    """Values of :attr:`ParameterRecord.layout` of experts' weights, by name."""
    pair = "(p f)" if module.is_concatenated else "(f p)"
    up, width = ("gate_up_proj", pair) if module.has_gate else ("up_proj", "f")
    ours = "e p f h" if module.has_gate else "e f h"
    if module.is_transposed:
        return {up: f"{ours} -> e h {width}", "down_proj": "e h f -> e f h"}
    return {up: f"{ours} -> e {width} h", "down_proj": "e h f -> e h f"}


def _trace(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[_Uses, int]:
    """Run forward and backward on the meta device. Returns the phases of parameters, the results of
    layers, and the number of experts of a token; parameters that are used have a ``grad``."""
    uses, slots = _Uses(), set[int]()

    def exchange(module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        slots.add(experts_TK.shape[1])
        # The result depends on every weight, so that each gets a gradient.
        weights = sum((weight.sum() for weight in module.parameters()), weights_TK.sum())
        return x_TH * weights.to(x_TH.dtype)

    for module in model.modules():
        if is_experts(module):
            set_exchange(module, partial(exchange, module))
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Watched

    def enter(phase: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            uses.phase = phase

        return hook

    for layer in layers:
        layer.register_forward_hook(lambda _, __, result: uses.results.append(result))
    layers[0].register_forward_pre_hook(enter(1))
    layers[-1].register_forward_hook(enter(2))
    with unpacked_masks():
        ids = torch.zeros(1, _LENGTH, dtype=torch.int64, device="meta")
        with uses:
            loss = model(input_ids=ids, use_cache=False).logits.float().sum()
        loss.backward()
    return uses, max(slots, default=0)


class _FirstLayer(Exception):
    """Ends a forward after the first layer, with its result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _layer_output(
    model: PreTrainedModel, first: nn.Module, results: list[Any]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """A value of `Architecture.layer_output`; () if layers return different tensors, anything but
    tensors [1, length, ...], or tensors whose other sizes grow with the length. `results`: those of
    all layers; `first`: the first layer."""

    def leave(*inputs: Any) -> None:
        raise _FirstLayer(inputs[-1])

    kinds = {(_tensors(result, _LENGTH), _items(result)) for result in results}
    if len(kinds) > 1:
        return ()
    ((tensors, _),) = kinds
    length, longer = _LENGTH, tensors
    while any(length in sizes for _, sizes in longer):
        if (length := 2 * length) > _LONGEST:
            return ()
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        try:
            with first.register_forward_hook(leave), unpacked_masks(), torch.no_grad():
                model(input_ids=ids, use_cache=False)
        except _FirstLayer as left:
            longer = _tensors(left.result, length)
        if len(longer) != len(tensors):  # a tensor has the length in another place
            return ()
    both = zip(longer, tensors, strict=True)
    # -n is a size that is n at most, and smaller in shorter sequences.
    return tuple(
        (dtype, tuple(a if a == b else -a for a, b in zip(sizes, short, strict=True)))
        for (dtype, sizes), (_, short) in both
    )


def _tensors(result: Any, length: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtype and sizes after [B, S] of each tensor of a layer's `result`; () if it is not a tensor
    [1, length, ...], nor a tuple or list of them, which may end with None."""
    leaves = list(result) if isinstance(result, (tuple, list)) else [result]
    while leaves and leaves[-1] is None:
        leaves.pop()
    if not all(isinstance(leaf, Tensor) and leaf.shape[:2] == (1, length) for leaf in leaves):
        return ()
    return tuple((str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape[2:])) for leaf in leaves)


def _items(result: Any) -> int:
    """A value of `Architecture.layer_items`."""
    return len(result) if isinstance(result, (tuple, list)) else 0


def _against_stages(values: Mapping[str, Any]) -> str:
    """The reason why a small model cannot be cut between any two layers; "" where it can."""
    try:
        small = shrunken(values)
        record = read(small.config.to_dict(), documents="rows")
        config = hub_model(record).model_copy(update={"aux_loss_coefficient": 0.0})
        model = HubModel(config, dtype=torch.float64)
        initialize(model.net, seed=0)
        tokens = torch.randint(1, 100, (1, 17), generator=torch.Generator().manual_seed(0))
        batch = Batch(
            tokens_BS=tokens[:, :-1],
            targets_BS=tokens[:, 1:],
            sequences_B=torch.zeros(1, dtype=torch.int64),
        )
        cuts = range(1, config.num_layers)
        with torch.no_grad():
            whole_T = _losses(model, batch)
            sent = [model(batch, ModelPart(range(cut), True, False)).for_next for cut in cuts]
            # Later stages lack the parameters before the layers, but for a table that may be tied.
            embedding: Any = model.net.get_input_embeddings()
            tables = {*embedding.parameters()}
            for entry in record.parameters:
                parameter = model.net.get_parameter(entry.name)
                if entry.unit == "embedding" and parameter not in tables:
                    parameter.zero_()
            for cut, tensors in zip(cuts, sent, strict=True):
                last = ModelPart(range(cut, config.num_layers), False, True)
                if not torch.allclose(_losses(model, batch, last, *tensors), whole_T, 0, _SAME):
                    return f"its layers read more than the output of the layer before (cut {cut})"
    except Exception as error:
        return f"a small model of it fails in stages ({type(error).__name__}: {error})"
    return ""


def _losses(model: HubModel, batch: Batch, *inputs: Any) -> Tensor:
    """Losses [T] of the model; `inputs`: its last part, and the tensors that this part receives."""
    losses_T = model(batch, *inputs).losses_T
    assert losses_T is not None
    return losses_T


@torch.no_grad()
def _small_logits(model: PreTrainedModel, head: nn.Linear, hidden_BSH: Tensor) -> Tensor | None:
    """Logits by the code of `model` after its last layer with `head` in place of its own; None if
    that code does not run alone."""
    replaced: Any = model.get_output_embeddings()
    try:
        model.set_output_embeddings(head)
        return tail(model, hidden_BSH)
    except Exception:
        return None
    finally:
        if replaced is not None:
            model.set_output_embeddings(replaced)


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are exactly the last hidden states times the head's weight."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    small = nn.Linear(head.in_features, 8, bias=False)
    hidden = torch.randn(1, 3, head.in_features)
    logits = _small_logits(model, small, hidden)
    return logits is not None and torch.equal(logits, small(hidden))


def _differs(part: PreTrainedModel, whole: PreTrainedModel) -> bool:
    """Whether the code after the last layer of a text part gives other logits, such as scaled ones,
    than that of the model around it."""
    small = nn.Linear(part.config.hidden_size, 8, bias=False)
    hidden = torch.randn(1, 3, small.in_features)
    first, second = (_small_logits(model, small, hidden) for model in (part, whole))
    return first is not None and second is not None and not torch.equal(first, second)


@torch.no_grad()
def _reads_later(model: PreTrainedModel) -> bool:
    """Whether logits of a position depend on later tokens."""
    ids = torch.arange(1, 1 + sum(_DOCUMENTS))[None]
    with exactly(torch.float64):
        whole, part = (
            model(input_ids=tokens, use_cache=False).logits[:, : _DOCUMENTS[0]]
            for tokens in (ids, ids[:, : _DOCUMENTS[0]])
        )
    return bool((whole - part).abs().max() > _SAME)


@torch.no_grad()
def _documents(model: PreTrainedModel) -> str:
    """A value of `Architecture.documents`: the inputs with which attention does not cross the
    documents of a row."""
    ids = torch.randint(1, 100, (1, sum(_DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in _DOCUMENTS])[None]
    with exactly(torch.float64):
        alone = torch.cat(
            [model(input_ids=part, use_cache=False).logits for part in ids.split(_DOCUMENTS, 1)], 1
        )
        for way in ("positions", "masks"):
            with suppress(ValueError, TypeError, AttributeError):
                options: dict[str, Any] = {}
                if way == "masks":
                    options["attention_mask"] = masks(model, ids, positions, torch.float64)
                packed = model(
                    input_ids=ids, position_ids=positions, use_cache=False, **options
                ).logits
                if (packed - alone).abs().max() < _SAME:
                    return way
    return "rows"


def main() -> int:
    """See the module."""
    try:
        print(read(json.load(sys.stdin)).to_json())
    except ConfigError as error:
        print(json.dumps(asdict(error.problems[0])))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
