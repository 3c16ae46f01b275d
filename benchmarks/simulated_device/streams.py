"""Streams and events of the simulated device."""

from __future__ import annotations

import torch

from benchmarks.simulated_device.counts import count_wait

#: What every simulated tensor answers.
CUDA = torch.device("cuda", 0)


class Stream:
    """A stream of which every operation has been done."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = CUDA

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        count_wait("Stream.synchronize")


class Event:
    """An event that has happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        count_wait("Event.synchronize")
