"""The watchers of the other nodes of a run, and which of their hosts cannot be reached.

Each pair of watchers has a TCP connection, over which nothing is sent after a greeting. The kernels
of both hosts probe it: a kernel answers also for a process that is slow or suspended, and closes
the connection of a watcher that leaves or is killed. If a connection times out, the network is cut
or the host is down; this module cannot distinguish the two. torch is not imported.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moemesh.config.limits import parse_json
from moemesh.monitor.detector import LostHost

#: Files of a node's rendezvous folder: the address of its watcher, and the list of all watchers.
ADDRESS, PEERS = "address", "peers"
#: Seconds without an answer of its kernel after which a host counts as unreachable.
SILENT_SECONDS = 6
#: Seconds between attempts to reach a lost host, and one that was never reached.
_RETRY_SECONDS, _FIRST_SECONDS = 1.0, 10.0
#: Seconds after which a connection without a whole greeting is closed.
_GREETING_SECONDS = 5.0
#: Number of connections without a greeting, besides one for each node.
_STRANGERS = 16
#: Errors of a connection whose host cannot be reached.
_LOST = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}
#: First rank of the sender, and a proof that it has the token of the run.
_GREETING = struct.Struct("<I32s")


class Store(Protocol):
    """The methods of the store of the rendezvous that this module needs."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...


def listen(master: str) -> socket.socket | None:
    """A listener on the address from which this host reaches `master`, and on no other; None
    without a route to it."""
    with suppress(OSError, UnicodeError):  # UnicodeError: a name that no name server could have
        for family, _, _, _, place in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # sends nothing
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.bind((probe.getsockname()[0], 0))
                listener.listen()
                return listener
    return None


def introduce(store: Store, folder: Path | None, ranks: range, world_size: int) -> None:
    """Exchange the addresses of the watchers of all nodes, and write them into `folder` for the
    watcher of `ranks`. Called by the first rank of every node; waits for all of them. `folder`
    None: this node has no watcher."""
    if len(ranks) == world_size:
        return
    first = ranks.start
    address: Sequence[Any] = ("", 0)
    if folder is not None:
        with suppress(OSError, ValueError):
            address = parse_json((folder / ADDRESS).read_text())
    entry = {"first": first, "num_ranks": len(ranks), "host": socket.gethostname()}
    entry |= {"address": address[0], "port": address[1]}
    if first:
        store.set(f"watcher/{first}", json.dumps(entry))
    else:  # the first node collects the entries: the ranks of one end where the next begins
        nodes: list[dict[str, Any]] = [entry]
        while (following := nodes[-1]["first"] + nodes[-1]["num_ranks"]) < world_size:
            nodes.append(parse_json(store.get(f"watcher/{following}")))
        store.set("watchers", json.dumps({"token": secrets.token_hex(32), "nodes": nodes}))
    watchers = store.get("watchers")
    if folder is not None:
        with suppress(OSError):
            temporary = folder / f"{PEERS}.tmp"
            temporary.write_bytes(watchers)
            os.replace(temporary, folder / PEERS)


@dataclass(kw_only=True)
class _Peer:
    """The watcher of another node: its ``first`` rank, host and address. ``lost``: its host does
    not answer; ``has_left``: the watcher ended. ``next_attempt``: monotonic seconds."""

    first: int
    num_ranks: int
    host: str
    address: str
    port: int
    link: _Link | None = None
    lost: bool = False
    has_left: bool = False
    next_attempt: float = 0.0


@dataclass(kw_only=True, eq=False)
class _Link:
    """A connection. ``peer`` None: an incoming connection without a whole greeting."""

    socket: socket.socket
    #: Monotonic seconds at which a connection without a whole greeting is closed.
    until: float
    peer: _Peer | None = None
    #: Whether the TCP connection is established.
    is_made: bool = True
    #: Bytes of the greeting received so far.
    received: bytes = b""


