"""The runs that are compared with those of transformers: family, optimizer, data and plan."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.huggingface.tiny import FAMILIES

TOLERANCE = {"float64": 1e-8, "float32": 1e-5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"train.lr": 2e-3, "train.weight_decay": 0.1},
    "sgd": {"train.lr": 0.05, "train.momentum": 0.9, "train.weight_decay": 0.01},
}
#: Families with an auxiliary loss in transformers.
AUXILIARY = ("mixtral", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss", "minimax_m2", "ernie4_5_moe")
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp=2 dp=2 ep=4": {"plan.tp": 2, "plan.dp": 2, "plan.ep": 4, "plan.data": "zero2"},
    "pp=2 cp=2 ep=2": {"plan.pp": 2, "plan.cp": 2, "plan.ep": 2},
}


class Case(NamedTuple):
    """One comparison; `sft`: conversations, with loss on the answers."""

    kind: str
    optimizer: str = "adamw"
    dtype: str = "float64"
    sft: bool = False
    auxiliary: bool = False
    plan: str = "one device"

    def __str__(self) -> str:
        extras = [name for name in ("sft", "auxiliary") if getattr(self, name)]
        plan = [] if self.plan == "one device" else [self.plan.replace(" ", ",")]
        return "-".join([self.kind, self.optimizer, self.dtype, *extras, *plan])


FOUR = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
CASES = [
    *(
        Case(kind, optimizer, dtype)
        for kind in FOUR
        for optimizer in OPTIMIZERS
        for dtype in TOLERANCE
    ),
    *(Case(kind, "adamw", dtype, sft=True) for kind in FOUR for dtype in TOLERANCE),
    *(
        Case("qwen3_moe", optimizer, dtype, auxiliary=True)
        for optimizer in OPTIMIZERS
        for dtype in TOLERANCE
    ),
    *(Case(kind, auxiliary=True) for kind in AUXILIARY),
    *(Case(kind, "sgd", sft=True, auxiliary=True) for kind in ("mixtral", "gpt_oss")),
    *(
        Case(kind, "adamw", sft=True, auxiliary=kind != "deepseek_v3", plan=plan)
        for kind in FOUR
        for plan in list(PLANS)[1:]
    ),
    *(Case(kind) for kind in FAMILIES if kind not in {*FOUR, *AUXILIARY}),
]
