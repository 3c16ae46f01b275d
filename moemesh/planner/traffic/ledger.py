"""The predicted ledger of a training step: what our own library enters, per rank, to the byte.

It follows the same contracts as the code that communicates (tables in `parallel/tensor/boundary`,
`tensor/vocabulary`, `expert/*`, `data`): every collective with axis, phase, count and bytes. Only
what depends on the routing needs an input: the choices of a run make the ledger exact, without them
uniform routing gives expected bytes, rounded once per line.

Per microbatch of T tokens, N = tp, w bytes an element (closed forms, bytes one rank sends):

| what | forward | backward |
|---|---|---|
| embedding | reduce-scatter (N-1)/N T h w | all-gather |
| enter of attention and of every MLP | all-gather (N-1)/N T h w | reduce-scatter |
| exit reduce_scatter | reduce-scatter (N-1)/N T h w | all-gather |
| exit all_reduce | all-reduce 2 (N-1)/N T h w | all-gather |
| exit all_to_all | all-to-all (N-1)/N^2 T a d w | all-to-all |
| head | all-gather (N-1)/N T h w; 3 numbers a token | reduce-scatter |
| experts | see `dispatch_traffic` | |
| pipeline | T/N h w to the next stage | T/N h w to the one before |
"""

from __future__ import annotations

from functools import cache

from moemesh.config.layout import shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.dispatch_traffic import DispatchTraffic, row_bytes
from moemesh.planner.traffic.ledger_lines import LedgerLines
from moemesh.planner.traffic.routing import Routing, Sent, uniform_routing
from moemesh.planner.traffic.tensors import StagePlacement, gradient_buckets
from moemesh.schedule.messages import messages
from moemesh.trace.ledger import Ledger

_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}
_INT64, _FLOAT64 = 8, 8


def predict_ledger(
    model: ModelConfig,
    plan: Plan,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str = "bfloat16",
    rank: int = 0,
    routing: Routing | None = None,
) -> Ledger:
    """The ledger of `rank` after one training step (no evaluation, no checkpoint).

    `routing` None: uniform. Raises ValueError when the plan's schedule cannot be made, cuts
    sequences or has no step. Context parallelism, ZeRO and recomputation are not in it: see
    `volumes`.
    """
    step = _Step(model, plan, seq_len, global_batch, dtype, rank, routing)
    if step.schedule.num_slices > 1 or step.schedule.update is not None:
        raise ValueError(f"the ledger of {plan.schedule} is not predicted: see volumes")
    return step.ledger()


