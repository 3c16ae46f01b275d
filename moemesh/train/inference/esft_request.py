"""Options of `moemesh esft scores`, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from moemesh.config.errors import ConfigError, Problem

if TYPE_CHECKING:  # the command reads this file to know its options
    from moemesh.config.run import RunConfig

DEFAULT_THRESHOLD = 0.2
#: Default length for models without a shorter limit.
DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class EsftRequest:
    """A model, data of a task, and the rule that chooses the experts of the task."""

    source: Annotated[Path, "A run, or a folder of transformers.", "<MODEL>"]
    data: Annotated[str, "Data of the task, as data.path.", "<DATA>"]
    out: Annotated[Path, "The table to write.", "TABLE.json"]
    threshold: Annotated[
        float | None,
        "Choose the most relevant experts of a layer that together reach this share.",
        {"metavar": "P", "show_default": "0.2"},
    ] = None
    experts_per_layer: Annotated[int | None, "Or: this number in every layer.", {"min": 1}] = None
    score: Annotated[
        Literal["gate", "token"], "Relevance: mean gate score, or share of the tokens' choices."
    ] = "gate"
    seq_len: Annotated[
        int | None,
        "Tokens of a window, at most the positions of the model.",
        {
            "tokens": True,
            "metavar": "S",
            "show_default": "4096, or the positions of the model where they are fewer",
        },
    ] = None
    samples: Annotated[int, "Most windows to read.", {"metavar": "N", "min": 1}] = 32
    svg: Annotated[Path | None, "Draw the scores.", "FILE"] = None
    best: Annotated[
        bool, "Read the checkpoint of a run with the lowest validation loss, not the newest."
    ] = False

    def checked(self, config: RunConfig) -> Self:
        """The request with its defaults. Raises ConfigError for invalid options."""
        problems: list[Problem] = []

        def refuse(option: str, value: object, message: str, fix: str) -> None:
            problems.append(Problem.of("out-of-range", option, value, message, fix))

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
        if problems:
            raise ConfigError(problems)
        request = self
        if self.threshold is None and self.experts_per_layer is None:
            request = replace(request, threshold=DEFAULT_THRESHOLD)
        if self.seq_len is None:
            longest = config.model.max_position_embeddings or DEFAULT_SEQ_LEN
            request = replace(request, seq_len=min(DEFAULT_SEQ_LEN, longest))
        return request
