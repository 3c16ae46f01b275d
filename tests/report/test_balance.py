"""The heat maps of GPU loads: well-formed, honest about the hottest GPU, bounded in size."""

from __future__ import annotations

from xml.etree import ElementTree

from moemesh.report.heat_maps import GPU_CLASSES, balance_heat_maps, heat_colour


def test_hot_gpus_keep_their_colour() -> None:
    picture = balance_heat_maps([[1.0, 1.0, 1.0, 5.0]], [[2.0, 2.0, 2.0, 2.0]])
    ElementTree.fromstring(picture)
    before, after = picture.split("after: most loaded")
    assert heat_colour(GPU_CLASSES, 2.5) in before.split("before: most loaded")[1]
    body = after.split("<g ")[1]
    assert heat_colour(GPU_CLASSES, 1.0) in body and heat_colour(GPU_CLASSES, 2.5) not in body
    assert "2.500 before, 1.000 after" in picture


def test_many_layers_and_gpus_are_squeezed_by_their_maximum() -> None:
    """One hot GPU among 400 x 2000 is still to be seen."""
    loads = [[1.0] * 2000 for _ in range(400)]
    loads[123][777] = 2000.0
    picture = balance_heat_maps(loads, loads)
    assert len(picture) < 40_000
    assert picture.count(heat_colour(GPU_CLASSES, 1000.0)) >= 3  # legend and both panels


def test_a_layer_without_load_is_balanced() -> None:
    assert heat_colour(GPU_CLASSES, 1.0) == GPU_CLASSES[2][1]
    picture = balance_heat_maps([[0.0, 0.0]], [[0.0, 0.0]])
    assert "1.000 before, 1.000 after" in picture
