"""Pictures of pipelines: every cell where it belongs, the same bytes, simulated over measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest

from moemesh.config.schedule_table import SCHEDULES
from moemesh.report import svg, timeline_picture, timeline_text
from moemesh.report.timeline_picture import timeline_rows
from moemesh.schedule.build import build
from moemesh.schedule.costs import Costs
from moemesh.schedule.simulate import simulate
from moemesh.trace.pipeline import activations
from moemesh.trace.timeline import Timeline, WorkRecord
from tests.report.fake_run import shifted

SVG = "{http://www.w3.org/2000/svg}"


def cells(picture: str) -> dict[str, dict[str, str]]:
    """Name of an operation -> its rectangle's attributes."""
    attributes: dict[str, dict[str, str]] = {}
    for element in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        title = element.find(f"{SVG}title")
        if title is not None and title.text:
            assert title.text not in attributes, "drawn twice"
            attributes[title.text] = dict(element.attrib)
    return attributes


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_operation_is_a_cell_on_its_rank(name: str) -> None:
    schedule = build(name, 4, 8, **({"num_slices": 2} if name == "terapipe" else {}))
    timeline = simulate(schedule).timeline
    picture = timeline_rows(timeline, memory=activations(timeline))
    drawn = cells(picture)
    assert drawn.keys() == {record.name for record in timeline.records}
    tops = {rank: set[float]() for rank in range(4)}
    scale = (svg.WIDTH - 66 - 12) / timeline.end
    for record in timeline.records:
        cell = drawn[record.name]
        assert float(cell["x"]) == pytest.approx(66 + record.start * scale, abs=0.01)
        assert float(cell["width"]) == pytest.approx(record.duration * scale, abs=0.01)
        tops[record.rank].add(float(cell["y"]))
    flat = [tops[rank] for rank in range(4)]
    assert max(flat[0]) < min(flat[1]) and max(flat[2]) < min(flat[3])
    assert picture == timeline_rows(simulate(schedule).timeline, memory=activations(timeline))


class TestColours:
    def test_kinds_differ_in_lightness(self) -> None:
        light = sorted(svg.luminance(colour) for colour in timeline_picture.KINDS.values())
        assert all(b / a > 1.2 for a, b in pairwise(light))

    def test_chunks_and_pipes_have_two_tints(self) -> None:
        for name, first, second in (("zb_v", "0F0", "7F0"), ("chimera", "0F0", "3F0p1")):
            drawn = cells(timeline_rows(simulate(build(name, 4, 8)).timeline))
            # Both run on rank 0.
            assert drawn[first]["fill"] == timeline_picture.KINDS["F"]
            assert drawn[second]["fill"] == svg.tint(timeline_picture.KINDS["F"], 0.5)
        picture = timeline_rows(simulate(build("zb_v", 4, 8)).timeline)
        assert "forward, odd chunk" in picture and "pipe 1" not in picture
        assert "forward, pipe 1" in timeline_rows(simulate(build("dualpipe", 4, 8)).timeline)


def test_blocks_are_split_cells() -> None:
    drawn = cells(timeline_rows(simulate(build("dualpipe", 4, 8)).timeline))
    forward, backward = drawn["0F3"], drawn["3B1p1"]
    assert (forward["x"], forward["width"]) == (backward["x"], backward["width"])
    assert float(forward["height"]) == float(backward["height"]) == 10
    assert float(backward["y"]) - float(forward["y"]) == 10


def test_memory_is_a_strip_with_its_peak() -> None:
    timeline = simulate(build("1f1b", 4, 8)).timeline
    picture = timeline_rows(timeline, memory=activations(timeline))
    texts = [e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("peak")] == [
        f"peak {peak}" for peak in (4, 3, 2, 1)
    ]
    assert "peak" not in timeline_rows(timeline)


