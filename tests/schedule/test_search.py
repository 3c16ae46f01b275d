"""The automatic scheduler: never worse than a hand-made schedule, optimal where one can count."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moemesh.schedule.action import linear, looped, v_shape
from moemesh.schedule.build import build
from moemesh.schedule.check import Caps, check
from moemesh.schedule.costs import Costs
from moemesh.schedule.held_activations import peak_memory
from moemesh.schedule.search import SearchResult, search
from moemesh.schedule.search.bound import lower_bound, shortest_times
from moemesh.schedule.search.greedy import greedy, policies
from moemesh.schedule.search.improve import critical_blocks, evaluated, improve
from moemesh.schedule.search.problem import Objective, SearchProblem, SearchQuestion
from moemesh.schedule.simulate import simulate
from moemesh.schedule.text import to_text

#: Hand-made schedules with one copy of the weights, by stages per rank.
ONE_COPY = {1: ("gpipe", "1f1b", "zb_h1", "zb_h2"), 2: ("zb_v", "dualpipe_v", "interleaved_1f1b")}


def random_costs(random_: random.Random, stages: int) -> Costs:
    """Stages that differ, messages that differ; sometimes equal, sometimes free."""
    spread = random_.choice([0, 0.2, 1, 3])

    def times() -> list[float]:
        return [random_.uniform(0.5, 1.5) + random_.uniform(0, spread) for _ in range(stages)]

    slow = random_.choice([0, 0.1, 1.0])
    return Costs(
        forward=times(),
        input_gradient=times(),
        weight_gradient=times(),
        message=[random_.uniform(0, slow) for _ in range(stages - 1)],
    )


def best_hand_made(
    ranks: int,
    microbatches: int,
    costs: Costs,
    cap: float | None,
    objective: Objective,
    chunks: int,
) -> float:
    """Simulated here, not taken from the result."""
    best = math.inf
    for name in ONE_COPY[chunks]:
        try:
            stages_per_rank = chunks if name == "interleaved_1f1b" else 1
            schedule = build(name, ranks, microbatches, stages_per_rank=stages_per_rank)
        except ValueError:
            continue
        peaks = [peak.activation for peak in peak_memory(schedule)]
        if cap is None or max(peaks) <= cap:
            best = min(best, getattr(simulate(schedule, costs), objective))
    return best


def verify(result: SearchResult, costs: Costs, cap: float | None) -> None:
    check(result.schedule, Caps(activation=cap))
    assert result.cost == getattr(simulate(result.schedule, costs), result.objective)
    assert result.lower_bound <= result.cost
    assert result.proven == (result.cost == result.lower_bound)
    assert all(result.cost <= cost for cost in result.hand_made.values())


@pytest.mark.parametrize(
    "seed",
    [1, 2, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 3, 4, *range(1000, 1200)))],
)
def test_never_worse_than_hand_made(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, microbatches = random_.randint(1, 8), random_.randint(1, 24)
    chunks = random_.choice([1, 1, 2])
    cap = random_.choice([None, ranks, 2 * ranks, random_.randint(1, 2 * ranks)])
    objective: Objective = random_.choice(["span", "makespan"])
    costs = random_costs(random_, ranks * chunks)
    result = search(
        ranks, microbatches, costs, memory_cap=cap, objective=objective, stages_per_rank=chunks
    )
    verify(result, costs, cap)
    hand_made = best_hand_made(ranks, microbatches, costs, cap, objective, chunks)
    assert result.cost <= hand_made
    assert min(result.hand_made.values(), default=math.inf) == hand_made


def all_orders(problem: SearchProblem, rank: int) -> Iterator[list[int]]:
    """Every order of a rank that keeps precedence there and memory."""
    stages, m = problem.num_stages, problem.num_microbatches
    counts, letters = [0] * (3 * stages), list[int]()

    def grow() -> Iterator[list[int]]:
        if len(letters) == 3 * m * len(problem.stages[rank]):
            operations = problem.operations(rank, letters)
            if operations is not None:
                yield operations
            return
        for kind, stage in itertools.product(range(3), problem.stages[rank]):
            letter = kind * stages + stage
            if counts[letter] < (m if kind == 0 else counts[letter - stages]):
                counts[letter] += 1
                letters.append(letter)
                yield from grow()
                letters.pop()
                counts[letter] -= 1

    return grow()


def brute_force(problem: SearchProblem) -> float:
    """The best of all orders."""
    choices = [list(all_orders(problem, rank)) for rank in range(problem.num_ranks)]
    evaluations = map(problem.evaluate, map(list, itertools.product(*choices)))
    return min(times.cost for times in evaluations if times is not None)


def problem_of(
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    cap: float | None,
    kept: float = 1,
    objective: Objective = "span",
) -> SearchProblem:
    ranks = max(placement) + 1
    question = SearchQuestion(
        num_ranks=ranks,
        num_microbatches=microbatches,
        costs=costs,
        caps=(math.inf if cap is None else cap,) * ranks,
        activation=1,
        weight_memory=kept,
        objective=objective,
    )
    return SearchProblem(question, placement)


def bound_of(problem: SearchProblem) -> float:
    m, stages = problem.num_microbatches, problem.num_stages
    split = [
        min(problem.cost[op + kind * stages * m] for op in range(stage * m, stage * m + m))
        for kind in (1, 2)
        for stage in range(stages)
    ]
    full = [a + b for a, b in zip(split[:stages], split[stages:], strict=True)]
    return lower_bound(problem, shortest_times(problem, full))


#: (ranks, microbatches, stages per rank).
SMALL = [(2, 2, 1), (2, 3, 1), (3, 2, 1), (4, 1, 1), (2, 1, 2)]
LARGER = [(3, 3, 1), (2, 4, 1), (4, 2, 1), (3, 1, 2), (2, 1, 3)]


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(s, marks=pytest.mark.slow) for s in range(300, 330))]
)
def test_equals_the_optimum_of_small_cases(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, microbatches, chunks = random_.choice(SMALL if seed < 300 else LARGER)
    costs = random_costs(random_, ranks * chunks)
    kept = random_.choice([1, 0.5, 0.3, 0])
    cap = random_.choice([1, 1 + kept, 1.5, 2, 3, None])
    objective: Objective = random_.choice(["span", "makespan"])
    best = math.inf
    for placement in {v_shape(ranks, chunks), looped(ranks, chunks)}:
        problem = problem_of(placement, microbatches, costs, cap, kept, objective)
        optimum = brute_force(problem)
        assert bound_of(problem) <= optimum * (1 + 1e-9)
        best = min(best, optimum)
    result = search(
        ranks,
        microbatches,
        costs,
        memory_cap=cap,
        weight_memory=kept,
        objective=objective,
        stages_per_rank=chunks,
    )
    assert result.cost == pytest.approx(best, rel=1e-9)
    assert result.proven


@pytest.mark.parametrize("seed", range(10))
def test_exact_results_do_not_depend_on_the_heuristic(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branch and bound finds the optimum without help, from the worst start."""
    import moemesh.schedule.search as package

    random_ = random.Random(seed)
    ranks, microbatches = random_.choice([(2, 5), (3, 4), (4, 3), (2, 8)])
    costs = random_costs(random_, ranks)
    cap = random_.choice([ranks, ranks + 1, None])
    expected = search(ranks, microbatches, costs, memory_cap=cap, stages_per_rank=1)
    monkeypatch.setattr(package, "improve", lambda problem, start, **_: start)
    monkeypatch.setattr(package, "policies", lambda problem: list(policies(problem))[:1])
    alone = search(ranks, microbatches, costs, memory_cap=cap, stages_per_rank=1, effort=5)
    assert expected.proven and alone.proven
    assert alone.cost == pytest.approx(expected.cost, rel=1e-9)


