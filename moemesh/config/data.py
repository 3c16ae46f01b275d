"""Which text a run reads and how it is cut into sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from moemesh.config.errors import Problem
from moemesh.config.section import SHARE, SIZE, Range, Section

DataFormat = Literal["auto", "text", "jsonl"]
Documents = Literal["ignore", "mask"]

#: Ids that the tokenizer "bytes" produces.
NUM_BYTES = 256


class DataConfig(Section):
    """The data of a run."""

    section: ClassVar[str] = "data"

    #: A file, folder or glob; None reads the running Python's own standard library sources.
    path: str | None = None
    #: auto: jsonl where the path ends so, else text.
    format: DataFormat = "auto"
    #: "bytes", or the folder of a tokenizer.
    tokenizer: str = "bytes"
    #: Several documents in one sequence: "ignore" reads on across their borders; with "mask"
    #: attention stays inside a document, positions begin anew, no token predicts the next document.
    documents: Documents = "ignore"
    #: Tokens of one sequence.
    seq_len: int = 128
    #: Sequences of one step, over all ranks.
    global_batch: int = 32
    #: Share of the samples kept for validation.
    held_out: float = 0.05

    ranges: ClassVar[Mapping[str, Range]] = {
        "seq_len": SIZE,
        "global_batch": SIZE,
        "held_out": SHARE,
    }

    def check(self) -> list[Problem]:
        """Every rule that the section must keep by itself."""
        problems = self.range_problems()
        for name in ("path", "tokenizer"):
            if getattr(self, name) == "":
                problems.append(
                    Problem(
                        code="empty",
                        key=f"data.{name}",
                        value="",
                        message=f"{name} is empty",
                        fix=f"leave {name} out to take the default, or name a file or folder",
                    )
                )
        return problems
