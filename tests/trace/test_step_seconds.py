"""Seconds of the parts of a step: their file, their means, passes together."""

import pytest

from moemesh.trace import step_seconds as parts
from moemesh.trace.step_seconds import StepSeconds, communication

EP = communication("ep")


def test_the_file_and_the_means():
    given = StepSeconds(
        steps=3,
        ranks={0: {parts.REST: 1.0, EP: 4.0, parts.ATTENTION: 2.0}, 1: {parts.ATTENTION: 6.0}},
        predicted={0: {parts.ATTENTION: 1.0}},
        rates={"memory": 2.0},
    )
    assert StepSeconds.from_json(given.to_json()) == given
    assert list(given.mean().items()) == [(parts.ATTENTION, 4.0), (parts.REST, 0.5), (EP, 2.0)]
    assert given.mean_predicted() == {parts.ATTENTION: 1.0}


def test_passes_that_are_measured_together_are_predicted_together():
    seconds = StepSeconds(
        steps=1,
        ranks={0: {parts.TOGETHER: 9.0}},
        predicted={0: {parts.ATTENTION: 1.0, parts.EXPERTS: 3.0, EP: 2.0}},
    )
    assert seconds.mean_predicted() == {parts.TOGETHER: 4.0, EP: 2.0}
    none = StepSeconds(steps=1, ranks={0: {parts.TOGETHER: 9.0}}, predicted={0: {EP: 2.0}})
    assert none.mean_predicted() == {EP: 2.0}


@pytest.mark.parametrize("data", [{}, {"steps": 1, "ranks": [{"rank": 0}], "predicted": []}])
def test_other_data_is_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError)):
        StepSeconds.from_json(data)
