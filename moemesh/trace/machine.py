"""Facts of the machine from Linux, with fallbacks for other systems.

Only this module reads ``/proc`` and calls the C library. No function raises if a Unix system
lacks a feature; those that need one document their fallback.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The cgroups of a machine, and the file with the names of those of this process.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: A folder in memory, if it exists, and the folder of Nvidia's driver.
SHARED_MEMORY, NVIDIA_DRIVER = Path("/dev/shm"), Path("/proc/driver/nvidia")

#: Environment that limits the spinning of idle OpenMP threads, read when torch loads OpenMP.
#: Without a limit a step is up to 40 times slower if another process needs the core; threads that
#: sleep immediately make it a quarter slower on idle cores. GNU OpenMP uses the number of spins,
#: other implementations the policy (measured, docs/results/step.md).
OPENMP_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Set :data:`OPENMP_WAITING` in `environment`, unless it sets one of the variables itself."""
    if not OPENMP_WAITING.keys() & environment.keys():
        environment.update(OPENMP_WAITING)


def usable_cores() -> int:
    """Cores that this process may use by its affinity and the CPU quota of its cgroups, at least 1;
    all of the machine's without a restriction."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # CPU limits of this process's cgroups and their ancestors; versions 1 and 2.
    for line in text_of(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / ("cpu" if controllers else "")
        # In a container the path is that of the host: check the root and each existing part.
        below = root / path.lstrip("/")
        ancestors = (part for part in (below, *below.parents) if root in part.parents)
        for folder in {root, *ancestors}:
            with suppress(ValueError, IndexError):
                if controllers:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    quota, period = (float(text_of(folder / name)) for name in names)
                else:
                    quota, period = map(float, text_of(folder / "cpu.max").split())
                if quota > 0 and period > 0:
                    cores = min(cores, int(quota / period))
    return max(1, cores)


def processor() -> str:
    """The model of the processor; without one, its architecture."""
    model = _fields("/proc/cpuinfo").get("model name", "")
    return model or platform.processor() or platform.machine()


def boot_name() -> str:
    """Identity of this boot of this machine (hosts may share a name, and containers a machine); the
    host's name without one."""
    return text_of("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def process_namespace() -> str:
    """Identity of the process namespace, equal for processes with the same process ids; "" without
    namespaces."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def physical_bytes() -> int:
    """Memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Memory in bytes that processes of this machine can still allocate; a huge number if
    unknown."""
    size = 1 << 62
    with suppress(ValueError, KeyError):
        size = _kilobytes("/proc/meminfo", "MemAvailable") * 1024
        limit, used = (text_of(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        size = min(size, max(int(limit) - int(used), 0))
    return size


def process_state(pid: int) -> tuple[str, float]:
    """State (a letter) and CPU seconds of a process; ("", 0) if unknown."""
    with suppress(OSError, IndexError, ValueError):
        fields = _stat(pid)
        ticks = int(fields[11]) + int(fields[12])
        return fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def zombie_exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended but was not yet reaped by its parent; None if
    unknown."""
    with suppress(OSError, IndexError, ValueError):
        fields = _stat(pid)
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" else None
    return None


def peak_growth() -> Callable[[], int | None]:
    """Starts to track resident memory; returns a function that returns the peak growth since then
    in bytes, mapped files included, or None if unknown."""
    status = "/proc/self/status"
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _kilobytes(status, "VmRSS")
    except (OSError, KeyError, ValueError):
        return lambda: None
    return lambda: max(_kilobytes(status, "VmHWM") - before, 0) * 1024


def thread_states(names: tuple[str, ...]) -> dict[str, tuple[str, ...]] | None:
    """State and counts of context switches of each thread of this process whose name begins with
    one of `names`, by its id; None where the system does not show threads."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    states: dict[str, tuple[str, ...]] = {}
    for task in tasks.iterdir():
        fields = _fields(f"{task}/status")  # empty for a thread that has ended
        if fields.get("Name", "").startswith(names):
            keys = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            states[task.name] = tuple(fields.get(key, "") for key in keys)
    return states


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them to the kernel; whether it succeeded.

    Otherwise the pages of every large tensor are faulted in repeatedly, and an expert MLP takes 1.2
    times the time. The cost is a higher peak.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    is_set = bool(_c("mallopt", m_mmap_threshold, 1 << 30))
    return is_set and bool(_c("mallopt", m_trim_threshold, 2**31 - 1))


def return_freed_memory() -> bool:
    """Make glibc return freed blocks to the kernel now; whether it can."""
    return _c("malloc_trim", 0) is not None


def die_with_parent() -> bool:
    """Make the kernel kill this process when its parent dies; whether it succeeded."""
    pr_set_pdeathsig = 1
    return _c("prctl", pr_set_pdeathsig, int(signal.SIGKILL)) == 0


def drop_from_cache(handle: int) -> None:
    """Drop the clean pages of an open file from the page cache; no-op if the system does not
    support it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _c(name: str, *arguments: int) -> int | None:
    """The result of a function of the C library; None if the function is missing."""
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return int(function(*arguments))


def text_of(path: str | Path) -> str:
    """Content of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(path: str) -> dict[str, str]:
    """The ``key: value`` lines of a system file; of a repeated key the first value."""
    split = (line.partition(":") for line in reversed(text_of(path).splitlines()))
    return {key.strip(): value.strip() for key, _, value in split}


def _kilobytes(path: str, key: str) -> int:
    return int(_fields(path)[key].split()[0])


def _stat(pid: int) -> list[bytes]:
    """Fields of a process after its name, the state first."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def file_of(handle: int) -> Path | None:
    """The present path of an open file that may have been renamed; None where it was deleted, or
    where the system has no /proc."""
    with suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.samestat(os.stat(path), os.fstat(handle)):
            return Path(path)
    return None