def test_memory_of_zb_h2_gives_no_bubble_and_that_of_zb_h1_a_smaller_one() -> None:
    for ranks, microbatches in ((4, 12), (8, 24)):
        free = search(ranks, microbatches, memory_cap=2 * ranks, stages_per_rank=1)
        assert free.cost == 3 * microbatches and free.proven
        tight = search(ranks, microbatches, memory_cap=ranks, stages_per_rank=1)
        assert tight.cost <= tight.hand_made["zb_h1"]


def test_it_beats_every_hand_made_schedule_on_uneven_stages() -> None:
    costs = Costs(forward=[1, 2, 1, 1], input_gradient=[1, 2, 1, 1], message=0.5)
    result = search(4, 8, costs, memory_cap=4)
    verify(result, costs, 4)
    assert result.cost == 40 and result.proven
    assert min(result.hand_made.values()) == 44
    assert result.origin in ("greedy", "improved", "exact")


def test_two_stages_a_rank_compete_where_costs_fit_them() -> None:
    numbers = search(4, 12, memory_cap=4)
    assert numbers.cost == 36 and numbers.proven
    assert {"zb_v", "zb_h1"} <= set(numbers.hand_made)
    lists = search(4, 12, Costs(forward=[1] * 4), memory_cap=4, effort=0.2)
    assert "zb_v" not in lists.hand_made and lists.schedule.num_stages == 4
    eight = search(4, 12, Costs(forward=[0.5] * 8), memory_cap=4, effort=0.2)
    assert "zb_v" in eight.hand_made and eight.schedule.num_stages == 8


def test_cheap_blocks_and_full_backwards_do_not_fool_the_bound() -> None:
    blocks = Costs(overlapped=2)
    result = search(2, 12, blocks, effort=0.2)
    verify(result, blocks, None)
    assert result.origin == "dualpipe_v" and result.cost < 36
    full = Costs(backward=1.5)
    result = search(2, 8, full, stages_per_rank=1, effort=0.2)
    verify(result, full, None)
    assert result.cost <= min(result.hand_made.values())
    unknown = Costs(overlapped=lambda entry: 0.1)
    verify(search(2, 12, unknown, effort=0.2), unknown, None)


