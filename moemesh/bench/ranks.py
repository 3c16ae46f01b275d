"""One benchmark on several ranks: started here, or joined where torchrun started them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moemesh.bench import hosts
from moemesh.bench.settings import BenchError, HostSettings, Settings
from moemesh.comm import cuda, launch
from moemesh.trace.machine import keep_freed_memory
from moemesh.watch.supervisor import python_command

#: A benchmark that takes longer is stopped.
TIMEOUT_SECONDS = 1200.0


def on_ranks(
    command: Sequence[str],
    settings: Settings,
    measure: Callable[[launch.Ranks], Any],
    *,
    num_ranks: int,
    found: Path | None,
    device: launch.Device = "cpu",
) -> Any | None:
    """The result of `measure` on rank 0 of `num_ranks` ranks (0: as many as torchrun started).

    The result is made of JSON's types. A process that is a rank measures itself: rank 0 returns
    the result, or writes it to `found`; all others return None. Any other process starts the ranks
    with `command` (a module and its first arguments), the settings and a file for `found`. A rank
    that fails ends this process with its exit code.
    """
    if launch.joined():
        ranks = launch.start(device, TIMEOUT_SECONDS)
        keep_freed_memory()
        if num_ranks and ranks.world_size != num_ranks:
            raise BenchError(f"{ranks.world_size} ranks were started for ranks = {num_ranks}")
        result = measure(ranks)
        launch.stop()
        if ranks.rank == 0 and found is not None:
            found.write_text(json.dumps(result))
        return result if ranks.rank == 0 and found is None else None
    with tempfile.TemporaryDirectory(prefix="moemesh-bench-") as folder:
        file = Path(folder) / "found.json"
        command = python_command(*command, *settings.words(), "--found", str(file))
        if isinstance(settings, HostSettings) and settings.hosts:
            with hosts.hosts(settings.hosts, settings.link) as names:
                hosts.run_ranks(
                    names,
                    ranks_per_host=settings.node,
                    command=command,
                    timeout=TIMEOUT_SECONDS,
                )
        else:
            cuda.check(device, num_ranks)
            if code := launch.launch(num_ranks, [], entry=command[1:]):
                raise SystemExit(code)
        return json.loads(file.read_text())
