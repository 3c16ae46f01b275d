"""All tests of transformers' models use one cache of architectures."""

import pytest


@pytest.fixture(autouse=True)
def _architectures(architectures: None) -> None:
    pass
