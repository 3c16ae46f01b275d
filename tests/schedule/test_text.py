"""Text and CSV forms: exact round trips, stable digests, errors that name line and token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moemesh.schedule.action import Op, Schedule, UpdateRule
from moemesh.schedule.build import build
from moemesh.schedule.text import TextError, digest, from_csv, from_text, parse_op, to_csv, to_text

ZB_H1 = """\
pipeline-schedule v1  name=zb_h1 ranks=2 stages=2 slices=1 microbatches=3
place 0: 0 1
rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

small = st.integers(0, 99)
ops = st.builds(Op, st.sampled_from("FBIW"), small, small, st.integers(0, 2), st.integers(0, 3))
entries = st.lists(ops, min_size=1, max_size=3).map(tuple)
odd = st.sampled_from(["two words", "a # b", "", "7", "nan", 'quo"te', "a,b=c", "ü\t\n"])
words = odd | st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
values = st.one_of(st.integers(), st.floats(allow_nan=False), words)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Anything that can be written down, runnable or not."""
    ranks, stages, pipes = (draw(st.integers(1, 3)) for _ in range(3))
    place = st.tuples(*[st.integers(0, 9)] * stages)
    kinds = st.sampled_from(["stash", "two_versions", "newest"])
    rules = st.builds(UpdateRule, kind=kinds, window=st.integers(1, 9))
    names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,5}", fullmatch=True)
    return Schedule(
        name=draw(words),
        num_ranks=ranks,
        num_stages=stages,
        placement=draw(st.tuples(*[place] * pipes)),
        orders=draw(st.tuples(*[st.lists(entries, max_size=5).map(tuple)] * ranks)),
        num_microbatches=draw(st.tuples(*[small] * pipes)),
        num_slices=draw(st.integers(1, 4)),
        update=draw(st.none() | rules),
        parameters=draw(st.dictionaries(names, values, max_size=3)),
    )


@given(schedules())
def test_every_schedule_comes_back_from_both_forms(schedule: Schedule) -> None:
    for write, read in ((to_text, from_text), (to_csv, from_csv)):
        again = read(write(schedule))
        assert again == schedule
        assert {k: type(v) for k, v in again.parameters.items()} == {
            k: type(v) for k, v in schedule.parameters.items()
        }
        assert write(again) == write(schedule)


def test_the_form_is_that_of_the_documentation() -> None:
    schedule = from_text(ZB_H1.replace("0 1\n", "0 1      # rank of stage 0, 1\n\n"))
    assert schedule == build("zb_h1", 2, 3)
    assert to_text(schedule) == ZB_H1
    assert to_csv(schedule).splitlines()[2] == "rank 0,0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2"


def test_the_digest_follows_the_contents() -> None:
    schedule = from_text(ZB_H1)
    assert digest(schedule) == "83a070edfbd61623"
    assert digest(from_csv(to_csv(schedule))) == digest(schedule)
    assert digest(from_text(ZB_H1.replace("0I1 0W1", "0W1 0I1"))) != digest(schedule)


@pytest.mark.parametrize(
    "token, op",
    [
        ("3F0", Op("F", 3, 0)),
        ("12I34", Op("I", 12, 34)),
        ("1B2p1", Op("B", 1, 2, 1)),
        ("1W2p1.3", Op("W", 1, 2, 1, 3)),
        ("0F0.1", Op("F", 0, 0, 0, 1)),
        ("F0", None),
        ("0X0", None),
        ("0F", None),
        ("0F0p", None),
        ("0F0 ", None),
        ("-1F0", None),
        ("0F²", None),
    ],
)
def test_operations_are_read_one_by_one(token: str, op: Op | None) -> None:
    assert parse_op(token) == op
    if op is not None:
        assert str(op) == token


@pytest.mark.parametrize(
    "change, message",
    [
        (("0F1", "0X1"), "line 3, token 2, '0X1': expected <stage>"),
        (("1I1", "1I1+"), "line 4, token 4, '1I1+': expected <stage>"),
        (("ranks=2", "ranks=two"), "line 1, token 2, 'ranks=two': expected a whole number"),
        (("ranks=2", "ranks=0"), "line 1, token 2, 'ranks=0': expected a whole number"),
        (("ranks=2", "rank=2"), "line 1, token 2, 'rank=2': expected <key>=<value>"),
        (("ranks=2", "ranks=3"), "no line 'rank 2:'"),
        (("ranks=2", "ranks=1"), "line 4, 'rank 1': the header leaves room for rank 0 to 0"),
        (("ranks=2", "ranks=999999999"), "no line 'rank 2:'"),
        (("ranks=2 ", ""), "the header has no ranks="),
        (("stages=2", "stages=2 stages=2"), "'stages' is given twice"),
        (("stages=2", "stages=3"), "line 2, 'place 0': has 2 ranks for 3 stages"),
        (("place 0: 0 1", "place 0: 0 x"), "line 2, token 2, 'x': expected the rank of a stage"),
        (("microbatches=3", "microbatches=3,"), "expected a count for each pipe"),
        (("microbatches=3", "microbatches=3,3"), "no line 'place 1:'"),
        (("microbatches=3", "microbatches=3 update=never"), "expected one of stash, two_versions"),
        (("microbatches=3", "microbatches=3 window=2"), "window= without update="),
        (("microbatches=3", 'microbatches=3 parameter.a="x'), "expected parameter.<word>="),
        (("name=zb_h1", "name=7"), "line 1, token 1, 'name=7': expected a word"),
        (("rank 1:", "rank 0:"), "line 4, 'rank 0': is already on line 3"),
        (("rank 1:", "rank 1"), "line 4, 'rank': expected '<label>: ...'"),
        (("rank 1:", "place 1:"), "line 4, 'place 1': the header leaves room for place 0 to 0"),
        (("rank 1:", "ranks 1:"), "line 4, 'ranks 1': expected 'place <pipe>' or 'rank <rank>'"),
        (("schedule v1", "schedule v2"), "expected 'pipeline-schedule v1'"),
    ],
)
def test_mistakes_are_named_by_line_and_token(change: tuple[str, str], message: str) -> None:
    with pytest.raises(TextError) as caught:
        from_text(ZB_H1.replace(*change))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "0F0"])
def test_text_without_header_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="expected 'pipeline-schedule v1'"):
        from_text(text)


def test_csv_mistakes_are_named_by_line_and_cell() -> None:
    text = to_csv(from_text(ZB_H1)).replace("1W0", "1w0")
    with pytest.raises(TextError, match="line 4, token 5, '1w0'"):
        from_csv(text)


def test_a_bare_table_of_operations_is_read() -> None:
    schedule = from_csv("0F0,0F1,,0B0,0B1,\n,1F0,1B0,1F1,1B1,\n,,,,,\n")
    assert schedule.num_ranks == schedule.num_stages == 2
    assert schedule.placement == ((0, 1),)
    assert schedule.num_microbatches == (2,)
    assert [str(op) for op in schedule.ops(1)] == ["1F0", "1B0", "1F1", "1B1"]


def test_a_table_of_two_pipes_and_slices_is_read() -> None:
    schedule = from_csv("0F0.1,1F2p1\n1F0,0F0p1\n")
    assert schedule.placement == ((0, 1), (1, 0))
    assert schedule.num_microbatches == (1, 3)
    assert schedule.num_slices == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the table is empty"),
        ("0F0,0F1\n0B0\n", "line 2, token 1, '0B0': stage 0 is also on line 1"),
        ("0F0,3F0,0F1,0F2\n", "no operation of stage 1 in pipe 0"),
        ("0F0,999999999F0\n", "cannot fill 1000000000 stages"),
        ("0F0,hello\n", "line 1, token 2, 'hello': expected <stage>"),
        (f'0F0,"{"x" * 200_000}', "line 1: field larger than field limit"),
    ],
)
def test_tables_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(TextError) as caught:
        from_csv(text)
    assert message in str(caught.value)


def test_a_parameter_name_must_be_a_word() -> None:
    schedule = build("zb_h1", 2, 3)
    bad = replace(schedule, parameters={"a b": 1})
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        to_text(bad)
