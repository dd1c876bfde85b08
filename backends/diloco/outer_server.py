"""`DilocoServer`: hands out units of data, and puts together what workers have made of them, round after round."""

import itertools
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, final

import torch

from trainfold.backends.diloco.messages import VERSION, field, receive_tensors, round_mark, send_tensors, unit_of
from trainfold.backends.diloco.served_state import Rounded, check_on_cpu, longest_request, rounds_of
from trainfold.backends.peers.channel import Channel
from trainfold.backends.peers.listener import Listener
from trainfold.backends.weights.server import send_weights, wanted_of
from trainfold.core.checks import count, positive
from trainfold.core.diloco.fragments import Fragments, fragments_of
from trainfold.core.diloco.outer_step import (
    NESTEROV,
    Contribution,
    check_outer_optimizer,
    outer_step,
    trained_elements,
)
from trainfold.core.diloco.rounds import Rounds, waits_since
from trainfold.core.diloco.work_units import WorkUnit
from trainfold.core.errors import PeerRefused
from trainfold.core.state.state import Opaque, Progress, TrainState
from trainfold.core.step.optimizer import Optimizer
from trainfold.core.weights.source import Wanted

_PEER: Final = "a worker"
_SECS: Final = 60.0
_GRACE_SECS: Final = 60.0
_WORKERS: Final = 64


