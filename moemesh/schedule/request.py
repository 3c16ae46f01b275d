"""The arguments of ``moemesh schedule``: a name or file, sizes, and costs as texts."""

# Without slow imports: the command line reads its options from this module.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """Schedule to simulate. Costs are texts: a number, or one per stage with commas."""

    name: Annotated[
        str,
        "A schedule, 'search', or a text or CSV file (none with --all).",
        "<NAME>",
    ] = ""
    ranks: Annotated[int | None, "Pipeline ranks."] = None
    microbatches: Annotated[int | None, "Microbatches of a step, all pipes together."] = None
    stages_per_rank: Annotated[int | None, "Chunks of layers per rank."] = None
    forward: Annotated[str, "Time of a microbatch on a rank's layers, or a list per stage."] = "1"
    dgrad: Annotated[str, "Likewise, input-gradient half."] = "1"
    wgrad: Annotated[str, "Likewise, weight-gradient half."] = "1"
    block: Annotated[str | None, "Cost of a forward overlapped with a backward."] = None
    comm: Annotated[str, "Time of a message between two ranks."] = "0"
    run: Annotated[
        Path | None, "Times that a run has measured.", {"names": ("--costs",), "metavar": "RUN"}
    ] = None
    weight_memory: Annotated[str, "Share of the activations that weight gradients need."] = "1"
    num_slices: Annotated[
        int | None, "terapipe: slices of a sequence.", {"names": ("--slices",)}
    ] = None
    window: Annotated[int | None, "Backwards per update."] = None
    max_in_flight: Annotated[
        int | None, "ampnet: maximum number of microbatches in flight.", {"names": ("--in-flight",)}
    ] = None
    memory_cap: Annotated[str | None, "search: most activation per rank."] = None
    relaxed: Annotated[bool, "Leave out wrap-around waits, as some papers do."] = False
