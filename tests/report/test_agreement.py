"""The picture of predicted against measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

from moemesh.report.curves import Agreement, agreement_chart


def points():
    return [
        Agreement(name=f"run <{i}>", series=f"s{i % 10}", measured=10.0**i, predicted=1.1 * 10.0**i)
        for i in range(-2, 12)
    ]


def test_one_dot_a_run_with_its_error():
    root = ElementTree.fromstring(agreement_chart("title", points(), unit="seconds"))
    dots = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(dots) == 14
    assert "+10.0% predicted" in "".join(dots[0].itertext())


def test_perfect_predictions_lie_on_the_diagonal():
    exact = [Agreement(name="x", series="s", measured=v, predicted=v) for v in (0.1, 1.0, 50.0)]
    root = ElementTree.fromstring(agreement_chart("t", exact, unit="s"))
    dots = [node for node in root.iter() if node.tag.endswith("circle")]
    places = [(float(d.get("cx", 0)), float(d.get("cy", 0))) for d in dots]
    slopes = {round((b[1] - a[1]) / (b[0] - a[0]), 2) for a, b in pairwise(places)}
    assert len(slopes) == 1


def test_nothing_to_draw():
    assert agreement_chart("t", [], unit="s") == ""
    bad = [Agreement(name="x", series="s", measured=0.0, predicted=1.0)]
    assert agreement_chart("t", bad, unit="s") == ""


def test_small_series_share_a_colour():
    picture = agreement_chart("t", points(), unit="s")
    assert "3 others" in picture
