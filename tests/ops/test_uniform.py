"""Counter-based uniform numbers: the loop, the range, and no dependence on anything but keys."""

import torch

from moemesh.ops.uniform import uniform, uniform_loop


def test_is_the_loop() -> None:
    tokens, experts = torch.arange(20)[:, None] * 12345678901, torch.arange(7)
    numbers = uniform(2**63 - 1, 5, tokens, experts)
    assert numbers.dtype == torch.float32 and numbers.shape == (20, 7)
    expected = [
        [uniform_loop(2**63 - 1, 5, token, expert) for expert in range(7)]
        for token in tokens.flatten().tolist()
    ]
    assert numbers.tolist() == expected
    assert uniform(1, 2) == uniform_loop(1, 2) != uniform_loop(2, 1)


def test_is_uniform_and_unrelated_to_its_neighbours() -> None:
    x = uniform(0, torch.arange(1000)[:, None], torch.arange(100)).double()
    assert x.min() >= 0 and x.max() < 1
    # 100,000 numbers: standard errors are 9e-4 (mean), 2.4e-4 (variance), 3e-3 (correlation).
    assert abs(x.mean() - 0.5) < 5e-3 and abs(x.var() - 1 / 12) < 1.5e-3
    for shifted in (x[1:, :] - 0.5, (x[:-1, :] - 0.5)):
        assert abs(shifted.mean()) < 5e-3
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 2e-2
    counts = torch.histc(x, 20, 0, 1) / x.numel()
    assert (counts - 0.05).abs().max() < 4e-3
