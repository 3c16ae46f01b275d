"""Every test starts alike: one thread, one seed; of long grids the default takes a sample."""

import sys
from collections import Counter

import hypothesis
import pytest


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


# Machines are small and shared: how long an example takes says nothing about it.
hypothesis.settings.register_profile("moemesh", deadline=None, max_examples=30)
hypothesis.settings.load_profile("moemesh")


#: Grids of whole training runs: by default every n-th case of each test, all with ``-m slow``.
SAMPLED = {
    "tests/parity/test_asynchronous.py": 4,
    "tests/parity/test_balancing.py": 4,
    "tests/parity/test_exact.py": 4,
    "tests/parity/test_experts.py": 4,
    "tests/parity/test_losses.py": 4,
    "tests/parity/test_parity.py": 3,
    "tests/parity/test_pipelines.py": 3,
    "tests/parity/test_recompute.py": 4,
    "tests/parity/test_terapipe.py": 4,
    "tests/parity/test_tiny.py": 2,
    "tests/parallel/test_dispatchers.py": 3,
    "tests/parallel/test_overlapped.py": 2,
    "tests/parallel/test_post_validation.py": 5,
    "tests/parallel/test_self_test.py": 2,
    "tests/planner/test_search.py": 2,
    "tests/schedule/test_check.py": 2,
    "tests/schedule/test_generators.py": 4,
    "tests/schedule/test_search.py": 4,
    "tests/schedule/test_simulate.py": 2,
    "tests/train/test_balancing.py": 3,
    "tests/train/test_post_validated.py": 3,
    "tests/train/test_train.py": 2,
    "tests/twins/test_planner_runs.py": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the sample leaves out; tests without parameters always run."""
    places: Counter[str] = Counter()
    for item in items:
        every = SAMPLED.get(item.nodeid.split("::")[0])
        if every is None or "[" not in item.name or item.get_closest_marker("slow"):
            continue
        function = item.nodeid.split("[")[0]
        if places[function] % every:
            item.add_marker(pytest.mark.slow)
        places[function] += 1