class _Step:
    """The lines of one rank."""

    def __init__(
        self,
        model: ModelConfig,
        plan: Plan,
        seq_len: int,
        global_batch: int,
        dtype: str,
        rank: int,
        routing: Routing | None,
    ) -> None:
        self.model, self.plan, self.seq_len, self.batch = model, plan, seq_len, global_batch
        self.layout = plan.layout
        self.lines = LedgerLines(self.layout, rank)
        self.element = _ELEMENT[dtype]
        self.wide = max(self.element, 4)
        self.is_uniform = routing is None
        self.routing = routing or uniform_routing(model, self.layout)
        self.placement = StagePlacement(model, plan)
        self.schedule = self.placement.schedule
        self.max_tokens = plan.tokens_per_rank(seq_len, global_batch)

    def sequences(self, dp: int, microbatch: int) -> int:
        """Sequences of one microbatch of one data-parallel rank."""
        own = len(shard_range(self.batch, self.plan.dp, dp))
        return len(shard_range(own, self.plan.microbatches, microbatch))

    def local_tokens(self, rank: int, microbatch: int) -> int:
        """Rows of the residual stream of `rank` in one microbatch."""
        at = self.layout.coordinates(rank)
        tokens = self.sequences(at["dp"], microbatch) * self.seq_len
        return shard_sizes(tokens, self.plan.tp)[at["tp"]]

    def ledger(self) -> Ledger:
        at = self.lines.here["pp"]
        for pipe, stage in self.schedule.stages_of(at):
            first = self.schedule.first_sample[pipe]
            for index in range(self.schedule.num_microbatches[pipe]):
                self._stage(stage, first + index)
        self._messages(at)
        self._counts()
        self._sums(at)
        return self.lines.ledger()

    # One microbatch on one stage.

    def _stage(self, stage: int, microbatch: int) -> None:
        here = self.lines.here["dp"]
        tokens = self.sequences(here, microbatch) * self.seq_len
        if stage == 0:
            self._scatter(tokens, "embedding")
        layers = self.placement.layers[stage]
        num_moe = sum(self.model.is_moe_layer(index) for index in layers)
        self._attention(tokens, len(layers))
        shared = num_moe if self.model.shared_width else 0
        if mlps := len(layers) - num_moe + shared:
            self._gather(tokens, "mlp.enter", mlps)
            self._scatter(tokens, "mlp.leave", mlps)
        if num_moe:
            self._balance(here, microbatch, num_moe)
            routed = [index for index in layers if self.model.is_moe_layer(index)]
            for layer in routed[:1] if self.is_uniform else routed:
                self._experts(microbatch, layer, num_moe if self.is_uniform else 1)
        if stage == self.schedule.num_stages - 1:
            self._gather(tokens, "head.enter")
            for numbers in (tokens, 2 * tokens):
                self.lines.all_reduce("tp", numbers, self.wide, "forward", "head.loss")

    def _blocks(self, tokens: int) -> list[float]:
        width = self.model.hidden_size * self.element
        return [float(rows * width) for rows in shard_sizes(tokens, self.plan.tp)]

    def _gather(self, tokens: int, caller: str, times: int = 1) -> None:
        blocks = self._blocks(tokens)
        self.lines.all_gather("tp", blocks, "forward", caller, times)
        self.lines.reduce_scatter("tp", blocks, "backward", caller, times)

    def _scatter(self, tokens: int, caller: str, times: int = 1) -> None:
        blocks = self._blocks(tokens)
        self.lines.reduce_scatter("tp", blocks, "forward", caller, times)
        self.lines.all_gather("tp", blocks, "backward", caller, times)

    def _attention(self, tokens: int, times: int) -> None:
        caller, lines, model = "attention.leave", self.lines, self.model
        self._gather(tokens, "attention.enter", times)
        match self.plan.attention_exit:
            case "reduce_scatter":
                self._scatter(tokens, caller, times)
            case "all_reduce":
                numbers = tokens * model.hidden_size
                lines.all_reduce("tp", numbers, self.element, "forward", caller, times)
                lines.all_gather("tp", self._blocks(tokens), "backward", caller, times)
            case "all_to_all":
                sizes = shard_sizes(tokens, self.plan.tp)
                heads = model.num_heads // self.plan.tp
                width = heads * model.head_dim * self.element
                out = [float(rows * width) for rows in sizes]
                into = [float(sizes[lines.here["tp"]] * width)] * self.plan.tp
                lines.all_to_all("tp", out, into, "forward", caller, times)
                lines.all_to_all("tp", into, out, "backward", caller, times)

    def _balance(self, dp: int, microbatch: int, times: int) -> None:
        """Counts of the auxiliary losses, and whole sequences for choices that compare tokens."""
        model, lines = self.model, self.lines
        sequences = self.sequences(dp, microbatch)
        if model.aux_loss_coefficient or model.z_loss_coefficient:
            scope = model.aux_loss_scope
            scopes = sequences if scope == "sequence" else 1
            axis = "stage" if scope == "global" else "tp"
            numbers = scopes * model.num_experts
            lines.all_reduce(axis, numbers, _INT64, "forward", "moe.balance", times)
        for width in self._compared():
            sizes = shard_sizes(sequences * self.seq_len, self.plan.tp)
            blocks = [float(rows * width) for rows in sizes]
            lines.all_gather("tp", blocks, "forward", "moe.choose", times)
        if model.router_selection == "expert_choice":
            lines.all_reduce("stage", 1, _INT64, "forward", "moe.choose", times)

    def _compared(self) -> list[int]:
        """Bytes a token of every gather of whole sequences: ids, scores, choices."""
        model, wide = self.model, self.wide
        found: list[int] = []
        if model.router_selection != "token_choice":
            found += [_INT64, model.num_experts * wide]
        if model.capacity_factor and model.router_selection != "expert_choice":
            found.append(_INT64)
            if model.capacity_policy == "probability":
                found.append(model.experts_per_token * wide)
            found.append(model.experts_per_token * _INT64)
        return found

    def _experts(self, microbatch: int, layer: int, times: int) -> None:
        plan = self.plan
        chunks = 1 if plan.combine == "exact" else plan.dispatch_chunks
        rows = row_bytes(self.model, plan, self.element, self.wide)
        for chunk in range(chunks):

            @cache
            def sent_by(rank: int, chunk: int = chunk) -> Sent:
                tokens = self.local_tokens(rank, microbatch)
                return self.routing(rank, microbatch, layer, tokens, chunk, chunks)

            DispatchTraffic(
                self.lines, self.model, plan, rows, self.max_tokens, sent_by, times
            ).enter()

    # Once a step.

    def _messages(self, at: int) -> None:
        """Between pipeline stages: the residual stream's own rows, and their gradients."""
        width = self.model.hidden_size * self.element
        for message in messages(self.schedule).values():
            if at not in (message.source, message.destination):
                continue
            sample = self.schedule.sample(message.producer)
            size = self.local_tokens(self.lines.rank, sample) * width
            phase = "forward" if message.producer.kind == "F" else "backward"
            self.lines.message("pp", size, phase, "pipeline", sends=at == message.source)

    def _counts(self) -> None:
        scopes = self.plan.microbatches if self.model.aux_loss_scope == "global" else 1
        self.lines.all_reduce("dp_cp", 1 + scopes, _INT64, "forward", "step.counts")

    def _sums(self, at: int) -> None:
        lines, model = self.lines, self.model
        for bucket in gradient_buckets(self.placement, self.layout, lines.rank, self.wide):
            axes = (bucket.axis, "mirror") if bucket.mirrored else (bucket.axis,)
            for axis in axes:
                lines.all_reduce(axis, bucket.num_elements, self.wide, "backward", "gradients")
        loads = model.num_moe_layers * model.num_experts
        for axis in ("stage", "pp"):
            lines.all_reduce(axis, 2, _FLOAT64, "optimizer", "step.losses")
            if loads:
                lines.all_reduce(axis, loads, _INT64, "optimizer", "step.loads")
            if model.capacity_factor:
                layers = model.num_moe_layers
                lines.all_reduce(axis, layers, _INT64, "optimizer", "step.dropped")
        squares = sum(
            tensor.shape[0] if tensor.is_expert else 1 for tensor in self.placement.every_tensor()
        )
        lines.all_reduce("world", squares, _FLOAT64, "optimizer", "gradient_norm")
