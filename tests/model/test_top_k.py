"""The router's top-k: ties to the lowest id, the same choice as a full stable sort."""

import pytest
import torch

from moemesh.model import router
from moemesh.model.router import stable_top_k, stable_top_k_sort


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_chosen", [1, 3, 8])
def test_top_k_is_the_head_of_a_stable_sort(
    dtype: torch.dtype, num_chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "FEW_SCORES", 0)
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(-3, 4, (200, 8), generator=generator).to(dtype)  # many ties
    fine = torch.randn(200, 8, generator=generator, dtype=dtype)
    special = torch.tensor([[0.0, -0.0, -torch.inf, torch.inf, 0.0, -0.0, 1e-42, -1e-42]]).to(dtype)
    for scores in (coarse, fine, special, -special, torch.zeros(3, 8, dtype=dtype)):
        assert torch.equal(stable_top_k(scores, num_chosen), stable_top_k_sort(scores, num_chosen))


def test_no_tokens() -> None:
    assert stable_top_k(torch.zeros(0, 4), 2).shape == (0, 2)
