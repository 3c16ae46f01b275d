"""Seconds of the parts of a step on a CPU: which module runs, and when the rank waits for others.

Forward hooks mark the begin and the end of a module. Hooks on its output and its input, which are
called when their gradients are complete, mark its backward. Waits for other ranks come from
:mod:`moemesh.monitor.progress`. A GPU runs later than its host, so nothing is measured there.

Legend: T tokens of a microbatch.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moemesh.model.moe import MoE
from moemesh.model.transformer import Layer, Output, Transformer
from moemesh.monitor import progress
from moemesh.trace import step_seconds as parts
from moemesh.trace.timeline import COMMUNICATION, PASS_KINDS, TimelineRecorder

#: Largest number of waits that a step adds to the timeline of a rank: the longest ones.
_MAX_WAITS = 400
#: Name of a record outside of the passes -> part of the step that it belongs to.
_SPANS = {"data": parts.DATA, "reduce": parts.OPTIMIZER, "optimizer": parts.OPTIMIZER}


class StepClock:
    """Measures the steps of one rank from its construction on."""

    def __init__(self, model: Transformer) -> None:
        #: (time, part that begins), in order, of the step that is running.
        self._marks: list[tuple[float, str]] = []
        self._part = parts.REST
        #: Seconds of each part, summed over `_steps` measured steps.
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        #: Number of the second step of the process, from which on the sums count; 0 before it.
        self._first = 0
        #: Parts that a step has, unless layers run in segments, which call no module.
        self._expected: set[str] = set()
        for layer in model.modules():
            if isinstance(layer, Layer):
                is_moe = isinstance(layer.feed_forward, MoE)
                self._watch(layer.attention, parts.ATTENTION)
                self._watch(layer.feed_forward, parts.EXPERTS if is_moe else parts.DENSE_MLPS)
        if model.norm is not None:
            # A head follows the norm after the last layer, and that after each extra prediction
            # layer; it has no module of its own.
            for norm in (model.norm, *model.ahead_norms.values()):
                norm.register_forward_pre_hook(partial(self._begin, parts.HEAD))
            model.register_forward_hook(self._end_of_losses)
        progress.on_wait(self._waited)

    def _watch(self, module: nn.Module, part: str) -> None:
        """Mark `part` from the begin to the end of the module's forward, and from the gradient of
        its output to that of its input."""
        self._expected.add(part)
        module.register_forward_pre_hook(partial(self._begin, part))
        module.register_forward_hook(partial(self._end, part))

    def _begin(self, part: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._mark(part)
        self._at_gradient(inputs, parts.REST)

    def _end(self, part: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._mark(parts.REST)
        self._at_gradient(output, part)

    def _end_of_losses(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._mark(parts.REST)
        if isinstance(output, Output):
            self._at_gradient(output.losses_T, parts.HEAD)

    def _at_gradient(self, tree: Any, part: str) -> None:
        """Mark `part` when the gradient of the first tensor of `tree` that has one is complete."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._mark(part))
                return

    def _mark(self, part: str) -> None:
        self._part = part
        self._marks.append((time.monotonic(), part))

    def _waited(self, axis: str, start: float, end: float) -> None:
        self._marks += [(start, parts.communication(axis)), (end, self._part)]

    def finish_step(self, recorder: TimelineRecorder, step: int, seconds: float) -> None:
        """Add the parts of step `step`, which took `seconds`; record its waits in `recorder`."""
        marks, self._marks, self._part = self._marks, [], parts.REST
        records = [r for r in recorder.timeline().records if r.step in (step, None)]
        passes = sorted({(r.start, r.end) for r in records if r.kind in PASS_KINDS})
        if not passes or type(recorder) is not TimelineRecorder:  # steps of a stream overlap
            return
        segments = [(part, start, end) for (start, part), (end, _) in pairwise(marks)]
        waits = [segment for segment in segments if parts.is_communication(segment[0])]
        sums: defaultdict[str, float] = defaultdict(float)
        for part, start, end in segments:
            is_wait = parts.is_communication(part)
            sums[part] += end - start if is_wait else _overlap(start, end, passes)
        for record in records:
            if (part := _SPANS.get(record.name)) is not None:
                span = [(record.start, record.end)]
                inside = sum(_overlap(start, end, span) for _, start, end in waits)
                sums[part] += record.duration - inside
        has_parts = bool(self._expected) and all(sums[part] for part in self._expected)
        if not has_parts or any(record.kind == "W" for record in records):
            # Only the sum of the passes: delayed weight gradients (W), for one, run in no module.
            waited = sum(_overlap(start, end, passes) for _, start, end in waits)
            together = sum(end - start for start, end in passes) - waited
            sums = defaultdict(float, {k: v for k, v in sums.items() if k not in parts.PASSES})
            sums[parts.TOGETHER] = together
        # The rest is what the other parts leave of the step.
        sums[parts.REST] = 0.0
        sums[parts.REST] = max(seconds - sum(sums.values()), 0.0)
        for part, start, end in sorted(waits, key=lambda wait: wait[1] - wait[2])[:_MAX_WAITS]:
            recorder.add(name=part, start=start, end=end, kind=COMMUNICATION, step=step)
        if self._steps == 1 and not self._first:
            # The first step of a process builds caches: it leaves the sums.
            self._sums.clear()
            self._steps, self._first = 0, step
        self._steps += 1
        for part, amount in sums.items():
            self._sums[part] += amount

    def result(self) -> tuple[int, dict[str, float]]:
        """Number of measured steps, and the mean seconds of each part."""
        steps = max(self._steps, 1)
        return self._steps, {part: amount / steps for part, amount in self._sums.items() if amount}


def _overlap(start: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Length of the intersection of an interval with sorted disjoint intervals."""
    shared, index = 0.0, max(bisect_left(spans, (start, start)) - 1, 0)
    while index < len(spans) and spans[index][0] < end:
        shared += max(min(end, spans[index][1]) - max(start, spans[index][0]), 0.0)
        index += 1
    return shared