class TestStacked:
    def test_one_axis_for_simulated_and_measured(self) -> None:
        schedule = build("1f1b", 2, 4)
        simulated = simulate(schedule, unit="milliseconds", costs=Costs(forward=30)).timeline
        measured = simulate(schedule, Costs(forward=0.06), unit="seconds").timeline
        measured = replace(shifted(measured, 1000), source="measured")
        picture = timeline_rows(simulated, measured)
        root = ElementTree.fromstring(picture)
        texts = [e.text for e in root.iter(f"{SVG}text")]
        assert texts.index("simulated") < texts.index("measured")
        widths = [
            float(e.get("width", "0"))
            for e in root.iter(f"{SVG}rect")
            if (title := e.find(f"{SVG}title")) is not None and title.text == "0F0"
        ]
        assert len(widths) == 2
        assert widths[0] * 2 == pytest.approx(widths[1], abs=0.02)

    def test_ticks_are_stretched_to_the_measured_work(self) -> None:
        schedule = build("zb_h1", 2, 4)
        simulated = simulate(schedule).timeline
        costs = Costs(forward=0.02, input_gradient=0.02, weight_gradient=0.02)
        measured = replace(simulate(schedule, costs, unit="seconds").timeline, source="measured")
        picture = timeline_rows(simulated, measured)
        assert "simulated, a tick stretched to 20 milliseconds" in picture
        left = [
            e.get("x")
            for e in ElementTree.fromstring(picture).iter(f"{SVG}rect")
            if (title := e.find(f"{SVG}title")) is not None and title.text == "1I2"
        ]
        assert left[0] == left[1]

    def test_empty_ones_are_left_out(self) -> None:
        empty = Timeline(ranks=(0,), records=(), source="measured")
        timeline = simulate(build("1f1b", 2, 4)).timeline
        assert timeline_rows(empty) == ""
        assert timeline_rows(empty, timeline, identity="timeline", title="t") == (
            timeline_rows(timeline, identity="timeline", title="t")
        )


class TestText:
    def test_the_legend_says_the_signs_of_the_picture(self) -> None:
        def legend(name: str) -> str:
            return timeline_text.legend(timeline_text.draw(simulate(build(name, 4, 8)).timeline))

        assert legend("gpipe") == "F forward, B backward, . idle"
        assert "I input gradient, W weight gradient" in legend("dualpipe")
        assert "+ in one block; small letters: the second pipe" in legend("dualpipe")

    def test_columns_are_ticks(self) -> None:
        lines = timeline_text.draw(simulate(build("1f1b", 2, 2)).timeline).splitlines()
        assert lines == ["rank 0: F0 F1 .  .  B0--- .  B1---", "rank 1: .  F0 B0--- F1 B1---"]

    def test_a_column_is_the_common_measure(self) -> None:
        half = Costs(forward=0.5, input_gradient=0.25, weight_gradient=0.25)
        draw = timeline_text.draw(simulate(build("gpipe", 2, 2), half).timeline)
        assert draw.splitlines()[0] == "rank 0: F0 F1 .  .  B1 B0"
        times = {0.1, 0.2, 0.30000000000000004}
        assert timeline_text.common_measure(times) == pytest.approx(0.1)
        assert timeline_text.common_measure({1.0, 2**0.5}) is None
        assert timeline_text.common_measure({1e-3, 1e3}) is None

    def test_measured_times_are_drawn_coarsely(self) -> None:
        costs = Costs(forward=2**0.5, input_gradient=3**0.5, weight_gradient=0.1)
        draw = timeline_text.draw(simulate(build("gpipe", 2, 2), costs, unit="seconds").timeline)
        assert len({line.index("B1") for line in draw.splitlines()}) == 2
        assert max(map(len, draw.splitlines())) < 400

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_every_operation_is_there_and_starts_in_order(self, name: str) -> None:
        timeline = simulate(build(name, 4, 8)).timeline
        for line, records in zip(
            timeline_text.draw(timeline).splitlines(), timeline.by_rank().values(), strict=True
        ):
            words = line.partition(":")[2].replace("-", " ").replace(".  ", " ").split()
            labels = [part for word in words if word != "." for part in word.split("+")]
            assert len(labels) == len(records)
            assert sum(label[0] in "Ff" for label in labels) == sum(r.kind == "F" for r in records)

    def test_other_work_and_nothing(self) -> None:
        other = WorkRecord(rank=0, start=0, end=1, name="optimizer")
        timeline = Timeline(ranks=(0,), records=(other,), source="measured")
        assert timeline_text.draw(timeline) == ""


def test_a_title_is_escaped() -> None:
    timeline = simulate(build("zb_v", 4, 8)).timeline
    assert "zb_v &amp; &lt;co&gt;" in timeline_rows(timeline, title="zb_v & <co>")
