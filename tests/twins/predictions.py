"""Measured steps beside what the planner predicts: the ledger and the memory of every rank.

Predicted ledger = measured ledger and predicted weights, gradients, optimizer states and buffers =
measured, to the byte; activations within 2 %. What depends on the routing is predicted from the
choices that the run's routers made; everything else from model, plan and batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from moemesh.config.layout import Layout, shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.train import TrainConfig
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.router import Router
from moemesh.model.router import Routing as RouterChoice
from moemesh.planner.traffic.dispatch_traffic import Choices, Routing, SentRows, count_choices
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.own_memory import predict_memory
from moemesh.schedule.terapipe import slice_lengths
from moemesh.sharding.context import context_runs
from moemesh.trace.memory_profile import LOGITS


@contextlib.contextmanager
def recorded_choices() -> Iterator[dict[tuple[int, int], list[int]]]:
    """(layer, global id of a token) -> its expert ids, of the tokens of this rank's stream."""
    choices: dict[tuple[int, int], list[int]] = {}
    original = Router.forward

    def recorded(self: Router, x_TH: Tensor, context: Any, tokens: Any) -> RouterChoice:
        routing = original(self, x_TH, context, tokens)
        ids, layer = context.token_ids_T.tolist(), self.layer
        for token, experts in zip(ids, routing.experts_TK.tolist(), strict=True):
            # A recomputed forward makes the same choices.
            assert choices.setdefault((layer, token), experts) == experts
        return routing

    Router.forward = recorded
    try:
        yield choices
    finally:
        Router.forward = original


def choices_of(
    model: ModelConfig, plan: Plan, ranks: list[dict[str, Any]], batch: int, seq_len: int
) -> dict[tuple[int, int, int], list[list[int]]]:
    """(rank, forward of the step, layer) -> expert ids of each token, in the order of the stream.

    Forwards are numbered by microbatch and, inside it, by slice.
    """
    lengths = slice_lengths(model, plan, seq_len) if plan.num_slices > 1 else (seq_len,)
    choices: dict[tuple[int, int, int], list[list[int]]] = {}
    for rank, measured in enumerate(ranks):
        at, chosen = plan.layout.coordinates(rank), measured["choices"]
        own = shard_range(batch, plan.dp, at["dp"])
        for number in range(plan.microbatches * len(lengths)):
            microbatch, slice = divmod(number, len(lengths))
            part = shard_range(len(own), plan.microbatches, microbatch)
            start = sum(lengths[:slice])
            runs = (range(start, start + lengths[slice]),)
            if plan.cp > 1:
                runs = context_runs(seq_len, plan.cp, at["cp"])
            tokens = [
                (own.start + sequence) * seq_len + position
                for sequence in part
                for run in runs
                for position in run
            ]
            shard = shard_range(len(tokens), plan.tp, at["tp"])
            local = tokens[shard.start : shard.stop]
            for layer in model.routed_layers:
                if all((layer, token) in chosen for token in local):
                    choices[rank, number, layer] = [chosen[layer, token] for token in local]
    return choices


def chosen_routing(
    model: ModelConfig, layout: Layout, choices: Mapping[tuple[int, int, int], Choices]
) -> Routing:
    """The counts of a run: `choices` by (rank, forward of the step, layer)."""

    def sent(rank: int, forward: int, layer: int, tokens: int, chunk: int, chunks: int) -> SentRows:
        choice = choices[rank, forward, layer]
        if len(choice) != tokens:
            raise ValueError(
                f"rank {rank}, forward {forward}: {len(choice)} tokens chose, not {tokens}"
            )
        slots = len(choice[0]) if choice else model.experts_per_token
        part = shard_range(tokens, chunks, chunk)
        chosen = choice[part.start : part.stop]
        return count_choices(chosen, model.num_experts, layout, slots=slots)

    return sent


def assert_predicted(
    config: ModelConfig,
    plan: Plan,
    ranks: list[dict[str, Any]],
    train: TrainConfig,
    *,
    batch: int,
    seq_len: int,
    activations: bool,
    tuning: Tuning = FULL,
) -> None:
    """`ranks`: what each of them measured in one step: "ledger", "choices", "memory"."""
    choices = choices_of(config, plan, ranks, batch, seq_len)
    for rank, found in enumerate(ranks):
        settings: dict[str, Any] = {
            "seq_len": seq_len,
            "global_batch": batch,
            "dtype": train.dtype,
            "rank": rank,
            "routing": chosen_routing(config, plan.layout, choices),
            "tuning": tuning,
        }
        whole = train.updates_matrices
        predicted = predict_ledger(config, plan, **settings, whole_matrices=whole)
        assert predicted.rows() == found["ledger"].rows(), f"rank {rank} (left: predicted)"
        memory = predict_memory(config, plan, **settings, num_states=train.num_states).to_json()
        parts = found["memory"].keys() - {"activations", "kinds"}
        for part in parts:
            # Gradients of one operation with adapters come in an order that autograd chooses.
            has_adapters = part == "buffers" and config.lora.rank > 0
            near = has_adapters * 0.05 * sum(found["memory"][one] for one in parts)
            measured = found["memory"][part]
            said = f"rank {rank}: {part}: {memory[part]} predicted, {measured} measured"
            assert abs(memory[part] - measured) <= near, said
        if activations and not tuning.is_full:
            # What only the gradients of weights that do not train would read is not kept.
            kept = found["memory"]["activations"]
            most = 1.02 * memory["activations"] + 1024
            assert kept <= most, f"rank {rank}: activations"
        elif activations:
            kinds = memory["activation_kinds"], found["memory"]["kinds"]
            assert kinds[0].get(LOGITS, 0) == kinds[1].get(LOGITS, 0), f"rank {rank}: logits"
            error = memory["activations"] / found["memory"]["activations"] - 1
            assert abs(error) <= 0.02, f"rank {rank}: activations {error:+.1%}"
