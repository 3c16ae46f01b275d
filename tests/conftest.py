"""One thread and one seed for every test that uses torch; tests without torch stay without it."""

import sys

import hypothesis
import pytest


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)


# Machines are small and shared: how long an example takes says nothing about it.
hypothesis.settings.register_profile("moemesh", deadline=None)
hypothesis.settings.load_profile("moemesh")
