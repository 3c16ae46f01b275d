"""Reader of a run folder: all records of a run, finished or not.

Missing files are tolerated; a malformed line or file (a run killed during a write) is left out
and named in `Run.warnings`. Only a folder without any file of a run is an error.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from moemesh.config.data import loss_unit
from moemesh.config.limits import few, parse_json, parse_toml
from moemesh.config.shown import Shown
from moemesh.config.sources import RUN_CONFIG, RUN_PLAN, RUN_STARTS
from moemesh.config.suggest import nearest_path, nearest_run
from moemesh.trace.ledger import Ledger
from moemesh.trace.loads import LayerLoads, LoadBins
from moemesh.trace.memory_profile import MemoryProfiles
from moemesh.trace.provenance import ProvenancePart, parts_of
from moemesh.trace.step_seconds import StepSeconds
from moemesh.trace.strict_json import finite, read_fields
from moemesh.trace.timeline import Timeline

T = TypeVar("T")

#: Files of a run: a line for each step, for each layer with experts at each step, for each event.
METRICS, LOADS, EVENTS = "metrics.jsonl", "loads.jsonl", "events.jsonl"
#: The page of a run, and the report of its newest failure.
REPORT, FAILURE = "report.html", "failure.json"
#: Folder of the reports of earlier failures, and of replay bundles.
FAILURES = "failures"
#: Files of a run; a run folder has at least one of them.
FILES: tuple[str, ...] = (
    *(RUN_CONFIG, RUN_PLAN, METRICS, "ledger.json", "ledger_predicted.json"),
    *("timeline.json", "timeline_simulated.json", "memory.json", LOADS, EVENTS),
    *(FAILURE, "summary.json", "seconds.json"),
)
#: Exceptions of malformed data during the conversion to a trace type.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
#: Version of the rows of `metrics.jsonl`, their key "schema" (0 without the key). A new key keeps
#: the version; a changed meaning of a key raises it.
SCHEMA = 1

#: Required fields of a row of metrics.
_NEEDED = ("step", "tokens", "loss", "grad_norm", "aux_loss", "tokens_per_second", "lr", "seconds")
#: Lines of a JSONL file that are parsed together.
_BLOCK = 256
#: Most earlier failures that are read.
_MOST_FAILURES = 50


class RunError(ValueError):
    """The folder holds no run."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Planned time of a step on a cluster: seconds by part, and their sum."""

    cluster: str
    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsRow:
    """One line of `metrics.jsonl`: one training step.

    `loss` is in nats per token, `aux_loss` the mean over scopes, coefficients included, `mtp_loss`
    the mean over extra prediction layers (None without them), `tokens` are those of this step that
    carry loss, over all ranks, `seconds` its time. On rank 0 (None in older runs): `data_seconds`
    of waiting for the batch, `communication_seconds` of waiting for other ranks (None on one rank
    and on GPUs, whose host does not wait), `memory_bytes`, the peak so far. `tflops_per_rank`:
    10^12 model FLOPs per second of the mean rank; `mfu`: their share of the device's peak (None:
    unknown). `epoch`: passes over the training samples by the end of the step.
    `load_max_over_mean`: fullest expert over the mean in the least balanced layer, and
    `dropped_share` of the choices (None without experts). Numbers that are not finite are written
    as null and read as NaN, so that each line is strict JSON.
    """

    step: int
    loss: float
    grad_norm: float
    aux_loss: float
    tokens: int
    tokens_per_second: float
    lr: float
    seconds: float
    validation_loss: float | None = None
    mtp_loss: float | None = None
    data_seconds: float | None = None
    communication_seconds: float | None = None
    memory_bytes: float | None = None
    tflops_per_rank: float | None = None
    mfu: float | None = None
    epoch: float | None = None
    load_max_over_mean: float | None = None
    dropped_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _STORES}
        shown = {name: v for name, v in values.items() if v is not None or name in _NEEDED}
        return {"schema": SCHEMA, **finite(shown)}

    def to_line(self) -> str:
        """The row on one line, newline included, floats in full precision."""
        return json.dumps(self.to_json(), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MetricsRow:
        """The inverse of :meth:`to_json`; unknown keys are ignored.

        Raises KeyError, TypeError, ValueError or OverflowError for a missing key or another type,
        or for a row of a later version.
        """
        if (schema := int(data.get("schema", 0))) > SCHEMA:
            raise ValueError(f"the row has schema {schema}, this version reads up to {SCHEMA}")
        for name in _NEEDED:
            if name not in data:
                raise KeyError(name)
        # Bypass __init__, and do not convert floats: it halves the time to read a long run.
        row = object.__new__(cls)
        for name, store in _STORES.items():
            value = data.get(name)
            if name in _COUNTS:
                value = int(data[name])
            elif type(value) is not float:
                value = (math.nan if value is None else float(value)) if name in data else None
            store(row, value)
        return row


#: Setter of each field of a row.
_STORES = {item.name: getattr(MetricsRow, item.name).__set__ for item in fields(MetricsRow)}
_COUNTS = ("step", "tokens")


def median_of(rows: Sequence[MetricsRow], name: str) -> float | None:
    """Median of a field over the rows that have it; None without any."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return statistics.median(values) if values else None


#: Least number of steps for a verdict on the losses of a run.
LEAST_STEPS = 40
#: Words in the text of every event about a jump of the loss.
JUMPED = "deviations above the last ones"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of `events.jsonl`: `time` (UTC, ISO 8601), `step` (the last finished one, None
    before the first), `kind` (a word such as "alarm") and `text`."""

    time: str
    step: int | None
    kind: str
    text: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Parses one line; unknown keys are ignored, and so is the kind at the beginning of the
        text. Raises KeyError, TypeError, ValueError or OverflowError."""
        event = read_fields(cls, {"time": "", "step": None, **data})
        return replace(event, text=event.text.removeprefix(f"{event.kind}: "))


def ledgers_to_json(ledgers: Mapping[int, Ledger], *, steps: int = 1) -> dict[str, Any]:
    """The content of `ledger.json`: the ledger of every rank, summed over `steps` steps."""
    ranks = [{"rank": rank, "entries": ledgers[rank].rows()} for rank in sorted(ledgers)]
    return {"steps": steps, "ranks": ranks}


def ledgers_from_json(data: Mapping[str, Any]) -> tuple[dict[int, Ledger], int]:
    """Ledgers by rank, and the number of steps they cover (by default 1).

    Raises KeyError, TypeError, ValueError or OverflowError on other data.
    """
    ledgers: dict[int, Ledger] = {}
    for part in data["ranks"]:
        rank = int(part["rank"])
        if rank in ledgers:
            raise ValueError(f"rank {rank} comes twice")
        ledgers[rank] = Ledger.from_rows(part["entries"])
    steps = int(data.get("steps", 1))
    if steps < 1:
        raise ValueError(f"steps is {steps} < 1")
    return ledgers, steps


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(Shown):
    """Contents of a run folder. Parts without a file are empty or None."""

    folder: Path
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: tuple[MetricsRow, ...] = ()
    ledgers: dict[int, Ledger] = field(default_factory=dict[int, Ledger])
    ledger_steps: int = 1
    predicted_ledgers: dict[int, Ledger] = field(default_factory=dict[int, Ledger])
    timeline: Timeline | None = None
    simulated: Timeline | None = None
    memory: MemoryProfiles | None = None
    seconds: StepSeconds | None = None
    loads: tuple[LayerLoads, ...] = ()
    events: tuple[Event, ...] = ()
    #: Records of the starts of the run, oldest first (`provenance.json`).
    starts: tuple[Mapping[str, Any], ...] = ()
    failure: dict[str, Any] | None = None
    #: Failures that the run recovered from, oldest first (`failures/<epoch>/failure.json`).
    earlier_failures: tuple[Mapping[str, Any], ...] = ()
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    warnings: tuple[str, ...] = ()
    #: Last step in the metrics, the loads, the checkpoints and the summary of the run.
    last_step: int = 0
    #: Not stored; set by a caller that has the cluster.
    planned: PlannedStep | None = None

    def facts(self) -> Mapping[str, object]:
        facts: dict[str, object] = {"folder": str(self.folder), "num_steps": self.num_steps}
        for name in ("step", "loss", "validation_loss", "tokens_per_second"):
            values = [value for row in self.metrics if (value := getattr(row, name)) is not None]
            facts |= {f"last_{name}": values[-1]} if values else {}
        return facts | ({"failure": self.failure} if self.failure else {})

    @property
    def num_steps(self) -> int | None:
        """Configured number of steps; None if it is unset."""
        steps = self.section("train").get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def loss_unit(self) -> str:
        """The unit of losses, as on the console."""
        return loss_unit(self.section("data").get("tokenizer", "bytes"))

    @property
    def unigram_loss(self) -> float | None:
        """Loss of the model that has only the frequency of each token; None if unknown."""
        loss = self.summary.get("unigram_loss")
        return float(loss) if isinstance(loss, int | float) else None

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration; empty if it is missing."""
        part = self.config.get(name)
        return cast(dict[str, Any], part) if isinstance(part, dict) else {}

    @cached_property
    def plans(self) -> tuple[ProvenancePart, ...]:
        """Plans of the run, the current one last: each has the section of the configuration as its
        `record`, and the consecutive steps under it. Another sequence length, batch size, dtype or
        devices begin a new part, too."""
        parts: list[tuple[ProvenancePart, object]] = []
        last = self.metrics[-1].step if self.metrics else 0
        try:
            for start in parts_of(self.starts, last):
                config = parse_toml(start.record["config"])
                part, data = start._replace(record=config["plan"]), config["data"]
                sizes = data.get("seq_len"), data.get("global_batch"), config["train"].get("dtype")
                kind = part.record, sizes, start.record.get("devices")
                if parts and parts[-1][1] == kind:
                    part = part._replace(first=parts.pop()[0].first)
                parts.append((part, kind))
        except _MALFORMED:
            parts = []
        return tuple(part for part, _ in parts) or (ProvenancePart(self.section("plan"), 1, last),)

    @cached_property
    def current(self) -> tuple[MetricsRow, ...]:
        """Rows of the steps under the current plan, without the first one, which builds caches,
        unless it is the only one."""
        rows = tuple(row for row in self.metrics if row.step >= self.plans[-1].first)
        return rows[1:] or rows

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Positions between the steps of two plans, each with the name of the later plan."""
        later = enumerate(self.plans[1:], start=2)
        return [(steps.first - 0.5, f"plan {number}") for number, steps in later]

    @property
    def of_steps(self) -> str:
        """ ", steps 21 to 30" of the current plan; "" if the run has had no other."""
        return f", {self.plans[-1].words}" if len(self.plans) > 1 else ""

    @classmethod
    def load(cls, folder: Path | str) -> Run:
        """Read `folder`. If a step is repeated (after a resume), its last row counts. In a long run
        the loads of neighbouring steps are summed (:class:`LoadBins`), which bounds their memory.

        Raises RunError if the folder does not exist, or has no file of a run.
        """
        try:
            folder = Path(folder)
        except TypeError:
            raise RunError(f"the folder of a run is a path, not {folder!r}") from None
        if not folder.is_dir():
            near = nearest_run(folder) if folder.exists() else nearest_path(folder)
            raise RunError(f"{folder} is not a folder" + (f" ({near})" if near else ""))
        if not any((folder / name).is_file() for name in FILES):
            fix = nearest_run(folder) or "give the folder that `moemesh train` prints"
            raise RunError(f"{folder} holds no run: {fix}")
        reader = _Reader(folder)
        config_text = reader.text(RUN_CONFIG)
        newest = {row.step: row for row in reader.rows(METRICS, MetricsRow.from_json)}
        loads, load_steps = LoadBins(), dict[int, int]()  # last step of a row -> number of steps
        for row in reader.rows(LOADS, LayerLoads.from_json):
            loads.add(row)
            load_steps[row.step] = row.steps
        summary = reader.json("summary.json", _object) or {}
        last_step = max([*newest, *load_steps, newest_checkpoint(folder)], default=0)
        if isinstance(steps := summary.get("steps"), int):
            last_step = max(last_step, steps)
        if text := missing_steps(METRICS, dict.fromkeys(newest, 1), last_step):
            reader.warnings.append(text)
        # Many gaps need no warning: earlier versions recorded the loads of every n-th step only.
        gaps = gaps_of(load_steps, last_step) if load_steps else []
        are_few = 2 * len(gaps) < len(load_steps)
        if are_few and (text := missing_steps(LOADS, load_steps, last_step)):
            reader.warnings.append(text)
        ledgers, ledger_steps = reader.json("ledger.json", ledgers_from_json) or ({}, 1)
        predicted, _ = reader.json("ledger_predicted.json", ledgers_from_json) or ({}, 1)
        # Replay bundles are in the same folder under other names.
        epochs = [path.name for path in folder.glob(f"{FAILURES}/*") if path.name.isdecimal()]
        failures = [
            reader.json(f"{FAILURES}/{epoch}/{FAILURE}", _object)
            for epoch in sorted(epochs, key=int)[-_MOST_FAILURES:]
        ]
        return cls(
            folder=folder,
            config_text=config_text,
            config=reader.parse(RUN_CONFIG, config_text, parse_toml) or {},
            plan=reader.json(RUN_PLAN, _object) or {},
            metrics=tuple(newest[step] for step in sorted(newest)),
            ledgers=ledgers,
            ledger_steps=ledger_steps,
            predicted_ledgers=predicted,
            timeline=reader.json("timeline.json", Timeline.from_json),
            simulated=reader.json("timeline_simulated.json", Timeline.from_json),
            memory=reader.json("memory.json", MemoryProfiles.from_json),
            seconds=reader.json("seconds.json", StepSeconds.from_json),
            loads=loads.all(),
            starts=reader.json(RUN_STARTS, lambda data: tuple(map(_object, data["starts"]))) or (),
            events=tuple(reader.rows(EVENTS, Event.from_json)),
            failure=reader.json(FAILURE, _object),
            earlier_failures=tuple(failure for failure in failures if failure is not None),
            summary=summary,
            warnings=tuple(reader.warnings),
            last_step=last_step,
        )


def recorded(folder: Path, section: str, key: str) -> Any:
    """A key of the configuration of the run in `folder`; None if it is unset or unreadable."""
    try:
        return parse_toml((folder / RUN_CONFIG).read_text(encoding="utf-8"))[section][key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failure(folder: Path) -> dict[str, Any]:
    """The newest failure report of the run in `folder`; empty without a readable one."""
    try:
        return _object(parse_json((folder / FAILURE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint in the folder of a run; 0 without one."""
    names = (path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def gaps_of(rows: Mapping[int, int], last: int, before: int = 0) -> list[range]:
    """Ranges of steps without a row, after `before` up to `last`. `rows`: last step of a row -> its
    number of steps."""
    gaps: list[range] = []
    following = before + 1  # first step after the rows so far
    for step in [*sorted(rows), None]:  # None: after all rows
        first = last + 1 if step is None else step - rows[step] + 1
        if first > following:
            gaps.append(range(following, first))
        following = max(following, first if step is None else step + 1)
    return gaps


def missing_steps(name: str, rows: Mapping[int, int], last: int, before: int = 0) -> str:
    """A sentence on the steps without a row (:func:`gaps_of`); "" if there are none."""
    gaps = gaps_of(rows, last, before)
    shown = [f"{gap[0]:,}" if len(gap) == 1 else f"{gap[0]:,} to {gap[-1]:,}" for gap in gaps]
    count = sum(map(len, gaps))
    steps = "1 step is" if count == 1 else f"{count:,} steps are"
    return f"{name}: {steps} missing ({few(shown, 3)})" if gaps else ""


def read_metrics(folder: Path | str) -> Iterator[MetricsRow]:
    """Yields the rows of a run's `metrics.jsonl` without damaged ones; none if the file is
    missing."""
    return _Reader(Path(folder)).rows(METRICS, MetricsRow.from_json)


class _Reader:
    """Reader of the files of one folder; collects warnings on malformed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []

    def text(self, name: str) -> str:
        """The file's text, "" if it is missing."""
        path = self.folder / name
        if not path.is_file():
            return ""
        # A byte that is not UTF-8 must not hide the rest of the file.
        return path.read_text(encoding="utf-8", errors="replace")

    def parse(self, name: str, text: str, parse: Callable[[str], T]) -> T | None:
        """`text` parsed; None if it is empty, or malformed, which is a warning."""
        if not text:
            return None
        try:
            return parse(text)
        except _MALFORMED as error:
            self.warnings.append(f"{name} is left out: {_reason(error)}")
            return None

    def json(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """The file's JSON object as a trace type, None if it is missing or malformed."""
        return self.parse(name, self.text(name), lambda text: parse(_object(parse_json(text))))

    def rows(self, name: str, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yields the objects of a JSONL file; malformed lines are left out and counted."""
        path = self.folder / name
        if not path.is_file():
            return
        bad: list[str] = []
        first = 1
        with path.open(encoding="utf-8", errors="replace") as file:
            # Blocks of lines are parsed together, which is faster; a damaged one line by line.
            while block := list(itertools.islice(file, _BLOCK)):
                try:
                    rows = [parse(value) for value in parse_json(f"[{','.join(block)}]")]
                except _MALFORMED:
                    rows = []
                if len(rows) != len(block):
                    rows = list[T]()
                    for number, line in enumerate(block, start=first):
                        try:
                            rows += [parse(_object(parse_json(line)))] if line.strip() else []
                        except _MALFORMED as error:
                            half = "" if line.endswith("\n") else " (the last one, half-written)"
                            bad.append(f"line {number}{half}: {_reason(error)}")
                yield from rows
                first += len(block)
        if bad:
            lines = "1 line is" if len(bad) == 1 else f"{len(bad)} lines are"
            self.warnings.append(f"{name}: {lines} left out, first {bad[0]}")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, not {type(value).__name__}")
    return cast(dict[str, Any], value)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) or type(error).__name__


def is_locked(file: Path, *, in_doubt: bool = True) -> bool:
    """Whether a process holds the lock of `file`; False if it cannot be opened. `in_doubt`: the
    answer if its file system refuses locks.

    The check briefly takes a shared lock, so that concurrent checks do not see each other as
    owners.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return in_doubt or isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


#: State of a run. interrupted: it ended without a record (killed, or the machine went down).
State = Literal["finished", "running", "stopped", "failed", "interrupted"]
#: File of a run folder that a running process locks.
LEASE = "lease"


def state_of(run: Run) -> State:
    """State by failure.json, summary.json, the newest step, and the lock of a running process."""
    if run.failure is not None:
        return "failed"
    last = run.metrics[-1].step if run.metrics else None
    ended = run.summary.get("steps")
    # A run writes its summary while it still holds the lock, and a resumed run keeps an older one.
    # So the summary counts if it agrees with the last row of metrics, or if the last event is the
    # end of the run, whose last rows are then lost.
    has_ended = bool(run.events) and run.events[-1].kind in ("finished", "stopped")
    if ended is not None and (last is None or ended == last or has_ended):
        wanted = run.num_steps
        is_short = wanted is not None and ended < wanted and not run.summary.get("early_stop")
        return "stopped" if is_short else "finished"
    return "running" if is_locked(run.folder / LEASE) else "interrupted"
