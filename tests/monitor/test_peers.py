"""Watchers of several nodes that probe one another's hosts, over loopback."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moemesh.monitor import peers
from moemesh.monitor.detector import LostHost
from moemesh.monitor.peers import ADDRESS, PEERS, Peers, introduce, listen
from tests.waiting import PATIENCE

SIZES = {0: 2, 2: 1, 3: 4}


class Store:
    """A store whose `get` waits, as torch's does."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, PATIENCE)
            return self.values[key].encode()


class Nodes:
    """Three nodes of 2, 1 and 4 ranks, which have been introduced."""

    def __init__(self, folder: Path) -> None:
        self.all: dict[int, Peers] = {}
        self.folders = {first: folder / str(first) for first in SIZES}
        self.store, threads = Store(), list[threading.Thread]()
        for first, size in SIZES.items():
            self.folders[first].mkdir()
            listener = listen("127.0.0.1")
            assert listener is not None and listener.getsockname()[0] == "127.0.0.1"
            (self.folders[first] / ADDRESS).write_text(json.dumps(listener.getsockname()))
            self.all[first] = Peers(first, listener, self.folders[first])
            assert not self.all[first].poll(0.0)
            args = (self.store, self.folders[first], range(first, first + size), 7)
            threads.append(threading.Thread(target=introduce, args=args))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.lost: dict[int, tuple[LostHost, ...]] = {}

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.lost = {one: peer.poll(time.monotonic()) for one, peer in self.all.items()}
            assert time.monotonic() < end
            time.sleep(0.005)

    def stands(self, one: int, other: int) -> bool:
        peer = self.all[one]._peers.get(other)
        return bool(peer and peer.link and peer.link not in self.all[one]._greeting)

    def all_stand(self) -> bool:
        return all(
            self.stands(one, other) for one in self.all for other in self.all if one != other
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes_of_test = Nodes(tmp_path)
    nodes_of_test.until(nodes_of_test.all_stand)
    yield nodes_of_test
    for one in nodes_of_test.all.values():
        one.close()


def test_a_watcher_that_leaves_is_not_lost(nodes: Nodes) -> None:
    assert not any(nodes.lost.values())
    nodes.all.pop(2).close()
    nodes.until(lambda: all(one._peers[2].has_left for one in nodes.all.values()))
    assert not any(nodes.lost.values()) and nodes.stands(0, 3)


class Broken:
    """A socket that the kernel has ended with an error."""

    def __init__(self, link: socket.socket, number: int) -> None:
        self._link, self._number = link, number

    def recv(self, size: int) -> bytes:
        raise OSError(self._number, os.strerror(self._number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def break_link(nodes: Nodes, here: int, there: int, number: int) -> None:
    link, link_there = nodes.all[here]._peers[there].link, nodes.all[there]._peers[here].link
    assert link is not None and link_there is not None
    link.socket = Broken(link.socket, number)  # type: ignore[assignment]
    link_there.socket.send(b"x")


@pytest.mark.parametrize(("here", "there"), [(0, 3), (3, 0)])
def test_a_host_that_is_silent_is_lost_until_it_answers(
    nodes: Nodes, here: int, there: int
) -> None:
    break_link(nodes, here, there, errno.ETIMEDOUT)
    nodes.until(lambda: bool(nodes.lost[here]))
    ranks = tuple(range(there, there + SIZES[there]))
    name = f"{socket.gethostname()} (127.0.0.1)"
    assert nodes.lost[here] == (LostHost(name=name, ranks=ranks),) and not nodes.lost[2]
    nodes.until(nodes.all_stand)
    assert not any(nodes.lost.values())


@pytest.mark.parametrize(("here", "there"), [(0, 3), (3, 0)])
def test_a_host_that_ends_a_connection_is_not_lost(nodes: Nodes, here: int, there: int) -> None:
    """The host has answered, and is called a second time."""
    break_link(nodes, here, there, errno.ECONNRESET)
    before = nodes.all[here]._peers[there].link
    peer = nodes.all[here]._peers[there]
    nodes.until(lambda: bool(nodes.lost[here]) or peer.link not in (None, before))
    nodes.until(lambda: bool(nodes.lost[here]) or nodes.all_stand())
    assert not any(nodes.lost.values())


def test_only_watchers_with_the_token_are_met(nodes: Nodes, tmp_path: Path) -> None:
    place = nodes.all[2]._listener.getsockname()  # type: ignore[union-attr]
    mine = nodes.all[2]._greeting_of(0)
    wrong = [b"x" * len(mine), peers._GREETING.pack(9, mine[4:]), peers._GREETING.pack(3, mine[4:])]
    strangers = [socket.create_connection(place) for _ in wrong]
    for stranger, greeting in zip(strangers, wrong, strict=True):
        stranger.send(greeting)
        stranger.settimeout(0.01)

    def is_closed(one: socket.socket) -> bool:
        try:
            return not one.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True

    nodes.until(lambda: all(map(is_closed, strangers)))
    assert nodes.all_stand() and not any(nodes.lost.values())
    # The most connections at once, all of them silent for a while.
    silent = [socket.create_connection(place) for _ in range(40)]
    nodes.until(lambda: len(nodes.all[2]._greeting) == 2 + peers._STRANGERS)
    nodes.all[2].poll(time.monotonic() + peers._GREETING_SECONDS + 1)
    assert not nodes.all[2]._greeting
    for one in (*strangers, *silent):
        one.close()


def test_a_node_without_a_watcher_is_met_by_nobody(tmp_path: Path) -> None:
    store = Store()
    other = {"first": 1, "num_ranks": 1, "host": "b", "address": "", "port": 0}
    store.set("watcher/1", json.dumps(other))
    listener = listen("127.0.0.1")
    assert listener is not None and listen("no such host .") is None
    assert listen("x" * 64) is None, "longer than a label of a name may be"
    (tmp_path / ADDRESS).write_text(json.dumps(listener.getsockname()))
    introduce(store, tmp_path, range(1), 2)
    alone = Peers(0, listener, tmp_path)
    assert not alone.poll(0.0) and not alone._peers and (tmp_path / PEERS).exists()
    alone.close()
    introduce(store, None, range(2), 2)  # one node: no other node to wait for
