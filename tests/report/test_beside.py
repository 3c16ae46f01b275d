"""Tables of predictions next to measurements."""

import pytest

from moemesh.report import bars
from moemesh.trace.ledger import Ledger
from moemesh.trace.memory_profile import MemoryProfile
from moemesh.trace.run import PlannedStep
from moemesh.trace.timeline import Timeline, WorkRecord
from tests.report.fake_run import entry


def profile(rank: int, head: int, gradients: int = 512) -> MemoryProfile:
    kinds = {"head": head} if head else {}
    return MemoryProfile(rank=rank, gradients=gradients, activations=head, activation_kinds=kinds)


def test_every_class_of_every_rank_that_is_not_empty() -> None:
    predicted, measured = (profile(0, 100), profile(1, 0)), (profile(0, 80), profile(1, 0, 0))
    assert bars.memory_rows(predicted, measured) == [
        ("0", "gradients", "512 B", "512 B", "0 %"),
        ("0", "activations", "100 B", "80 B", "+25.00 %"),
        ("0", "· head", "100 B", "80 B", "+25.00 %"),
        ("1", "gradients", "512 B", "0 B", "not measured"),
    ]
    assert bars.memory_rows((), measured) == []


def ledger(count: int, sent: int) -> Ledger:
    book = Ledger()
    book.record(**entry("ep", "all_to_all", "forward", "moe.dispatch", count, sent, sent, sent))
    return book


def test_traffic_is_that_of_one_step() -> None:
    rows = bars.traffic_by_axis({0: ledger(1, 1000)}, {0: ledger(4, 4000)}, steps=4)
    assert rows == [("ep", "forward", "1000 B", "1000 B", "0 %", "100.0%")]


def test_traffic_without_a_prediction_or_a_measurement_says_so() -> None:
    rows = bars.traffic_by_axis({}, {0: ledger(1, 1000)}, steps=1)
    assert rows == [("ep", "forward", "not predicted", "1000 B", "", "100.0%")]
    rows = bars.traffic_by_axis({0: ledger(1, 1000)}, {}, steps=1)
    assert rows == [("ep", "forward", "1000 B", "0 B", "not measured", "0.0%")]


def test_the_bubble_is_that_of_the_pipeline_alone() -> None:
    records = (
        WorkRecord(rank=0, start=0.0, end=5.0, name="data", step=1),
        WorkRecord(rank=0, start=5.0, end=7.0, name="0F0", kind="F", stage=0, step=1),
        WorkRecord(rank=1, start=7.0, end=9.0, name="1F0", kind="F", stage=1, step=1),
        WorkRecord(rank=2, start=5.0, end=9.0, name="0F0", kind="F", stage=0, step=1),
    )
    timeline = Timeline(ranks=(0, 1, 2), records=records, source="measured")
    assert bars.pipeline_bubble(timeline, (0, 1)) == pytest.approx(0.5)
    assert bars.pipeline_bubble(timeline, ()) == 0.0


def test_parts_of_a_step_add_up_to_its_span() -> None:
    records = (
        WorkRecord(rank=0, start=0.0, end=1.0, name="data", step=1),
        WorkRecord(rank=0, start=2.0, end=4.0, wait=1.0, name="0F0", kind="F", stage=0, step=1),
        WorkRecord(rank=0, start=4.0, end=7.0, name="0B0", kind="B", stage=0, step=1),
        WorkRecord(rank=0, start=7.0, end=7.5, name="reduce", step=1),
        WorkRecord(rank=0, start=7.5, end=8.5, name="optimizer", step=1),
    )
    parts = bars.step_parts(Timeline(ranks=(0,), records=records, source="measured"))
    expected = {"data": 1.0, "forward and backward": 5.0, "waiting": 1.0, "reduce": 0.5}
    assert parts == pytest.approx(expected | {"optimizer": 1.0, "rest": 0.0})


def test_exposed_communication_is_what_the_planner_takes() -> None:
    parts = {"compute": 0.6, "experts": 0.2, "data": 0.1, "tensor": 0.0, "bubble": 0.1}
    planned = PlannedStep(cluster="laptop_cpu", seconds=1.0, parts=parts)
    rows = bars.exposed_rows(planned, 0.5, 2.0)
    assert rows == [
        ("experts", "200.000", "20.0%", "", ""),
        ("data", "100.000", "10.0%", "", ""),
        ("exposed communication", "300.000", "30.0%", "", ""),
        ("bubble", "100.000", "10.0%", "", ""),
        ("waiting for other ranks", "400.000", "40.0%", "500.000", "25.0%"),
    ]
    assert bars.exposed_rows(planned, None, 2.0)[-1][3:] == ("not measured", "")


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [
        (3.0, 3.0, "0 %"),
        (3.0, 4.0, "-25.00 %"),
        (9.9, 1.0, "+890.00 %"),
        (1.172, 0.003, "391 times"),
        (1.0, 0.0, "not measured"),
    ],
)
def test_a_difference_is_a_share_or_a_ratio(predicted: float, measured: float, text: str) -> None:
    assert bars.difference(predicted, measured) == text