class Peers:
    """Connections to the other watchers, for the watcher whose first rank is `own`; see
    :meth:`poll`."""

    def __init__(self, own: int, listener: socket.socket | None, folder: Path) -> None:
        """`listener`: that of :func:`listen`; None: without connections to other watchers."""
        self._own, self._listener, self._file = own, listener, folder / PEERS
        self._token = b""
        self._peers: dict[int, _Peer] = {}
        #: Watchers to which this one connects; the others connect to it.
        self._called: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        #: Connections without a whole greeting.
        self._greeting: set[_Link] = set()

    def poll(self, now: float) -> tuple[LostHost, ...]:
        """The hosts that cannot be reached at `now` (monotonic seconds); never blocks."""
        if self._listener is None or not (self._token or self._read_peers(self._listener)):
            return ()
        for peer in self._called:
            if peer.link is not None or peer.has_left or now < peer.next_attempt:
                continue
            # Start to connect to the watcher of `peer`.
            peer.next_attempt = now + (_RETRY_SECONDS if peer.lost else _FIRST_SECONDS)
            try:
                family, _, _, _, place = socket.getaddrinfo(
                    peer.address, peer.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                )[0]
                connection = socket.socket(family, socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                continue
            wait = 2 * _RETRY_SECONDS if peer.lost else _GREETING_SECONDS
            link = _Link(socket=connection, until=now + wait, peer=peer, is_made=False)
            peer.link = link
            self._begin(link, selectors.EVENT_WRITE)
            failed = connection.connect_ex(place)
            if failed and failed != errno.EINPROGRESS:
                self._drop(link, failed, now)
        for key, _ in self._selector.select(0):
            if key.data is not None:
                self._handle(key.data, now)
                continue
            # The listener: accept incoming connections.
            with suppress(OSError):  # until the queue is empty
                while True:
                    connection, _ = self._listener.accept()
                    if len(self._greeting) >= len(self._peers) + _STRANGERS:
                        connection.close()
                    else:
                        link = _Link(socket=connection, until=now + _GREETING_SECONDS)
                        self._begin(link, selectors.EVENT_READ)
        for link in [link for link in self._greeting if now > link.until]:
            self._drop(link, errno.ETIMEDOUT, now)
        return tuple(
            LostHost(
                name=f"{peer.host} ({peer.address})",
                ranks=tuple(range(peer.first, peer.first + peer.num_ranks)),
            )
            for peer in self._peers.values()
            if peer.lost
        )

    def close(self) -> None:
        """Close all connections, so that the other watchers do not report a lost host."""
        for link in [key.data for key in self._selector.get_map().values() if key.data]:
            link.socket.close()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()

    def _read_peers(self, listener: socket.socket) -> bool:
        """Read the list of watchers, once the first rank has written it."""
        try:
            watchers: Mapping[str, Any] = parse_json(self._file.read_text())
        except (OSError, ValueError):
            return False
        self._token = bytes.fromhex(watchers["token"])
        peers = [_Peer(**node) for node in watchers["nodes"]]
        local = next((peer for peer in peers if peer.first == self._own), None)
        # A node without an address has no watcher, or none that can be reached.
        self._peers = {p.first: p for p in peers if p.first != self._own and p.port}

        # Of two watchers the larger in this order connects to the other. The host of the rendezvous
        # may know itself by a loopback address, which the others cannot reach: it connects.
        def order(peer: _Peer) -> tuple[bool, int]:
            is_loopback = bool(peer.port) and ipaddress.ip_address(peer.address).is_loopback
            return is_loopback, peer.first

        if local is not None:
            self._called = [peer for peer in self._peers.values() if order(local) > order(peer)]
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        return True

    def _begin(self, link: _Link, event: int) -> None:
        """Probe the connection by its kernel, and select it for `event`."""
        link.socket.setblocking(False)
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),
        ):
            link.socket.setsockopt(socket.IPPROTO_TCP, name, value)
        self._greeting.add(link)
        self._selector.register(link.socket, event, link)

    def _handle(self, link: _Link, now: float) -> None:
        """Handle an event of a connection: established, bytes of a greeting, closed, failed."""
        if link.socket.fileno() < 0:
            return  # dropped by another event of the same poll
        try:
            if not link.is_made:
                if failed := link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(failed, os.strerror(failed))
                link.is_made = True
                self._selector.modify(link.socket, selectors.EVENT_READ, link)
                link.socket.send(self._greeting_of(self._own))
                return
            chunk = link.socket.recv(_GREETING.size)
            link.received += chunk if link in self._greeting else b""
            if not chunk:
                self._drop(link, 0, now)
            if link not in self._greeting or len(link.received) < _GREETING.size or not chunk:
                return
            # The connection is valid if its greeting comes from a watcher of this run.
            first, _ = _GREETING.unpack(link.received[: _GREETING.size])
            peer = self._peers.get(first)
            is_genuine = hmac.compare_digest(link.received, self._greeting_of(first))
            if peer is None or not is_genuine or link.peer not in (None, peer):
                raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
            if link.peer is None:
                link.socket.send(self._greeting_of(self._own))
            before, peer.link = peer.link, link
            link.peer, peer.lost, peer.has_left = peer, False, False
            self._greeting.discard(link)
            if before is not None and before is not link:
                self._drop(before, errno.EPROTO, now)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(link, error.errno or errno.ECONNRESET, now)

    def _greeting_of(self, first: int) -> bytes:
        proof = hmac.digest(self._token, str(first).encode(), "sha256")
        return _GREETING.pack(first, proof)

    def _drop(self, link: _Link, error: int, now: float) -> None:
        """End a connection because of `error` (0: the other side has closed it)."""
        was_greeted = link not in self._greeting
        self._greeting.discard(link)
        self._selector.unregister(link.socket)
        link.socket.close()
        peer = link.peer
        if peer is None or peer.link is not link:
            return
        peer.link = None
        if error == errno.ECONNREFUSED or (was_greeted and not error):
            # The host answers, but no watcher listens: its run ended, or the watcher was killed.
            peer.lost, peer.has_left = False, True
        elif was_greeted:
            peer.lost, peer.next_attempt = error in _LOST, now


def inherited(handle: int) -> socket.socket | None:
    """The listener that was inherited as `handle`; None if the handle is another file."""
    try:
        return socket.socket(fileno=os.dup(handle))
    except OSError:
        return None
