"""The rank that holds the others up, out of the words of all."""

from __future__ import annotations

import random

from moemesh.watch.progress_words import Collective, Word, members_of
from moemesh.watch.verdict import blame
from tests.watch.looks import GROUP, collective, word


def test_chains_end_at_the_rank_in_user_code() -> None:
    """3 waits for a message of 2, which waits in a group of 0, which computes."""
    counts = {"0,2": 4, "2>3": 8}
    words = [
        word(0, counts={"0,2": 4}),
        word(2, at=collective(5, "0,2"), counts={"0,2": 5, "2>3": 8}),
        word(3, at=collective(9, "2>3", "send_receive"), counts={"2>3": 9}),
    ]
    found = blame(words)
    assert found is not None and found.rank == 0 and counts
    assert found.collective is not None and found.collective.group == "0,2"
    assert (found.entered, found.missing) == ((2,), (0,))


def test_a_circle_names_the_rank_that_came_least_far() -> None:
    """0 and 1 wait for each other, in operations of two groups: one of them left one out."""
    words = [
        word(0, at=collective(5, "0-1"), counts={"0-1": 5, "0-3": 2}, number=40),
        word(1, at=collective(3, "0-3"), counts={"0-1": 4, "0-3": 3}, number=39),
        word(2, at=collective(3, "0-3"), counts={"0-3": 3}, number=41),
        word(3, at=collective(3, "0-3"), counts={"0-3": 3}, number=41),
    ]
    found = blame(words)
    assert found is not None and found.rank == 1


def test_who_waits_nowhere_is_compared_by_counts() -> None:
    """On a GPU the host does not wait in collectives: it has started them and gone on."""
    words = [word(r, counts={GROUP: 9}, collective=collective(9)) for r in range(4)]
    words[3] = word(3, counts={GROUP: 7}, collective=collective(7))
    found = blame(words)
    assert found is not None and found.rank == 3


def test_any_single_culprit_of_any_group_is_found() -> None:
    """Ranks of a random mesh; one stays in user code, the rest run until they wait for it."""
    generator = random.Random(1)
    for _ in range(200):
        world = generator.choice((2, 4, 8))
        culprit = generator.randrange(world)
        words = _hung(generator, world, culprit)
        found = blame(words)
        assert found is not None and found.rank == culprit, (world, culprit, words)


def _hung(generator: random.Random, world: int, culprit: int) -> list[Word]:
    """Each rank goes through one list of collectives, over pairs and over all."""
    groups = [f"0-{world - 1}", *(f"{r}-{r + 1}" for r in range(0, world, 2))]
    program = [generator.choice(groups) for _ in range(40)] + groups * 2
    stop = generator.randrange(30)
    place, counts = [0] * world, [dict.fromkeys(groups, 0) for _ in range(world)]
    at: list[Collective | None] = [None] * world
    for _ in range(len(program) * world * 2):
        for rank in range(world):
            if at[rank] is not None:
                one = at[rank]
                if all(counts[m][one.group] >= one.number for m in one.members):
                    at[rank] = None
                    place[rank] += 1
            elif place[rank] < len(program) and not (rank == culprit and place[rank] >= stop):
                group = program[place[rank]]
                if rank not in members_of(group):
                    place[rank] += 1
                    continue
                counts[rank][group] += 1
                at[rank] = collective(counts[rank][group], group)
    return [
        word(r, at=at[r], counts=counts[r], number=sum(counts[r].values())) for r in range(world)
    ]
