"""Settings of benchmarks that do not fit together are refused before a rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.settings import (
    BalancersSettings,
    DeviceSettings,
    DispatchSettings,
    LayerSettings,
    LoadSettings,
    MemorySettings,
    ReplicasSettings,
    StepSettings,
)
from moemesh.bench.settings import LinksSettings, Settings
from moemesh.config.errors import UserError

SMALL = {"ranks_per_node": 2, "experts": 16, "top_k": 3}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (BalancersSettings, {"experts": 32, "ranks": 5}, r"ranks \(5\) must divide experts \(32\)"),
        (DeviceSettings, {"shape": "tiny", "ranks": 3}, r"ranks \(3\) must divide experts \(4\)"),
        (DispatchSettings, {"dispatcher": "hierarchial"}, "no dispatcher .*hierarchical"),
        (DispatchSettings, {"mode": "forward"}, "no mode 'forward'.*moe_fwd_bwd"),
        (DispatchSettings, {"payload": "fp4"}, "no payload 'fp4'.*fp8"),
        (DispatchSettings, SMALL | {"ranks": 6}, r"ranks \(6\) must divide experts \(16\)"),
        (DispatchSettings, {"ranks_per_node": 3}, r"ranks-per-node \(3\) must divide ranks \(4\)"),
        (DispatchSettings, {"hosts": 3, "experts": 12}, r"hosts \(3\) must divide ranks \(4\)"),
        (DispatchSettings, {"hosts": 2, "ranks_per_node": 4}, "are not ranks-per-node 4"),
        (DispatchSettings, {"hosts": 2, "link": "fast"}, "link 'fast' must be a rate"),
        (DispatchSettings, {"workload": "W0,W8"}, "no workload 'W8'"),
        (DispatchSettings, SMALL | {"top_k": 17}, r"top-k \(17\)"),
        (LayerSettings, {"shape": "tiny", "ranks": "1,x"}, "1,x"),
        (LayerSettings, {"shape": "tiny", "ranks": "0"}, "0"),
        (LayerSettings, {"shape": "tiny", "ranks": "3"}, "3"),
        (LayerSettings, {"workload": "W9"}, r"no workload 'W9' here:\n  W0     all experts evenly"),
        (LinksSettings, {"ranks": 1}, "joins at least 2"),
        (LinksSettings, {"operations": "all_gather,broadcst"}, "no operation 'broadcst'"),
        (LinksSettings, {"sizes": "4m,many"}, "'many' must be a size"),
        (LinksSettings, {"sizes": ","}, "at least one"),
        (LinksSettings, {"device": "tpu"}, "choose from cpu, cuda"),
        (LinksSettings, {"device": "cuda", "hosts": 2}, "on the CPU"),
        (LoadSettings, {"tp": 3}, r"tp \(3\) must divide ranks \(4\)"),
        (LoadSettings, {"ranks": 3}, r"ranks / tp \(3\) must divide 32 experts"),
        (LoadSettings, {"ranks": 16, "tp": 8}, r"tp \(8\) must divide 4 key heads"),
        (MemorySettings, {"servers": 4}, "at most 3"),
        (MemorySettings, {"hidden": 10}, "must divide"),
        (MemorySettings, {"sequences": 3}, r"\(4\)"),
        (MemorySettings, {"strategy": "zero4"}, "zero4"),
        (ReplicasSettings, {"ranks": "3"}, "divide 32"),
        (ReplicasSettings, {"ranks": "1"}, "nowhere"),
        (ReplicasSettings, {"workload": "W9"}, "W9"),
        (ReplicasSettings, {"spare_slots": 0}, "at least 1"),
        (StepSettings, {"plan": "dp=2", "work": "generate"}, "one rank"),
        (StepSettings, {"hidden": 96}, "hidden"),
        (StepSettings, {"plan": "dp=4", "sequences": 6}, "sequences"),
    ],
)
def test_settings_that_do_not_fit(
    kind: type[Settings], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        kind(**options)