def test_the_result_depends_on_the_arguments_alone() -> None:
    costs = random_costs(random.Random(5), 4)
    first, second = (search(4, 9, costs, memory_cap=4) for _ in range(2))
    assert to_text(first.schedule) == to_text(second.schedule)
    assert replace(first, schedule=second.schedule) == second


def test_caps_for_each_rank() -> None:
    result = search(3, 6, memory_cap=[4, 2, 1], effort=0.2)
    peaks = [peak.activation for peak in check(result.schedule).peaks]
    assert all(peak <= cap for peak, cap in zip(peaks, (4, 2, 1), strict=True))


def test_one_microbatch_at_a_time_is_the_least_memory() -> None:
    for chunks in (1, 2, 3):
        result = search(3, 4, memory_cap=1, stages_per_rank=chunks)
        check(result.schedule, Caps(activation=1))


def test_a_large_case_still_answers() -> None:
    result = search(16, 64, memory_cap=16, effort=0.2)
    check(result.schedule, Caps(activation=16))
    assert result.cost <= min(result.hand_made.values())


@pytest.mark.parametrize(
    "numbers, options, message",
    [
        ((0, 4), {}, "at least 1, got 0 and 4"),
        ((4, 0), {}, "at least 1, got 4 and 0"),
        (
            (64, 20000),
            {},
            "would order up to 7680000 operations, more than 200000 (nearest: microbatches 520)",
        ),
        ((4, 4), {"memory_cap": 0.5}, "memory_cap 0.5 of rank 0 is below one microbatch"),
        ((4, 4), {"memory_cap": [4, 4]}, "memory_cap has 2 caps for 4 ranks"),
        ((4, 4), {"stages_per_rank": 0}, "must be numbers of at least 1"),
        ((4, 4), {"costs": Costs(forward=[1, 2, 3])}, "3 costs for 4 stages"),
        ((4, 4), {"costs": Costs(forward=-1)}, "forward is -1"),
        ((4, 4), {"objective": "speed"}, "choices: span, makespan"),
        ((4, 4), {"memory_cap": math.nan}, "memory_cap must be a number of at least 0, not nan"),
        ((4, 4), {"effort": -1}, "effort must be a number of at least 0, not -1"),
    ],
)
def test_impossible_questions(
    numbers: tuple[int, int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        search(*numbers, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_evaluation_equals_the_simulator() -> None:
    for seed in range(6):
        random_ = random.Random(seed)
        placement = random_.choice([linear(4), v_shape(4), looped(2, 3)])
        costs = random_costs(random_, len(placement))
        problem = problem_of(placement, 6, costs, random_.choice([2, 4, None]))
        for policy in itertools.islice(policies(problem), 0, None, 7):
            letters = greedy(problem, policy)
            assert letters is not None
            state = evaluated(problem, letters)
            assert state is not None
            simulation = simulate(problem.schedule("x", letters), costs)
            assert state.times.cost == simulation.span
            assert problem.letters(simulation.schedule) == letters
            assert bound_of(problem) <= state.times.cost * (1 + 1e-9)


def test_the_longest_path_is_cut_in_blocks() -> None:
    problem = problem_of(linear(2), 3, Costs(message=1), None)
    letters = problem.letters(build("1f1b", 2, 3))
    assert letters is not None
    state = evaluated(problem, letters)
    assert state is not None
    times = state.times
    for rank, first, last in critical_blocks(problem, state):
        ops = state.operations[rank][first : last + 1]
        assert len(ops) > 1
        assert all(times.ends[a] == times.starts[b] for a, b in itertools.pairwise(ops))


def test_improvement_never_worsens_and_stops_at_the_target() -> None:
    problem = problem_of(linear(4), 8, Costs(), None)
    letters = problem.letters(build("1f1b", 4, 8))
    assert letters is not None
    start = evaluated(problem, letters)
    assert start is not None
    better = improve(problem, start, budget=400, target=bound_of(problem))
    assert better.times.cost < start.times.cost
    assert evaluated(problem, better.letters) is not None
    assert improve(problem, start, budget=400, target=start.times.cost) is start


@pytest.mark.slow
def test_more_cuts_find_no_less() -> None:
    """ZB-2p of arXiv:2401.10241, table 5: 6.2B on 8 ranks, 24 microbatches, 0.29 % of bubble."""
    costs = Costs(forward=29.718, input_gradient=29.444, weight_gradient=19.927, message=0.527)
    one, both = (
        search(8, 24, costs, memory_cap=16, weight_memory=0.5, stages_per_rank=cuts).cost
        for cuts in (1, (1, 2))
    )
    busy = 24 * (29.718 + 29.444 + 19.927)
    assert both <= one and 1 - busy / both <= 0.0029
