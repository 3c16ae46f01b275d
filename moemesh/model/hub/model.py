"""A language model of transformers' own code, in the place of our :class:`Transformer`.

Attention, routers, norms and shared experts are the family's code. Our code exchanges rows of
experts (:mod:`moemesh.model.hub.experts`), gathers weights and recomputes activations around the
forward of each decoder layer, computes the loss from the last hidden states, and the balance losses
from the logits that transformers records of its routers.

A pipeline stage runs the forward of the whole model with changed layers: the embedding returns
zeros, layers of earlier stages return the received stream, and the stage's last layer ends the
forward by an exception. Masks, positions, norm and head stay the model's.

Legend: B sequences, S positions, T = B S tokens, H hidden, E experts, K slots per token, L MoE
layers, V vocabulary; D documents of C positions at most, where every document has a row of its own;
Q scopes of auxiliary losses, X = 2 E + 1 sums of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from moemesh.config.lora import is_adapter
from moemesh.config.model import ModelConfig
from moemesh.model.balance_loss import auxiliary_loss, auxiliary_sums, joint_loss, no_sums
from moemesh.model.batch import Batch, Context, token_context
from moemesh.model.faults import NO_FAULT
from moemesh.model.hub.build import blueprint, set_mode
from moemesh.model.hub.experts import HubMoE, add_adapter, is_experts, unpack
from moemesh.model.hub.precision import exactly
from moemesh.model.router import Routing
from moemesh.model.seams import (
    NO_SLICES,
    PLAIN_FLOW,
    Flow,
    Memory,
    SliceState,
    Tokens,
    Vocabulary,
    WeightGate,
)
from moemesh.model.transformer import ModelPart, Output, Transformer, whole
from moemesh.model.visibility import document_starts
from moemesh.monitor.progress import at_layer
from moemesh.ops.cross_entropy import cross_entropy

#: Positions whose logits are made at once, where the family's own head makes them.
LOGIT_ROWS = 256


class Rows(NamedTuple):
    """The input of the modelling code. ``position_BS``: positions within documents (None: a row is
    one document); ``valid_BS``: False for padding; ``sequence_T``: the sequence of each token;
    ``place_T``: index among these tokens of each token of the microbatch (None: the same index)."""

    ids_BS: Tensor
    position_BS: Tensor | None
    valid_BS: Tensor | None
    sequence_T: Tensor
    place_T: Tensor | None = None


class _StageEnd(Exception):
    """The end of a forward after a stage's last layer: its tensors, and each router's logits."""

    def __init__(self, stream: list[Tensor], router_logits: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.stream, self.router_logits = stream, router_logits


class HubModel(Transformer):
    """A model of `config.architecture`; see the module. It holds what its `parts` read (None: the
    whole model), under the names of transformers; other parameters stay on the meta device."""

    def __init__(
        self,
        config: ModelConfig,
        parts: Sequence[ModelPart] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Module.__init__(self)
        assert config.architecture is not None
        self.config, self.architecture = config, config.architecture
        self.dtype = dtype
        net = blueprint(self.architecture.values).build(dtype)
        # No child of this module: names of parameters have no prefix.
        self.__dict__["net"] = net
        self.vocabulary, self.tokens = Vocabulary(), Tokens()
        self.memory, self.weights = Memory(), WeightGate()
        self.without_backward: Collection[str] = ()
        # Modules of our own model that the base class expects.
        self.embedding = self.norm = self.head = None
        self._moes: dict[int, HubMoE] = {}
        self._context: Context | None = None
        #: The part that runs now, and the tensors that it has received.
        self._part, self._received = whole(config), list[Tensor]()
        parts = [self._part] if parts is None else parts
        units = {unit for part in parts for unit in part.units(config)}
        records = self.architecture.parameters
        #: The parameters that are held, in the order of the record, and the unit of each.
        self._units = {record.name: record.unit for record in records if record.unit in units}
        self._add_adapters()
        embedding: Any = net.get_input_embeddings()
        embedding.forward = partial(self._embed, embedding.forward)
        before_layers = {
            record.name: net.get_parameter(record.name)
            for record in records
            if record.unit == "embedding"
        }
        tables_read = {*embedding.parameters()}
        #: Names of parameters, other than the token table, that the forward reads before the layers
        #: and that this rank does not hold.
        self._absent = [
            name
            for name, parameter in before_layers.items()
            if name not in self._units and parameter not in tables_read
        ]
        tables = {module.weight for module in net.modules() if isinstance(module, nn.Embedding)}
        #: Whether the backward of the modules before the layers reads their weights: that of tables
        #: does not.
        self._reads_embedding_twice = not tables.issuperset(before_layers.values())
        layers = net.get_submodule(self.architecture.layers)
        assert isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run_layer, index, layer.forward)
            for module in layer.modules():
                if is_experts(module) and f"layers.{index}" in units:
                    self._moes[index] = HubMoE(module, config.num_experts)
                    self._moes[index].experts.adapt(config.lora)

    def _add_adapters(self) -> None:
        """Make the adapter parameters on the meta device, and let linear layers add theirs."""
        lora = self.config.lora
        for record in self.architecture.parameters:
            module, _, leaf = record.name.rpartition(".")
            if record.name not in self._units:
                continue
            if is_adapter(leaf):
                dtype = torch.float32 if record.is_fp32 else self.dtype
                factor = torch.empty(record.shape, dtype=dtype, device="meta")
                self.net.get_submodule(module).register_parameter(leaf, nn.Parameter(factor))
            elif not record.is_expert:
                if lora.is_packed and record.parts:
                    unpack(self.net.get_submodule(module))
                owner = self.net.get_submodule(record.module)
                for part in record.adapted(lora):
                    add_adapter(self.net.get_submodule(module), owner, part.target, lora.scaling)

    @property
    def net(self) -> PreTrainedModel:
        """The model of transformers."""
        return self.__dict__["net"]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.net.named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters in the order of the record. If some experts of a layer train, the stacks of
        the others follow theirs."""
        named = dict(self.net.named_parameters(*args, **kwargs))
        for module, group in groupby(self._units, key=lambda name: name.rpartition(".")[0]):
            names = list(group)
            others = (f"{module}.rest.{name.rpartition('.')[2]}" for name in names)
            yield from ((name, named[name]) for name in (*names, *others) if name in named)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Persistent buffers of the modules that this rank holds."""
        layers = self.architecture.layers + "."

        def owner(name: str) -> str:
            """The decoder layer of a parameter or buffer; else its module."""
            is_layer = name.startswith(layers)
            return name.removeprefix(layers).split(".")[0] if is_layer else name.rpartition(".")[0]

        held = {owner(name) for name in self._units}
        for name, buffer in self.net.named_buffers(*args, **kwargs):
            if name in self.architecture.buffers and owner(name) in held:
                yield name, buffer

    def num_sequences(self, batch: Batch) -> int:
        return max(len(batch.tokens_BS), 1)  # one of padding where there is none

    def stream_specs(self, batch: Batch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        num_rows, length = self.rows_of(batch).ids_BS.shape
        specs: list[tuple[tuple[int, ...], torch.dtype]] = []
        for name, sizes in self.architecture.layer_output:
            shape = [size if size > 0 else min(-size, length) for size in sizes]
            dtype: torch.dtype = getattr(torch, name)
            dtype = torch.promote_types(dtype, self.dtype) if dtype.is_floating_point else dtype
            specs.append(((num_rows, length, *shape), dtype))
        return specs

    def get_submodule(self, target: str) -> nn.Module:
        return self.net.get_submodule(target)

    def moe_layers(self) -> dict[int, Any]:
        return self._moes

    def selection_biases(self) -> dict[int, tuple[str, Tensor]]:
        """State of a layer with one number for each expert that no gradient reaches."""
        idle = {record.name for record in self.architecture.parameters if record.is_idle}
        biases: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (*self.named_buffers(), *self.named_parameters()):
            path = name.removeprefix(self.architecture.layers + ".")
            layer = int(path.split(".")[0]) if path != name else -1
            is_state = name in idle or name in self.architecture.buffers
            if layer in self._moes and is_state and tensor.numel() == self.config.num_experts:
                biases[layer] = name, tensor.view(-1)
        return biases

    def unit_of(self, name: str) -> str:
        return self._units[name.replace(".experts.rest.", ".experts.")]

    def forward(
        self,
        batch: Batch,
        part: ModelPart | None = None,
        *received: Tensor,
        flow: Flow = PLAIN_FLOW,
    ) -> Output:
        config = self.config
        part = whole(config) if part is None else part
        rows = self.rows_of(batch)
        context = self._make_context(batch, rows, flow)
        if part.first:
            self.weights.fetch("embedding")
        losses_T, num_tensors = None, len(self.architecture.layer_output)
        # The tensors of the stream come first, then the sums of a loss of all layers, if any.
        sums_QX = received[num_tensors] if len(received) > num_tensors else None
        self._part, self._received = part, list(received[:num_tensors])
        try:
            with self._inside(context):
                stream, logits = self._hidden_states(rows, wants_logits=config.has_aux_loss)
                if part.last:
                    hidden_TH = stream[0].flatten(0, 1)
                    if rows.place_T is not None:
                        hidden_TH = hidden_TH[rows.place_T]
                    # Without tokens one row of padding remains: its empty loss keeps the graph.
                    losses_T = self._losses(hidden_TH[: max(batch.num_tokens, 1)], batch.targets_BS)
                    losses_T = self.weights.leave("head", losses_T)
                aux, sums_QX = self._auxiliary(logits, context, sums_QX, is_last=part.last)
        finally:
            self._part, self._received = whole(config), []
        layers = tuple(sorted(self._moes.keys() & {*part.layers}))
        counts_LE = context.token_ids_T.new_zeros(len(layers), config.num_experts)
        for place, layer in enumerate(layers):
            counts_LE[place] = self._moes[layer].counts_E
        zeros_L = counts_LE.new_zeros(len(layers))
        return Output(
            None if part.last else stream[0],
            losses_T,
            aux,
            counts_LE,
            zeros_L,
            torch.full_like(zeros_L, NO_FAULT),
            moe_layers=layers,
            sums=sums_QX,
            more=() if part.last else tuple(stream[1:]),
        )

    def rows_of(self, batch: Batch) -> Rows:
        """The inputs of the modelling code. A microbatch without a sequence gets one of padding, so
        that this rank takes part in every exchange."""
        ids_BS, valid_BS = batch.tokens_BS, batch.valid_BS
        if not ids_BS.numel():
            ids_BS = ids_BS.new_zeros(1, max(ids_BS.shape[1], 1))
            valid_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
        num_rows, length = ids_BS.shape
        sequence_T = torch.arange(num_rows, device=ids_BS.device).repeat_interleave(length)
        if batch.documents_BS is None or not batch.num_tokens:
            return Rows(ids_BS, None, valid_BS, sequence_T)
        starts_BS = document_starts(batch.documents_BS)
        place_S = torch.arange(length, device=ids_BS.device)
        position_BS = place_S - starts_BS
        if self.architecture.documents != "rows":
            return Rows(ids_BS, position_BS, valid_BS, sequence_T)
        # Every document in a row of its own, filled up on the right.
        row_T = (position_BS.flatten() == 0).cumsum(0) - 1
        width = int(position_BS.max()) + 1
        place_T = row_T * width + position_BS.flatten()
        num_places = (int(row_T[-1]) + 1) * width
        ids_DC = ids_BS.new_zeros(num_places).scatter_(0, place_T, ids_BS.flatten())
        valid_T = torch.ones_like(place_T, dtype=torch.bool)
        if valid_BS is not None:
            valid_T = valid_BS.flatten()
        valid_DC = valid_T.new_zeros(num_places).scatter_(0, place_T, valid_T)
        sequence = sequence_T.new_zeros(num_places).scatter_(0, place_T, sequence_T)
        return Rows(ids_DC.view(-1, width), None, valid_DC.view(-1, width), sequence, place_T)

    def logits(self, batch: Batch) -> Tensor:
        with exactly(self.dtype):
            return tail(self.net, self.stream(batch)).flatten(0, 1)

    def stream(self, batch: Batch) -> Tensor:
        """The hidden states after the last norm [B, S, H]. A sequence that comes in slices must be
        one document: the modelling code keeps its earlier positions in a cache."""
        rows = self.rows_of(batch)
        with self._inside(self._make_context(batch, rows, PLAIN_FLOW)):
            return self._hidden_states(rows, wants_logits=False, slices=batch.slices)[0][0]

    def _make_context(self, batch: Batch, rows: Rows, flow: Flow) -> Context:
        for moe in self._moes.values():
            moe.counts_E = None
        valid_T = None if rows.valid_BS is None else rows.valid_BS.flatten()
        context = token_context(rows.ids_BS, *rows.ids_BS.shape, valid_T=valid_T)
        return replace(
            context,
            num_sequences=self.num_sequences(batch),
            sequence_T=rows.sequence_T,
            training=batch.training,
            flow=flow,
        )

    @contextmanager
    def _inside(self, context: Context) -> Iterator[None]:
        """Context manager of a forward, or of the recomputation of a layer: inside, experts read
        `context`."""
        if self.net.training != context.training:
            set_mode(self.net, training=context.training)
        before = self._context
        mode: AbstractContextManager[Any] = nullcontext() if before else exactly(self.dtype)
        self._set_context(context)
        try:
            with mode:
                yield
        finally:
            self._set_context(before)

    def _set_context(self, context: Context | None) -> None:
        self._context = context
        for moe in self._moes.values():
            moe.context = context

    def _hidden_states(
        self, rows: Rows, *, wants_logits: bool, slices: SliceState = NO_SLICES
    ) -> tuple[list[Tensor], tuple[Tensor, ...] | None]:
        """The stream after the last norm, or the tensors of the stage's last layer, and the logits
        of each router."""
        base, has_slices = self.net.base_model, slices is not NO_SLICES
        options: dict[str, Any] = {"use_cache": has_slices}
        if wants_logits:
            options["output_router_logits"] = True
        if rows.position_BS is not None:
            position_BS = options["position_ids"] = rows.position_BS
            if self.architecture.documents == "masks":
                options["attention_mask"] = masks(self.net, rows.ids_BS, position_BS, self.dtype)
        # Later versions of transformers call the cache's argument `cache`.
        names = signature(base.forward).parameters
        cache = "cache" if "cache" in names else "past_key_values"
        if has_slices:
            options[cache] = slices.foreign
        try:
            output = base(input_ids=rows.ids_BS, **options)
        except _StageEnd as end:
            return end.stream, end.router_logits
        if has_slices:
            slices.foreign = output[cache]
        return [output.last_hidden_state], getattr(output, "router_logits", None)

    def _embed(self, inner: Callable[..., Tensor], ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The forward of the embedding; zeros where its result is not read."""
        if self._part.first:
            return inner(ids, *args, **kwargs)
        for name in self._absent:  # the results of these are not read either
            path, _, leaf = name.rpartition(".")
            module, shape = self.net.get_submodule(path), self.net.get_parameter(name).shape
            zeros = torch.zeros((), dtype=self.dtype, device=ids.device).expand(shape)
            module._parameters[leaf] = nn.Parameter(zeros, requires_grad=False)
        self._absent.clear()
        # Some models project a narrower embedding to the hidden size.
        table: Any = self.net.get_input_embeddings()
        width = getattr(table, "embedding_dim", self.config.hidden_size)
        return torch.zeros(*ids.shape, width, dtype=self.dtype, device=ids.device)

    def _run_layer(self, index: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward `inner` of one decoder layer, with its weights gathered; recomputed in the
        backward under `plan.recompute`."""
        part, unit, weights = self._part, f"layers.{index}", self.weights
        if self._context is None:  # outside of a run
            return inner(*args, **kwargs)
        if index < part.layers.start:
            if not (count := self.architecture.layer_items):
                return self._received[0]
            return (*self._received, *[None] * (count - len(self._received)))
        at_layer(index)
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        leaves = together(leaves)
        first = _first(leaves)
        x = leaves[first]
        if index == 0:  # in the first part: later parts have returned above
            x = weights.leave("embedding", x, read_in_backward=self._reads_embedding_twice)
        x = weights.enter(unit, self.begin_graph(unit, x))

        def run(x: Tensor, context: Context) -> Any:
            leaves[first] = x
            args, kwargs = _pytree.tree_unflatten(leaves, spec)
            with self._inside(context):
                return inner(*args, **kwargs)

        output = self.memory.run(run, x, self._context)
        results, form = _pytree.tree_flatten(output)
        results = together(results)
        first = _first(results)
        results[first] = weights.leave(unit, results[first])
        if index + 1 == part.layers.stop and not part.last:
            from transformers.utils.output_capturing import _active_collector

            # The routers' logits that transformers has recorded so far in this forward.
            logits = (_active_collector.get() or {}).get("router_logits", ())
            tensors = [result for result in results if result is not None]
            raise _StageEnd(tensors, tuple(logits))
        if index == self.architecture.num_layers - 1:
            results[first] = weights.enter("head", self.begin_graph("head", results[first]))
        return _pytree.tree_unflatten(results, form)

    def _losses(self, hidden_TH: Tensor, targets_BS: Tensor) -> Tensor:
        """Negative log-likelihood of all targets, float32 or float64 [T]."""
        targets_T = targets_BS.flatten()
        if not len(targets_T):  # padding alone: an empty loss that keeps the graph
            return hidden_TH.sum(1).to(torch.promote_types(hidden_TH.dtype, torch.float32))[:0]
        if self.architecture.has_plain_head:
            head: Any = self.net.get_output_embeddings()
            return cross_entropy(hidden_TH, head.weight, targets_T)

        def losses(x_TH: Tensor, targets_T: Tensor) -> Tensor:
            with exactly(self.dtype):
                logits_TV = tail(self.net, x_TH[None])[0]
                wide = torch.promote_types(logits_TV.dtype, torch.float32)
                return F.cross_entropy(logits_TV.to(wide), targets_T, reduction="none")

        parts = zip(hidden_TH.split(LOGIT_ROWS), targets_T.split(LOGIT_ROWS), strict=True)
        return torch.cat([checkpoint(losses, *part, use_reentrant=False) for part in parts])

    def _auxiliary(
        self,
        logits: tuple[Tensor, ...] | None,
        context: Context,
        sums_QX: Tensor | None,
        *,
        is_last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Balance loss and z-loss of the routers (:mod:`moemesh.model.balance_loss`), from their
        logits and the plain top-k of these. If one loss is for all layers, parts before the last
        return zero and the sums for it, which include `sums_QX`, those of earlier parts."""
        config = self.config
        wide = torch.promote_types(self.dtype, torch.float32)
        zero = torch.zeros((), dtype=wide, device=context.position_T.device)
        if not config.has_aux_loss:
            return zero, None
        routings: list[Routing] = []
        for logits_TE in logits or ():
            logits_TE = logits_TE.flatten(0, -2)[:, : config.num_experts]
            logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
            scores_TE = logits_TE.softmax(1)
            chosen_TK = scores_TE.topk(config.experts_per_token, dim=1).indices
            if (valid_T := context.valid_T) is not None:
                scores_TE = scores_TE.masked_fill(~valid_T[:, None], 0.0)
                chosen_TK = chosen_TK.masked_fill(~valid_T[:, None], -1)
            fault = torch.full((), NO_FAULT, device=logits_TE.device)
            routings.append(
                Routing(scores_TE, chosen_TK, scores_TE, logits_TE, chosen_TK, None, fault)
            )
        if not config.has_joint_aux_loss:
            losses = (auxiliary_loss(layer, config, context, self.tokens) for layer in routings)
            return sum(losses, zero), None
        sums = [auxiliary_sums(layer, config, context) for layer in routings]
        sums_QX = sum(sums, no_sums(config, context) if sums_QX is None else sums_QX)
        if not is_last:
            return zero, sums_QX
        return joint_loss(sums_QX, config, context, self.tokens), None


def _first(leaves: Sequence[Any]) -> int:
    """The place of the residual stream among arguments or results: the first floating tensor."""
    return next(
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def together(leaves: list[Any]) -> list[Any]:
    """`leaves`, whose differentiable tensors pass through one node of autograd: the backward before
    it starts when all of them have their gradients."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if len(places) > 1:
        joined = _Together.apply(*(leaves[place] for place in places))
        leaves = list(leaves)
        for place, tensor in zip(places, joined, strict=True):
            leaves[place] = tensor
    return leaves


class _Hidden:
    """Output of a base model with given hidden states; all other outputs are None."""

    def __init__(self, hidden_BSH: Tensor) -> None:
        self.last_hidden_state = hidden_BSH

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """A base model that returns given hidden states; other attributes are those of `base`. The code
    around it may call a model inside of it instead (OPT: ``model.decoder``), so these are stubs,
    too."""

    def __init__(self, base: nn.Module, hidden_BSH: Tensor) -> None:
        super().__init__()
        self.__dict__["base"], self.__dict__["hidden"] = base, hidden_BSH

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["base"], name)
        return _Stub(value, self.hidden) if isinstance(value, PreTrainedModel) else value

    def forward(self, *args: Any, **kwargs: Any) -> _Hidden:
        return _Hidden(self.__dict__["hidden"])


def tail(net: PreTrainedModel, hidden_BSH: Tensor) -> Tensor:
    """Logits of hidden states [B, S, H] by the family's own code after the base model: its head,
    with scaling and capping."""
    ids = torch.zeros(hidden_BSH.shape[:2], dtype=torch.int64, device=hidden_BSH.device)
    base = net._modules[net.base_model_prefix]
    assert base is not None
    net._modules[net.base_model_prefix] = _Stub(base, hidden_BSH)
    try:
        return net(input_ids=ids, use_cache=False).logits
    finally:
        net._modules[net.base_model_prefix] = base


def masks(
    net: PreTrainedModel, ids_BS: Tensor, position_BS: Tensor, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """The mask of each kind of attention layer, for families whose masks ignore positions."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = net.config.get_text_config()
    like = torch.empty(*ids_BS.shape, 1, dtype=dtype, device=ids_BS.device)
    given: dict[str, Any] = {
        "config": config, "inputs_embeds": like, "attention_mask": None, "cache": None,
        "position_ids": position_BS,
    }  # fmt: skip
    by_kind = {"full_attention": create_causal_mask(**given)}
    if getattr(config, "sliding_window", None):
        by_kind["sliding_attention"] = create_sliding_window_causal_mask(**given)
    return by_kind
