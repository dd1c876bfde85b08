"""Ranks of a tree that are threads: edges in memory, which count messages and bytes, and can end with a rank."""

import threading
from collections import deque

import attrs
import torch

from trainfold.backends.ranks.failure_board import NoticeBoard
from trainfold.backends.ranks.processes.edges import Edges
from trainfold.backends.ranks.processes.tree import TreeExchange
from trainfold.backends.ranks.processes.waiting import Waiting


class Values:
    """A key-value store for the notice board."""

    def __init__(self):
        self.values, self.lock, self.requests = {}, threading.Lock(), 0

    def set(self, key, value):
        with self.lock:
            self.requests += 1
            self.values[key] = value.encode()

    def get(self, key):
        with self.lock:
            self.requests += 1
            return self.values[key]

    def check(self, keys):
        with self.lock:
            self.requests += 1
            return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        with self.lock:
            self.requests += 1
            return self.values.setdefault(key, desired.encode())


class Work:
    """An exchange that ends when its message has come, or with an error."""

    def __init__(self, into=None):
        self.into, self.is_over, self.error = into, into is None, None

    def is_completed(self):
        return self.is_over

    def wait(self):
        assert self.is_over
        if self.error is not None:
            raise RuntimeError(self.error)


class Pipe:
    """One direction of an edge: messages come in order, and each fits what is received."""

    def __init__(self):
        self.lock, self.sent, self.awaited, self.is_closed = threading.Lock(), deque(), deque(), False

    def send(self, data):
        work = Work()
        with self.lock:
            if self.is_closed:
                work.error = "[/gloo/] Connection closed by peer"
            self.sent.append(data.clone())
            self._match()
        return work

    def receive(self, data):
        work = Work(data)
        with self.lock:
            self.awaited.append(work)
            self._match()
        return work

    def close(self):
        with self.lock:
            self.is_closed = True
            self._match()

    def _match(self):
        while self.sent and self.awaited:
            data, work = self.sent.popleft(), self.awaited.popleft()
            assert data.shape == work.into.shape, f"{len(data)} bytes were sent, and {len(work.into)} are received"
            work.into.copy_(data)
            work.is_over = True
        while self.is_closed and self.awaited:
            work = self.awaited.popleft()
            work.error, work.is_over = "[/gloo/] Connection closed by peer", True


class Dead(BaseException):
    """Ends a rank between two messages, and it does nothing more."""


@attrs.define
class Count:
    """What a rank has sent and received, and after how many messages it ends."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    ends_at: int | None = None

    def next(self):
        if self.ends_at is not None and self.sent + self.received >= self.ends_at:
            raise Dead


@attrs.frozen
class MemoryEdge:
    out: Pipe
    into: Pipe
    count: Count

    def send(self, data, timeout_secs):
        assert timeout_secs > 0
        self.count.next()
        self.count.sent, self.count.bytes_sent = self.count.sent + 1, self.count.bytes_sent + data.nbytes
        return self.out.send(data)

    def receive(self, data, timeout_secs):
        assert timeout_secs > 0
        self.count.next()
        self.count.received, self.count.bytes_received = (
            self.count.received + 1,
            self.count.bytes_received + data.nbytes,
        )
        return self.into.receive(data)


def run_tree(tree, function, *, grace_secs=1.0, ends=None):
    """Run ``function(exchange, rank)`` on each rank of a tree.

    Args:
        tree: a `RankTree`.
        function: what a rank does.
        grace_secs: of a roll call.
        ends: for a rank, the number of messages after which it ends like a killed process.

    Returns:
        What it returned or raised, and the count, of each rank; and the store of the notice board.
    """
    pipes = {place.rank: (Pipe(), Pipe()) for place in tree.places()}  # up, down
    counts = [Count(ends_at=(ends or {}).get(rank)) for rank in range(tree.size)]
    values, found = Values(), {}

    def work(rank):
        place, count = tree.place(rank), counts[rank]
        up = None if place.parent is None else MemoryEdge(*pipes[rank], count)
        down = [MemoryEdge(*reversed(pipes[child.start]), count) for child in place.children]
        waiting = Waiting(NoticeBoard(values, rank, tree.size, grace_secs=grace_secs), tree.size)
        exchange = TreeExchange(waiting, place, Edges(up, down), tree.size, lambda: None)
        try:
            found[rank] = function(exchange, rank)
        except BaseException as error:  # noqa: BLE001 - it is what the rank ends with
            found[rank] = error
            for each in ([up] if up else []) + down:
                each.out.close()
                each.into.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(tree.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits for ever"
    return [found[rank] for rank in range(tree.size)], counts, values


def total_of(numbers):
    """A tensor of integers."""
    return torch.tensor(numbers, dtype=torch.int64)
