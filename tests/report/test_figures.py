"""Every figure: well-formed, accessible, deterministic, escaped, and complete."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from moemesh.report import bars, curves, svg, timeline_picture
from moemesh.report.bars import memory_bars
from moemesh.report.curves import imbalance_curve
from moemesh.report.heat_maps import (
    DEAD,
    EXPERT_CLASSES,
    heat_colour,
    layer_heat_maps,
    mean_heat_map,
)
from moemesh.trace.ledger import Ledger
from moemesh.trace.loads import LayerLoads
from moemesh.trace.memory_profile import MemoryProfile, MemoryProfiles
from moemesh.trace.timeline import Timeline, WorkRecord
from tests.report import fake_run

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>&\x00\"'\ud800"


def parse(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)


def svgs(figure: str) -> list[str]:
    """The pictures that a page arranges, of which the first has the legend."""
    return re.findall(r"<svg.*?</svg>", figure, flags=re.DOTALL)


def all_figures(name: str = "") -> dict[str, str]:
    """One of each figure; `name` enters wherever a text can come from a file."""
    rows = [fake_run.metrics_row(step, 50, random.Random(step)) for step in range(1, 51)]
    chance = random.Random(3)
    some_loads = [
        fake_run.layer_loads(step, layer, 8, 50, chance) for step in (1, 20, 50) for layer in (0, 2)
    ]
    ledgers = {rank: fake_run.ledger(rank) for rank in range(2)}
    if name:
        for book in ledgers.values():
            sizes = dict.fromkeys(("payload_bytes", "wire_bytes", "received_bytes"), 10**9)
            book.record(axis=name, op=name, phase=name, caller=name, **sizes)
    line = fake_run.timeline(4, 50)
    if name:
        named = WorkRecord(rank=0, start=999, end=1003, name=name, kind=name)
        line = Timeline(ranks=line.ranks, records=(*line.records, named), source="measured")
    return {
        "loss": curves.loss_curve(rows, unigram_loss=3.0)[0],
        "throughput": curves.one_curve(rows, "tokens_per_second", "Throughput")[0],
        "gradient norm": curves.one_curve(rows, "grad_norm", "Gradient norm")[0],
        "learning rate": curves.one_curve(rows, "lr", "Learning rate")[0],
        "auxiliary": curves.auxiliary_curve(rows, unit="nats a byte")[0],
        "narrow loss": curves.loss_curve(rows, unigram_loss=3.0)[1],
        "imbalance": imbalance_curve(some_loads)[0],
        **{f"layer map {n}": part for n, part in enumerate(svgs(layer_heat_maps(some_loads)))},
        "mean map": mean_heat_map(some_loads),
        "traffic": bars.traffic_bars(ledgers),
        "memory": memory_bars(fake_run.memory(4)),
        "timeline": timeline_picture.timeline_rows(line),
    }


@pytest.mark.parametrize("name", ["", HOSTILE])
def test_well_formed_and_accessible(name):
    identities = set()
    for key, figure in all_figures(name).items():
        root = parse(figure)
        title, description = root[0], root[1]
        assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc"), key
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text and len(description.text) > 20, key
        assert "script" not in {element.tag.removeprefix(SVG) for element in root.iter()}
        assert "nan" not in figure.lower().replace("nanm", ""), key
        identities.add(title.get("id"))
    assert len(identities) == len(all_figures())


def test_the_same_data_is_the_same_bytes():
    assert all_figures() == all_figures()


def test_nothing_to_draw_is_no_figure():
    assert curves.loss_curve([]) == imbalance_curve([]) == ("", "")
    assert layer_heat_maps([]) == mean_heat_map([]) == ""
    zero = [LayerLoads(step=1, layer=0, tokens_per_expert=(0, 0), tokens_per_rank=(0,))]
    assert layer_heat_maps(zero) == ""
    parse(imbalance_curve(zero)[0])
    assert bars.traffic_bars({}) == bars.traffic_bars({0: Ledger()}) == ""
    assert memory_bars(MemoryProfiles(ranks=())) == ""
    parse(memory_bars(MemoryProfiles(ranks=(MemoryProfile(rank=0),))))
    empty = Timeline(ranks=(0, 1), records=(), source="measured")
    assert timeline_picture.timeline_rows(empty) == ""
    instant = Timeline(
        ranks=(0,), records=(WorkRecord(rank=0, start=5, end=5, name="x"),), source="measured"
    )
    parse(timeline_picture.timeline_rows(instant))


def test_colours_have_contrast():
    for colour in (*svg.COLOURS, svg.INK, svg.MUTED):
        assert svg.contrast(colour, "#ffffff") >= 4.5, colour
    for colour in (*timeline_picture.KINDS.values(), *svg.COLOURS):
        assert svg.contrast(svg.ink_on(colour), colour) >= 4.5, colour
        for tinted in (svg.tint(colour), svg.tint(colour, 0.5)):
            assert svg.contrast(svg.ink_on(tinted), tinted) >= 4.5, tinted
    dark = {**svg.DARK, **timeline_picture.DARK}
    for colour in (*svg.COLOURS, svg.INK, svg.MUTED):
        assert svg.contrast(dark[colour], svg.DARK_GROUND) >= 4.5, colour
    tints = [svg.tint(colour, 0.5) for colour in timeline_picture.KINDS.values()]
    for colour in (*timeline_picture.KINDS.values(), *svg.COLOURS, *tints):
        ink = svg.ink_on(colour)
        ink, colour = dark.get(ink, ink), dark.get(colour, colour)
        assert svg.contrast(ink, colour) >= 4.5, (ink, colour)
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    lightness = [svg.luminance(colour) for _, colour, _ in EXPERT_CLASSES]
    assert lightness == sorted(lightness, reverse=True)


class TestCurves:
    def test_a_spike_survives_downsampling(self):
        points = [(float(x), 1.0) for x in range(50_000)]
        points[31_234] = (31_234.0, 99.0)
        points[7] = (7.0, -3.0)
        kept = curves.downsample(points)
        assert len(kept) <= 1200
        assert {points[31_234], points[7], points[0], points[-1]} <= set(kept)
        assert kept == sorted(kept)

    def test_a_loss_that_is_not_finite_breaks_the_line(self):
        points = [(1, 2.0), (2, 3.0), (3, math.nan), (4, math.inf), (5, 1.0), (6, 2.0)]
        chart = curves.line_chart(
            "x", "title", [curves.Series(name="a", points=points)], y_label="y", description="d"
        )
        path = next(e for e in parse(chart).iter(f"{SVG}path") if len(e.get("d")) > 20)
        assert path.get("d").count("M") == 2
        assert path.get("d").count("L") == 2

    def test_positions_by_hand(self):
        frame = curves.Frame(0, 10, 1, 100, True)
        assert frame.x(0) == 62 and frame.x(10) == 880 - 16
        assert frame.y(1) == 290 - 40 and frame.y(100) == 34
        assert frame.y(10) == pytest.approx((250 + 34) / 2)

    @pytest.mark.parametrize("value", [0.0, -2.0, 5e-324, 1e300])
    def test_flat_and_extreme_curves(self, value):
        series = [curves.Series(name="a", points=[(1, value), (2, value)])]
        for log in (False, True):
            chart = curves.line_chart(
                "x", "t", series, y_label="y", description="d", log=log, from_zero=True
            )
            assert "nan" not in chart
            parse(chart)


class TestTraffic:
    def test_sums_by_hand(self):
        books = {}
        for rank, sent in ((0, 100), (1, 300)):
            books[rank] = Ledger()
            for caller, part in (("a", 1), ("b", 2)):
                amounts = (part, 2 * sent, sent * part, sent)
                books[rank].record(
                    **fake_run.entry("ep", "all_to_all", "forward", caller, *amounts)
                )
        (row,) = bars.traffic_rows(books, steps=2)
        assert (row.max_count, row.max_payload_bytes) == (1.5, 600)
        assert (row.max_wire_bytes, row.sum_wire_bytes) == (450, 600)
        assert row.max_received_bytes == 300


class TestLoads:
    def test_colours_of_a_dead_and_a_full_expert(self):
        layer = [LayerLoads(step=1, layer=0, tokens_per_expert=(0, 1, 1, 14))]
        paths = {e.get("fill"): e.get("d") for e in parse(layer_heat_maps(layer)).iter()}
        assert paths[DEAD] == "M0 0h1v1h-1z"
        assert paths[EXPERT_CLASSES[0][1]] == "M0 1h1v1h-1zM0 2h1v1h-1z"
        assert paths[heat_colour(EXPERT_CLASSES, 3.5)] == "M0 3h1v1h-1z"

    def test_expert_count_may_change(self):
        mixed = [
            LayerLoads(step=1, layer=0, tokens_per_expert=(1, 2)),
            LayerLoads(step=2, layer=0, tokens_per_expert=(1, 2, 3)),
        ]
        parse(layer_heat_maps(mixed))
        titles = mean_heat_map(mixed)
        assert EXPERT_CLASSES[2][1] in titles


class TestTimeline:
    def test_lanes(self):
        records = [
            WorkRecord(rank=0, start=start, end=end, name=name)
            for name, start, end in (("outer", 0, 9), ("in", 1, 3), ("in", 3, 5), ("next", 9, 10))
        ]
        line = Timeline(ranks=(0,), records=tuple(records), source="virtual", unit="ticks")
        boxes = timeline_picture.boxes_of(line.records)
        assert [(box.record.name, box.lane) for box in boxes] == [
            ("outer", 0),
            ("in", 1),
            ("in", 1),
            ("next", 0),
        ]

    def test_a_block_is_split(self):
        records = [
            WorkRecord(rank=0, start=0, end=4, name=name, kind=name[1], microbatch=int(name[2]))
            for name in ("0F1", "0B0")
        ]
        line = Timeline(ranks=(0,), records=tuple(records), source="simulated", unit="ticks")
        assert {
            (box.part, box.parts, box.lane) for box in timeline_picture.boxes_of(line.records)
        } == {
            (0, 2, 0),
            (1, 2, 0),
        }
        figure = parse(timeline_picture.timeline_rows(line))
        boxes = [e for e in figure.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]
        assert [float(box.get("height")) for box in boxes] == [10, 10]
        assert float(boxes[0].get("width")) == 880 - 66 - 12

    def test_too_much_to_draw_stays_small_and_says_so(self):
        # 600 boxes a rank are about a pixel wide each, 5000 much less.
        for num_ranks, num_records in ((32, 600), (4, 5000)):
            line = fake_run.timeline(num_ranks, 1, records_per_rank=num_records)
            figure = timeline_picture.timeline_rows(line)
            assert len(figure) < 600_000
            assert "too narrow to draw" in figure
        assert "too narrow to draw" not in timeline_picture.timeline_rows(fake_run.timeline(4, 1))
