"""Options of `moemesh esft scores`, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moemesh.config.errors import ConfigError, Problem
from moemesh.config.run import RunConfig

DEFAULT_THRESHOLD = 0.2
#: Of models without a shorter limit.
DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class EsftRequest:
    """The options of the verb."""

    data: str
    out: Path
    threshold: float | None = None
    experts_per_layer: int | None = None
    score: Literal["gate", "token"] = "gate"
    seq_len: int | None = None
    samples: int = 32
    svg: Path | None = None
    as_json: bool = False

    def checked(self, config: RunConfig) -> EsftRequest:
        """With its defaults. Raises ConfigError for what cannot be done."""
        wrong: list[Problem] = []

        def refuse(option: str, value: object, message: str, fix: str) -> None:
            wrong.append(
                Problem(code="out-of-range", key=option, value=value, message=message, fix=fix)
            )

        experts = config.model.num_experts
        if not experts:
            message = "the model has no experts: there is nothing to choose from"
            refuse("MODEL", None, message, "train.train_only trains parts of a dense model")
        if self.threshold is not None and self.experts_per_layer is not None:
            message = "a threshold and a number of experts are both given"
            refuse("--experts-per-layer", self.experts_per_layer, message, "give one of them")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            message = f"a share ({self.threshold}) lies above 0 and is at most 1"
            refuse("--threshold", self.threshold, message, f"--threshold {DEFAULT_THRESHOLD}")
        if self.experts_per_layer is not None and experts and self.experts_per_layer > experts:
            message = f"a layer has {experts} experts"
            refuse("--experts-per-layer", self.experts_per_layer, message, f"at most {experts}")
        if wrong:
            raise ConfigError(wrong)
        found = self
        if self.threshold is None and self.experts_per_layer is None:
            found = replace(found, threshold=DEFAULT_THRESHOLD)
        if self.seq_len is None:
            longest = config.model.max_position_embeddings or DEFAULT_SEQ_LEN
            found = replace(found, seq_len=min(DEFAULT_SEQ_LEN, longest))
        return found
