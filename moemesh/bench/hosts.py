"""Several hosts on one Linux machine: network namespaces, a bridge, and links of a given rate.

    with hosts(2, "1gbit") as names:            # needs root, `ip` and `tc`
        run_ranks(names, ranks_per_host=2, command=python_command(...))

Every host is a namespace of its own with one interface, :data:`INTERFACE`, that leads to a bridge
in a further namespace; the machine's own network is never touched. Token buckets shape what a host
sends, and with more than two hosts what it receives. All names carry this process's id, and
everything is removed at the end, also after an error or SIGTERM.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from moemesh.config.errors import UserError

#: The one interface of every host, by this name in its namespace.
INTERFACE = "moemesh0"
#: Prefix of the hosts' addresses, which exist in the namespaces only.
_SUBNET = "10.117.0"
_PORT = 29411
_MOST_HOSTS = 16
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit")
#: Last lines of a failed rank's stderr in the message.
_TAIL_LINES = 30


class HostsError(UserError):
    """Hosts cannot be emulated here, or one of their ranks failed."""


def link_rate(link: str) -> float:
    """Bits per second of "1gbit", "200mbit", ... Raises HostsError for anything else."""
    match = _RATE.fullmatch(link)
    rate = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not 1e5 <= rate <= 1e11:
        raise HostsError(f"link {link!r} must be a rate from 100kbit to 100gbit, such as 1gbit")
    return rate


def why_not() -> str | None:
    """Why hosts cannot be emulated here; None when they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Linux package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"moemesh-{os.getpid()}-probe"
    created = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if created.returncode:
        return f"no network namespace can be made: {created.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def hosts(num_hosts: int, link: str) -> Generator[list[str]]:
    """Namespaces of `num_hosts` hosts joined at rate `link`; yields their names. Raises HostsError
    when this machine does not allow it."""
    rate = link_rate(link)
    if not 2 <= num_hosts <= _MOST_HOSTS:
        raise HostsError(f"hosts ({num_hosts}) must lie between 2 and {_MOST_HOSTS}")
    if reason := why_not():
        raise HostsError(f"cannot emulate hosts: {reason}")
    prefix = f"moemesh-{os.getpid()}"

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with ExitStack() as cleanup:
        # A SIGTERM unwinds the stack, so that namespaces are removed.
        cleanup.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, leave))

        def namespace(name: str) -> str:
            _ip("netns", "add", name)
            cleanup.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            _ip("-n", name, "link", "set", "lo", "up")
            return name

        switch = namespace(f"{prefix}-switch")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        names: list[str] = []
        for host in range(num_hosts):
            names.append(namespace(f"{prefix}-host{host}"))
            # A pair of interfaces between host and bridge, created inside their namespaces: none
            # ever appears in the machine's own network.
            name, port = names[-1], f"port{host}"
            _ip(
                *("-n", name, "link", "add", INTERFACE),
                *("type", "veth", "peer", "name", port, "netns", switch),
            )
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{host + 1}/24", "dev", INTERFACE)
            _ip("-n", switch, "link", "set", port, "master", "bridge0")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "up")
            _shape(name, INTERFACE, rate)
            if num_hosts > 2:  # of two hosts, one receives what the other sends
                _shape(switch, port, rate)
        yield names


def _shape(name: str, device: str, rate: float) -> None:
    """Limit what `device` of the namespace `name` sends to `rate` bits/s: a token bucket of one
    millisecond, at least a few packets, and a queue of 64 MiB, so that it drops none in practice.
    Packets larger than the bucket are cut on the way, which costs time on the processor."""
    bucket = max(16384, int(rate / 8 * 0.001))
    _command(
        *("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{int(rate)}bit", "burst", str(bucket), "limit", str(64 << 20)),
    )


def run_ranks(
    names: Sequence[str], *, ranks_per_host: int, command: Sequence[str], timeout: float
) -> str:
    """Run `command` as ``len(names) * ranks_per_host`` ranks; returns what rank 0 printed. The
    ranks get torchrun's variables. Raises HostsError with the end of the stderr of the lowest rank
    that has failed, or after `timeout` seconds; no rank outlives the call."""
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="moemesh-hosts-") as folder:
        try:
            for rank in range(len(names) * ranks_per_host):
                host, local = divmod(rank, ranks_per_host)
                variables = {
                    "RANK": rank,
                    "LOCAL_RANK": local,
                    "WORLD_SIZE": len(names) * ranks_per_host,
                    "LOCAL_WORLD_SIZE": ranks_per_host,
                    "MASTER_ADDR": f"{_SUBNET}.1",
                    "MASTER_PORT": _PORT,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                }
                # `ip` and `env` replace themselves by the rank, so the process is the rank.
                assigned = [f"{key}={value}" for key, value in variables.items()]
                words = ["ip", "netns", "exec", names[host], "env", *assigned, *command]
                outputs = (Path(folder) / f"{rank}.{kind}" for kind in ("out", "err"))
                with next(outputs).open("wb") as out, next(outputs).open("wb") as errors:
                    ranks.append(subprocess.Popen(words, stdout=out, stderr=errors))
            deadline = time.monotonic() + timeout
            codes = [process.poll() for process in ranks]
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.05)
                codes = [process.poll() for process in ranks]
            for rank, code in enumerate(codes):
                if code:
                    stderr = (Path(folder) / f"{rank}.err").read_text(errors="replace")
                    tail = "\n".join(stderr.splitlines()[-_TAIL_LINES:])
                    raise HostsError(f"rank {rank} failed with exit code {code}:\n{tail}")
            running = [rank for rank, code in enumerate(codes) if code is None]
            if running:
                raise HostsError(f"rank(s) {running} did not finish within {timeout:.0f} s")
            return (Path(folder) / "0.out").read_text()
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def bytes_on_link() -> int | None:
    """Bytes that this host has put on its link, headers included; None outside of a host."""
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else None


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
