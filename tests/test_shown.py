"""Texts in a prompt and a notebook of every object that the library returns."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moemesh as mm
from moemesh.balance import plan_quotas, rebalance_incremental, split_loads
from moemesh.planner.planned_layout import PlannedLayout
from tests.report.fake_run import write_fake_run

SMALL = ["train.steps=1", "model.num_layers=2", "data.seq_len=16", "data.global_batch=4"]
LOADS = np.random.default_rng(0).random((58, 256))
VOID = {"br", "img", "hr", "meta", "link", "input"}


def parallel_model() -> Any:
    config = mm.load(None, SMALL)
    mesh = mm.Mesh.single("cpu")
    return mm.parallelize(config.model, config.plan, mesh, seq_len=16, global_batch=4)


def planned() -> Any:
    return mm.plan(model="tiny", cluster="laptop_cpu", seq_len=128, global_batch=32, top=8)


#: Name of the object -> (function that makes it, a text of its repr).
OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "load": (lambda: mm.load(None, SMALL), "RunConfig(model=ModelConfig(num_layers=2"),
    "plan": (planned, "Answers(0="),
    "an answer of plan": (lambda: planned()[0], "Answer(plan="),
    "estimate": (
        lambda: mm.estimate(
            model="tiny", cluster="laptop_cpu", plan="dp=2", seq_len=128, global_batch=32
        ),
        "Answer(plan=Plan(dp=2), seconds=",
    ),
    "partition": (
        lambda: mm.partition(
            model="tiny", cluster="laptop_cpu", global_batch=8, seq_len=64, stages=2, microbatches=4
        ),
        "Partition(model='tiny'",
    ),
    "a layout": (
        lambda: PlannedLayout(dp=4, tp=2, ep=8, seq_len=128, global_batch=32),
        "PlannedLayout(tp=2, dp=4, ep=8, seq_len=128, global_batch=32)",
    ),
    "a large layout": (
        lambda: PlannedLayout(pp=16, dp=1024, ep=64, seq_len=4096, global_batch=32768),
        "PlannedLayout(pp=16, dp=1024, ep=64",
    ),
    "a schedule": (
        lambda: mm.schedules.dualpipe(32, 128),
        "Schedule(name='dualpipe', num_ranks=32",
    ),
    "an asynchronous schedule": (
        lambda: mm.schedules.ampnet(4, 8),
        "Schedule(name='ampnet', num_ranks=4",
    ),
    "simulate": (
        lambda: mm.simulate(mm.schedules.zb_h1(4, 8), mm.schedules.Costs()),
        "Simulation(schedule=Schedule(name='zb_h1'",
    ),
    "its timeline": (
        lambda: mm.simulate(mm.schedules.zb_h1(4, 8), mm.schedules.Costs()).timeline,
        "Timeline(ranks=(0, 1, 2, 3), records=96 items, source='simulated'",
    ),
    "schedules.search": (lambda: mm.schedules.search(2, 4), "SearchResult(schedule=Schedule(name="),
    "schedules.check": (
        lambda: mm.schedules.check(mm.schedules.gpipe(32, 64)),
        "CheckReport(peaks=32 items",
    ),
    "Costs": (mm.schedules.Costs, "Costs(forward=1"),
    "rebalance_experts": (
        lambda: mm.rebalance_experts(LOADS, 288, 8, 4, 32, effort="fast"),
        "ExpertPlacement(layers=58, experts=256, slots=288, gpus=32, max_over_mean_before=",
    ),
    "rebalance_experts of a tensor": (
        lambda: mm.rebalance_experts(torch.tensor(LOADS), 288, 8, 4, 32, effort="fast"),
        "ExpertPlacement(layers=58",
    ),
    "rebalance_incremental": (
        lambda: rebalance_incremental(LOADS[:1], np.arange(256)[None], num_gpus=32),
        "Replan(physical_to_logical=int64 [1, 256]",
    ),
    "split_loads": (
        lambda: split_loads(LOADS[:1], np.arange(256)[None], num_gpus=32),
        "LoadSplit(shares=float64 [1, 256]",
    ),
    "plan_quotas": (
        lambda: plan_quotas([[4, 2], [1, 1]], [0, 1], 1),
        "QuotaPlan(home=int64 [2], spare_expert=",
    ),
    "Mesh": (lambda: mm.Mesh.single("cpu"), "Mesh(rank=0, layout=Layout()"),
    "parallelize": (parallel_model, "ParallelModel(mesh=Mesh(rank=0"),
    "its step": (
        lambda: parallel_model().step(torch.zeros(4, 17, dtype=torch.int64)),
        "StepResult(loss=",
    ),
    "MoELayer": (lambda: mm.MoELayer(16, 32, 256, 2), "MoELayer(\n  16, 32, num_experts=256"),
    "the second result of MoELayer": (
        lambda: mm.MoELayer(16, 32, 256, 2)(torch.zeros(2, 3, 16))[1],
        "Auxiliary(loss=0",
    ),
    "Sharded": (
        lambda: mm.Sharded(torch.zeros(999), (2000,), (0,)),
        "Sharded(tensor=torch.float32 [999], shape=(2000,), offset=(0,))",
    ),
}
#: Objects without a picture.
WITHOUT_PICTURE = {
    "rebalance_incremental",
    "split_loads",
    "plan_quotas",
    "schedules.check",
    "Costs",
    "parallelize",
    "its step",
    "MoELayer",
    "the second result of MoELayer",
    "Sharded",
}
#: Without a table: those of torch, of two lines, and a NamedTuple.
PLAIN = {"MoELayer", "the second result of MoELayer", "Sharded", "Costs"}


class Tags(HTMLParser):
    """Checks that each tag is closed where it should be, and collects links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}, (tag, attrs)
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(thing: Any, words: str, has_picture: bool, has_table: bool = True) -> None:
    assert len(repr(thing)) <= 400, len(repr(thing))
    assert repr(thing).startswith(words), repr(thing)
    if not has_table:
        return
    html = thing._repr_html_()
    assert len(html.encode()) < 300_000, len(html)
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert not tags.open
    assert "table" in tags.seen and ("svg" in tags.seen) == has_picture
    assert not tags.seen & {"script", "link", "style", "img"}
    assert f"<caption>{type(thing).__name__}</caption>" in html


@pytest.mark.parametrize("name", OBJECTS)
def test_a_result_is_shown_in_short(name: str) -> None:
    make, words = OBJECTS[name]
    check(make(), words, name not in WITHOUT_PICTURE, name not in PLAIN)


def test_a_run_is_shown_in_short(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path / "a&b <run>")
    run = mm.Run.load(folder)
    check(run, "Run(folder=", True)
    assert "last_loss=" in repr(run) and "a&amp;b &lt;run&gt;" in run._repr_html_()


def test_maps_of_experts_stay_a_tuple_of_three() -> None:
    slots, replicas, counts = mm.rebalance_experts([[90, 10, 1, 1]], 8, 1, 1, 4)
    assert isinstance(slots, list) and len(slots[0]) == 8
    assert len(replicas[0]) == 4 and sum(counts[0]) == 8
