"""The machine as Linux shows it to a process, with an answer where a system shows less.

Only this module reads ``/proc`` and calls the C library. No function raises because the system
lacks something; each says what it then answers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The cgroups of a machine, and the file that names those of this process.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: A folder in memory, where there is one, and what the driver of Nvidia shows of its GPUs.
SHARED_MEMORY, NVIDIA_DRIVER = Path("/dev/shm"), Path("/proc/driver/nvidia")

#: Environment that limits how long idle OpenMP threads spin, read when torch loads OpenMP. Threads
#: that spin without a limit make a step up to 40 times slower when another process needs the core;
#: threads that sleep at once make it a quarter slower on quiet cores. GNU OpenMP takes the number
#: of spins, other implementations the policy (measured, docs/results/step.md).
OPENMP_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set :data:`OPENMP_WAITING` in `environment`, unless it sets one of the variables itself."""
    if not OPENMP_WAITING.keys() & environment.keys():
        environment.update(OPENMP_WAITING)


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and the CPU quota of its cgroups, at least
    1; all of the machine's where nothing restricts them."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *map(int, _cpu_quotas())]))


def _cpu_quotas() -> Iterator[float]:
    """The limits of this process's cgroups and of those above them, in cores; versions 1 and 2."""
    for line in _text(str(OWN_CGROUPS)).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / ("cpu" if controllers else "")
        # In a container the path is that of the host: its part that exists counts, and the root.
        below = root / path.lstrip("/")
        for folder in {root, *(one for one in (below, *below.parents) if root in one.parents)}:
            with suppress(ValueError, IndexError):
                if controllers:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    quota, period = (float(_text(str(folder / name))) for name in names)
                else:
                    quota, period = map(float, _text(str(folder / "cpu.max")).split())
                if quota > 0 and period > 0:
                    yield quota / period


def processor() -> str:
    """The model of the processor; its architecture where the system names no model."""
    found = _fields("/proc/cpuinfo").get("model name", "")
    return found or platform.processor() or platform.machine()


def boot_name() -> str:
    """A name of this start of this machine, which tells machines apart: hosts may share a name, and
    containers a machine. The host's name where there is none."""
    return _text("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def process_namespace() -> str:
    """Equal for processes that see one another; "" where all processes of a machine do."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def available_bytes() -> int:
    """Memory that processes of this machine can still take, in bytes; no bound where it is not
    known."""
    found = 1 << 62
    with suppress(ValueError, KeyError):
        found = _kilobytes("/proc/meminfo", "MemAvailable") * 1024
        limit, used = (_text(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        found = min(found, max(int(limit) - int(used), 0))
    return found


def process_state(pid: int) -> tuple[str, float]:
    """State (a letter) and CPU seconds of a process; ("", 0) where they are not known."""
    with suppress(OSError, IndexError, ValueError):
        fields = _stat(pid)
        ticks = int(fields[11]) + int(fields[12])
        return fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def zombie_exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended and that its parent has not asked about yet; None
    where it is not known."""
    with suppress(OSError, IndexError, ValueError):
        fields = _stat(pid)
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" else None
    return None


def peak_growth() -> Callable[[], int | None]:
    """A function for later: the most bytes by which the resident memory of this process has grown
    since now, mapped files included; None where the system does not say."""
    status = "/proc/self/status"
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _kilobytes(status, "VmRSS")
    except (OSError, KeyError, ValueError):
        return lambda: None
    return lambda: max(_kilobytes(status, "VmHWM") - before, 0) * 1024


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks instead of handing them back to the kernel; whether it could.

    Every large tensor would otherwise be faulted in page by page again: an expert MLP takes 1.2
    times as long. The price is a higher peak.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    is_set = bool(_c("mallopt", m_mmap_threshold, 1 << 30))
    return is_set and bool(_c("mallopt", m_trim_threshold, 2**31 - 1))


def return_freed_memory() -> bool:
    """Let glibc hand freed blocks back to the kernel now; whether it can."""
    return _c("malloc_trim", 0) is not None


def die_with_parent() -> bool:
    """Have the kernel kill this process when the one that started it dies; whether it will."""
    pr_set_pdeathsig = 1
    return _c("prctl", pr_set_pdeathsig, int(signal.SIGKILL)) == 0


def drop_from_cache(handle: int) -> None:
    """Drop what the page cache holds of an open file, unless it is yet to be written; nothing
    where the system takes no such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _c(name: str, *arguments: int) -> int | None:
    """The answer of a function of the C library; None where it has no such function."""
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return int(function(*arguments))


def _text(path: str) -> str:
    """A file of the system; "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(path: str) -> dict[str, str]:
    """The first value of every ``key: value`` of a file of the system."""
    split = (line.partition(":") for line in reversed(_text(path).splitlines()))
    return {key.strip(): value.strip() for key, _, value in split}


def _kilobytes(path: str, key: str) -> int:
    return int(_fields(path)[key].split()[0])


def _stat(pid: int) -> list[bytes]:
    """Fields of a process behind its name, its state first."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def file_of(handle: int) -> Path | None:
    """The present path of an open file that may have been renamed; None where it was deleted, or
    where the system has no /proc."""
    with suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.samestat(os.stat(path), os.fstat(handle)):
            return Path(path)
    return None