@final
class DilocoServer:
    """Serves workers from threads of its own; the loop over `rounds` does the outer steps, and saves them before any worker sees them.

    A worker that ends, or has not sent when the others have waited long enough, has weight zero in that round, and its unit is handed out again.
    See `DilocoWorker` for the other side. `trainfold.weights.ServedWeights` reads the weights too.

    Args:
        state: of `outer_state`, or of an earlier server, which this one goes on from.
        token: of at least 16 characters, which the workers know.
        unit_samples: how many samples a worker trains on between two exchanges.
        total_samples: how many there are in all, over all epochs; None for a run without an end.
        fragments: how many parts the model is cut into, of which one is exchanged after each unit.
        optimizer: the outer one; that of `outer_state`.
        host: the address to listen on; by default this machine alone can connect.
        port: 0 for any free one, which `port` then has.
        secs: how long a worker may take for a frame.
        grace_secs: how long a round waits for the others after the first worker has sent, and a worker without a unit for one of theirs.
        most_workers: how many may be connected at once; others are turned away with the reason.

    Attributes:
        plan: which tensors are exchanged in which round; it prints as a table.
        port: where it listens.

    Raises:
        PeerRefused: for a token that is too short.
        InvalidArgument: for a number that is out of range, or another optimizer than that of the state.
        InvalidState: for a state that is not on the CPU, or has rounds and no data position.
        OSError: if the address cannot be used.

    Examples:
        >>> from trainfold.core.diloco.outer_step import outer_state
        >>> state = outer_state(torch.nn.Linear(2, 1))
        >>> with DilocoServer(state, token="a-token-of-some-length", unit_samples=8, total_samples=0) as server:
        ...     list(server.rounds())
        []
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        state: TrainState,
        *,
        token: str,
        unit_samples: int,
        total_samples: int | None,
        fragments: int = 1,
        optimizer: Optimizer = NESTEROV,
        host: str = "127.0.0.1",
        port: int = 0,
        secs: float = _SECS,
        grace_secs: float = _GRACE_SECS,
        most_workers: int = _WORKERS,
    ) -> None:
        size = count("unit_samples", unit_samples, fix="pass the samples of a worker between two exchanges")
        if total_samples is not None:
            count("total_samples", total_samples, least=0, fix="pass the samples of the run, over all epochs")
        check_outer_optimizer(state, optimizer)
        check_on_cpu(state)
        self.plan: Fragments = fragments_of(trained_elements(state), fragments)
        self._state, self._optimizer, self._secs = state, optimizer, secs
        self._grace_secs = positive("grace_secs", grace_secs, fix="pass how long a round waits for late workers")
        self._rounds = rounds_of(state, size, total_samples)
        self._received: dict[str, Contribution] = {}
        self._waits: dict[str, float] = {}  # worker -> since when it waits for others
        self._is_open = True  # False while the weights of the next round are made and saved
        self._is_ended = self._is_closed = False
        self._longest_request = longest_request(state)
        # workers of the server before this one may come back after the last round
        self._answers_until = time.monotonic() + self._grace_secs if (state.trainer or Progress()).step else 0.0
        self._changed = threading.Condition()
        self._workers = itertools.count()
        self._listener = Listener(
            self._talk, token=token, host=host, port=port, secs=secs, most_clients=most_workers, peer=_PEER
        )
        self.port: int = self._listener.port

    def __repr__(self) -> str:
        now = self._state.trainer or Progress()
        return f"<DilocoServer at {self._listener.host}:{self.port}, {now.step} rounds, {now.samples} samples>"

    def rounds(self) -> Iterator[TrainState]:
        """Yield the state after each round; workers get it when the loop asks for the next one. Ends when every sample has counted.

        Save the state in the loop, each time or now and then: a server that was killed goes on from what was saved, and hands out again what had
        counted since then. Where it ends, workers are given time to hear that all is over: those that are connected, and for ``grace_secs``
        after its start those of a server before this one.
        """
        while True:
            with self._changed:
                self._is_open = True
                self._changed.notify_all()
            found = self._wait_for_round()
            if found is None:
                break
            state = outer_step(self._state, found, self.plan, optimizer=self._optimizer)
            self._state = state.evolve(dataset=Opaque(self._rounds.position()))
            yield self._state
        until = time.monotonic() + self._grace_secs
        while not self._is_closed and time.monotonic() < until:  # workers hear that it is over
            if not self._listener.clients and time.monotonic() >= self._answers_until:
                break
            time.sleep(0.01)

    def close(self) -> None:
        """Stop to accept workers, and end those that are connected."""
        self._listener.close()
        with self._changed:
            self._is_ended = self._is_closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _wait_for_round(self) -> list[Contribution] | None:
        """Wait until a round is over, and begin the next; return what was contributed, or None at the end."""
        with self._changed:
            while not self._rounds.is_over:
                if self._rounds.is_finished or self._is_ended:
                    self._is_ended = True
                    self._changed.notify_all()
                    return None
                left = min(self._waits.values(), default=math.inf) + self._grace_secs - time.monotonic()
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                elif self._rounds.sent:
                    break
                else:
                    self._change(self._rounds.hand_over())
            found = [self._received[worker] for worker in self._rounds.sent]
            self._received, self._is_open = {}, False
            self._change(self._rounds.close(secrets.token_hex(16)))
            return found

    def _change(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waits = waits_since(rounds, self._waits, time.monotonic())
        self._changed.notify_all()

    # --- one worker, in its thread -----------------------------------------------------------------------------------

    def _talk(self, channel: Channel) -> None:
        worker, channel.json_limit = str(next(self._workers)), self._longest_request
        try:
            while True:
                channel.wait()
                message = channel.receive()
                if "join" in message:
                    field(message, "join", _version, _PEER)
                    channel.send({"joined": VERSION, "fragments": [list(names) for names in self.plan.names]})
                elif "wanted" in message:
                    self._give_weights(channel, wanted_of(message, _PEER))
                elif "work" in message:
                    self._give_work(channel, worker, field(message, "work", round_mark, _PEER))
                else:
                    unit, mark = field(message, "send", unit_of, _PEER), field(message, "mark", round_mark, _PEER)
                    self._take_contribution(channel, worker, mark, unit)
        finally:
            with self._changed:
                self._change(self._rounds.leave(worker))

    def _give_weights(self, channel: Channel, wanted: Mapping[str, Wanted]) -> None:
        while True:
            with self._changed:
                if self._is_open:
                    state, mark = self._state, self._rounds.mark
                    break
                if self._is_ended:
                    return
                self._changed.wait(self._secs)
        send_weights(channel, wanted, Rounded(state), mark=mark)

    def _give_work(self, channel: Channel, worker: str, mark: str) -> None:
        while True:
            with self._changed:
                said = self._work_for(worker, mark)
                if said is None and self._changed.wait(self._secs / 3):
                    continue
            channel.send({"wait": 1} if said is None else said)
            if said is not None:
                return

    def _work_for(self, worker: str, mark: str) -> dict[str, Any] | None:
        """The answer to a worker that asks for a unit; None if it has to wait."""
        if self._is_ended:
            return {"over": 1}
        if not self._is_open:
            return None
        if mark != self._rounds.mark:
            return {"stale": 1}
        if worker in self._rounds.waiting:
            return None
        rounds, unit = self._rounds.hand_out(worker)
        self._change(rounds)
        step = (self._state.trainer or Progress()).step
        return None if unit is None else {"unit": [unit.start, unit.stop], "round": step}

    def _take_contribution(self, channel: Channel, worker: str, mark: str, unit: WorkUnit) -> None:
        with self._changed:
            state, counts = self._state, self._is_open and self._rounds.accept(worker, mark, unit) is not None
        if not counts:
            channel.send({"stale": 1})
            return
        channel.send({"go": 1})
        trainer, model = state.trainer or Progress(), state.model
        assert model is not None
        due = {name: model.params[name] for name in self.plan.due(trainer.step)}
        tensors, _ = receive_tensors(channel, due, _PEER)
        broken = next((name for name, each in tensors.items() if not each.isfinite().all()), None)
        if broken is not None:
            raise PeerRefused(
                _PEER,
                expected="finite weights",
                found=f"a number in {broken} that is not finite",
                fix="look at the loss of this worker",
            )
        with self._changed:
            rounds = self._rounds.accept(worker, mark, unit)
            if rounds is not None:
                self._received[worker] = Contribution(len(unit), tensors)
                self._change(rounds)
        self._give_fragment(channel, tensors, trainer.step + 1) if rounds is not None else channel.send({"stale": 1})

    def _give_fragment(self, channel: Channel, local: Mapping[str, torch.Tensor], step: int) -> None:
        """Send the new values of a fragment, once they are there; the worker has the others."""
        while True:
            with self._changed:
                state, mark = self._state, self._rounds.mark
                trainer, model = state.trainer or Progress(), state.model
                is_there = self._is_open and trainer.step >= step
                if not is_there and not self._is_ended and self._changed.wait(self._secs / 3):
                    continue
            if is_there or self._is_ended:
                break
            channel.send({"wait": 1})
        if trainer.step != step or model is None:
            channel.send({"stale": 1})
            return
        send_tensors(channel, {name: model.params[name].to(each.dtype) for name, each in local.items()}, mark=mark)


def _version(value: Any) -> None:
    if value != VERSION:
        raise ValueError(f"{value!r}")
