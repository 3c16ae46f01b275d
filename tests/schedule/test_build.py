"""Schedules by name: the names of the configuration, options, and what is no schedule."""

from __future__ import annotations

import pytest

from moemesh.config.plan import Plan
from moemesh.config.suggest import choices_of
from moemesh.schedule.build import RECIPES, build
from moemesh.schedule.messages import messages


def test_the_names_are_those_of_the_configuration() -> None:
    assert tuple(RECIPES) == choices_of(Plan.model_fields["schedule"].annotation)


@pytest.mark.parametrize("name", RECIPES)
def test_a_build_is_a_value(name: str) -> None:
    assert build(name, 4, 16) == build(name, 4, 16)
    assert build(name, 4, 16) != build(name, 2, 16)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zb-h1", "zb_h1"),
        ("1F1B", "1f1b"),
        ("interleaved", "interleaved_1f1b"),
        ("dualpip", "dual"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"there is no schedule '{name}': did you mean {near}"):
        build(name, 4, 8)


def test_options_reach_their_schedules() -> None:
    assert build("terapipe", 4, 2).num_slices == 4
    assert build("terapipe", 4, 2, num_slices=3).num_slices == 3
    assert build("interleaved_1f1b", 2, 4, stages_per_rank=3).num_stages == 6
    assert build("zb_v", 2, 4, stages_per_rank=2) == build("zb_v", 2, 4)
    found = build("ampnet", 2, 4, max_in_flight=3, window=2, cost=lambda op: 1, latency=1)
    assert found.update is not None and found.update.window == 2
    assert found.parameters["max_in_flight"] == 3


def test_an_option_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="gpipe has no num_slices and no window: it takes no opt"):
        build("gpipe", 4, 8, num_slices=2, window=3)
    with pytest.raises(ValueError, match="terapipe has no window: it takes num_slices"):
        build("terapipe", 4, 8, window=3)


def test_numbers_must_be_whole() -> None:
    for ranks, microbatches in ((True, 4), (4.0, 4), (4, "8")):
        with pytest.raises(ValueError, match="to be an integer"):
            build("gpipe", ranks, microbatches)  # pyright: ignore[reportArgumentType]


def test_a_slip_does_not_fill_the_memory() -> None:
    with pytest.raises(ValueError, match="more than 2000000"):
        build("zb_v", 10_000, 1_000_000_000)


def test_interleaving_multiplies_the_messages() -> None:
    once = len(messages(build("1f1b", 4, 8)))
    assert once == 2 * 3 * 8
    assert len(messages(build("interleaved_1f1b", 4, 8, stages_per_rank=2))) == 2 * 7 * 8
    # Chunks that meet on a rank hand over without a message.
    assert len(messages(build("zb_v", 4, 8))) == 2 * 6 * 8
