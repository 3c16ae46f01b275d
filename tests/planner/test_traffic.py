"""Traffic in closed form: single formulas, the exact ledger, and the mistakes about bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moemesh.config.dispatcher_table import DISPATCHERS, DispatcherRow, HopRows
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.layout_sources import from_plan
from moemesh.planner.parameters import count_parameters
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.load_shape import load_model
from moemesh.planner.shapes.shape import from_model_config
from moemesh.planner.traffic.ledger import predict_ledger
from moemesh.planner.traffic.volumes import step_volumes, volumes_ledger

# Single formulas. Bytes one rank sends.

SHAPE = load_model("mixtral-8x7b").shape
BATCH: dict[str, Any] = {"seq_len": 512, "global_batch": 32}
STREAM = 512 * 4096 * 2


def test_tensor_parallelism() -> None:
    """4 all-reduces of 2(t-1)/t u h w a dense layer and microbatch, 6 recomputed."""
    shape = load_model("llama3-8b").shape

    def blocks(**keys: Any) -> dict[tuple[str, float], float]:
        layout = PlannedLayout(tp=4, **(BATCH | keys))
        total: Counter[tuple[str, float]] = Counter()
        for item in step_volumes(shape, layout, 0):
            if item.caller.split(".")[0] in ("attention", "mlp"):
                total[item.op, item.wire_bytes] += item.events
        return dict(total)

    once, layers = STREAM * 3 / 4, 32 * 32
    full = frozenset({"full"})
    assert blocks(sequence_parallel=False) == {("all_reduce", 2 * once): 4 * layers}
    assert blocks(sequence_parallel=False, recompute=full) == {("all_reduce", 2 * once): 6 * layers}
    both = {("all_gather", once): 4 * layers, ("reduce_scatter", once): 4 * layers}
    assert blocks() == both
    assert sum(blocks(recompute=full).values()) == 12 * layers
    assert sum(blocks(rebuild="input").values()) == 10 * layers


def test_data_parallelism() -> None:
    shape = load_model("llama3-8b").shape
    psi = 8_030_261_248

    def sent(**keys: Any) -> float:
        layout = PlannedLayout(dp=8, **(BATCH | keys))
        volumes = step_volumes(shape, layout, 0)
        return sum(
            item.events * item.wire_bytes for item in volumes if item.axis.startswith("dp_cp")
        )

    assert sent() == 2 * 7 / 8 * 4 * psi
    assert sent(zero=1) == 7 / 8 * (4 + 2) * psi
    assert sent(zero=2) == 7 / 8 * (4 * 4 + 2) * psi
    assert sent(zero=3, reshard="step") == 7 / 8 * (2 + 4 * 4) * psi
    assert sent(zero=3) == 7 / 8 * (2 + 2 + 4) * psi * 4
    grouped = 3 / 4 * (4 + 2) * psi + 2 * (2 - 1) / 2 * 4 * psi / 4
    assert sent(zero=1, zero_group=4) == grouped


def test_tied_embedding_is_summed_between_the_ends() -> None:
    shape = load_model("gpt-22b").shape
    layout = PlannedLayout(pp=4, tp=2, **BATCH)
    ends = [
        sum(
            i.events * i.wire_bytes
            for i in step_volumes(shape, layout, rank)
            if i.caller.startswith("tied")
        )
        for rank in range(4)
    ]
    assert ends == [4 * 51200 * 6144 / 2, 0, 0, 4 * 51200 * 6144 / 2]


# The closed forms and the exact ledger of our own library agree wherever both exist.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "keys",
    [
        {"tp": 2, "ep": 2},
        {"tp": 4, "attention_exit": "all_reduce"},
        {"tp": 4, "attention_exit": "all_to_all"},
        {"dp": 4, "ep": 4, "microbatches": 2},
        {"dp": 4, "tp": 2, "ep": 8, "payload": "fp8"},
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
        {"dp": 4, "ep": 4, "dispatcher": "hierarchical", "ranks_per_node": 2},
        {"pp": 2, "tp": 2, "microbatches": 4},
        {"pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
        {"cp": 4},
        {"cp": 2, "context": "all_gather", "recompute": "full"},
        {"cp": 2, "recompute": "selective", "microbatches": 2},
        {"cp": 8, "context": "all_to_all"},
        {"cp": 4, "pp": 2, "context": "all_to_all", "recompute": "selective", "microbatches": 2},
    ],
)
def test_closed_forms_and_exact_ledger(keys: dict[str, Any], dtype: str) -> None:
    config, plan = ModelConfig(num_layers=4), Plan(**keys)
    batch: dict[str, Any] = {"seq_len": 64, "global_batch": 8}
    names: set[str] = set()
    exact = predict_ledger(config, plan, dtype=dtype, **batch)
    layout = from_plan(plan, config, dtype=dtype, **batch)
    closed = volumes_ledger(from_model_config(config), layout, 0)
    for entry in closed.entries():
        if entry.caller in ("gradients", "head", "embedding", "head.loss"):
            continue
        row = {"axis": entry.axis, "op": entry.op, "phase": entry.phase, "caller": entry.caller}
        assert exact.total(**row).wire_bytes == pytest.approx(entry.wire_bytes, rel=1e-3), row
        names.add(entry.caller)
    assert {e.caller for e in exact.entries() if e.axis == "cp"} <= names


def test_a_dispatcher_may_send_a_token_once_to_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits over ep instead of over nodes: `DISPATCHERS` decides, no code names a dispatcher."""
    hops = HopRows("ep", "visits"), HopRows("etp", "visits", True)
    row = DispatcherRow(make="none", hops=hops, copied=lambda n: n.distinct * n.tokens)
    monkeypatch.setitem(DISPATCHERS, "once", row)
    model, plan = ModelConfig(num_layers=2), Plan(dp=2, ep=2, dispatcher="once")
    ledger = predict_ledger(model, plan, dtype="float32", seq_len=64, global_batch=8)
    # 4 * 64 tokens of 2 of 8 experts: 1 - C(4, 2) / C(8, 2) of them visit the other rank.
    visits = 256 * (1 - 6 / 28)
    key = {"axis": "ep", "op": "all_to_all", "phase": "forward"}
    rows = ledger.total(**key, caller="moe.dispatch").wire_bytes
    assert rows == pytest.approx(visits * model.hidden_size * 4, abs=1)
    # Tokens and pairs in int64; two experts and the owner of each row in int32.
    counts = ledger.total(**key, caller="moe.counts").wire_bytes
    assert counts == pytest.approx(2 * 8 + visits * 3 * 4, abs=1)


class TestMistakes:
    @pytest.mark.parametrize("servers", [1, 2, 7])
    def test_the_link_of_a_server_is_the_bottleneck(self, servers: int) -> None:
        """It receives the gradients of all others and sends them weights; a ring spreads both."""
        layout = PlannedLayout(dp=8, seq_len=8, global_batch=8)
        shape = load_model("llama3-8b").shape
        psi = count_parameters(shape).total

        def moved(layout: PlannedLayout, caller: str) -> tuple[int, int]:
            total = volumes_ledger(shape, layout).total(caller=caller)
            return total.wire_bytes, total.received_bytes

        served = layout.changed(parameter_server=True, servers=servers)
        assert moved(served, "gradients") == pytest.approx(
            (4 * psi * (1 - 1 / servers), 4 * psi * 7 / servers)
        )
        assert moved(served, "weights") == pytest.approx(
            (2 * psi * 7 / servers, 2 * psi * (1 - 1 / servers))
        )
        ring = moved(layout, "gradients")
        assert ring == pytest.approx((2 * 7 / 8 * 4 * psi,) * 2)
        if servers == 1:
            assert moved(served, "gradients")[1] == pytest.approx(4 * ring[1])
