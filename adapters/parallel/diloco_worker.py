"""`DilocoWorker`: lets an attached run train units of a server, and exchanges its weights after each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import torch

from trainfold.adapters.outside.takes_weights import TakesWeights
from trainfold.backends.diloco.outer_client import OuterClient
from trainfold.backends.user_warning import warn_user
from trainfold.core.diloco.work_units import WorkUnit
from trainfold.core.errors import InvalidArgument, InvalidState, LateWork
from trainfold.core.layout.shard import Shard
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.source import Wanted

_SECS: Final = 60.0
_RETRY_SECS: Final = 600.0


@final
class DilocoWorker:
    """A worker of a `DilocoServer`, and the source of its weights: pass it to ``attach(weights=...)``, and loop over `units`.

    Checkpoints of the run have its optimizer, scheduler, counters and streams. The weights and the position in the data belong to the server.

    Args:
        host: of the server.
        port: of the server.
        token: of the server.
        secs: how long connecting, and each frame, may take.
        retry_secs: how long the server may be gone, such as when it was killed and starts again.

    Attributes:
        late_units: how many units it has trained of which the server took nothing. The first one is a warning (`LateWork`).

    Raises:
        PeerRefused: for a token that is too short.

    Examples:
        >>> DilocoWorker("127.0.0.1", 29600, token="a-token-of-some-length")
        DilocoWorker('127.0.0.1', 29600)
    """

    def __init__(
        self, host: str, port: int, *, token: str, secs: float = _SECS, retry_secs: float = _RETRY_SECS
    ) -> None:
        self._shown = f"DilocoWorker({host!r}, {port})"
        self._client = OuterClient(host, port, token=token, secs=secs, retry_secs=retry_secs)
        self.late_units = 0
        self._is_looping = False  # in `units`, which closes the connection at its end
        self._exchanged: dict[str, torch.Tensor] | None = (
            None  # the weights after an exchange, until the model has them
        )

    def __repr__(self) -> str:
        return self._shown

    @property
    def round(self) -> int:
        """The number of the round of the last unit."""
        return self._client.round

    @property
    def sent_bytes(self) -> int:
        """The bytes that it has sent so far."""
        return self._client.sent_bytes

    @property
    def received_bytes(self) -> int:
        """The bytes that it has received so far."""
        return self._client.received_bytes

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the server's current round; after an exchange those of the run, with what was exchanged.

        Raises:
            PeerLost: if the server was gone for too long.
            PeerRefused: if it does not know the token, or serves another model.
        """
        if self._exchanged is None:
            try:
                yield from self._client.take(wanted)
            finally:
                if not self._is_looping:
                    self._client.close()
        else:
            yield from ((name, each) for name, each in self._exchanged.items() if name in wanted)

    def units(self, live: TakesWeights) -> Iterator[WorkUnit]:
        """Yield one unit of data after the other, and exchange weights after each; ends when every sample has counted.

        Args:
            live: what ``attach(..., weights=worker)`` returned. It takes the weights first if it has none.

        Raises:
            PeerLost: if the server was gone for too long.
            PeerRefused: if it refuses what was sent, such as weights that are not finite.
            InvalidState: if the server exchanges other parameters than those that are trained here, or training has changed a buffer.
        """
        self._is_looping = is_current = True
        try:
            self._check(live)
            assert live.outside is not None
            while (unit := self._client.work()) != "over":
                if unit == "stale":
                    live.take_weights()
                    continue
                trained, _, buffers = live.outside.parts()
                self._check_trained(trained)
                before = [(name, each.clone()) for name, each in buffers.items()]
                is_current = False
                yield unit
                self._exchange(live, unit, before)
                is_current = True
        finally:
            if (
                not is_current
            ):  # the model has trained on a part of a unit: the next loop takes the weights of the server first
                self._client.mark = ""
            self._is_looping = False
            self._client.close()

    def _check(self, live: TakesWeights) -> None:
        if live.outside is None or not live.outside.is_whole:
            raise InvalidArgument(
                "worker.units", expected="a run whose weights come from this worker", found="another one",
                fix="pass attach(..., weights=worker)")  # fmt: skip
        self._client.connect()
        trained, frozen, buffers = live.outside.parts()
        cut = next((name for name, each in (trained | frozen | buffers).items() if isinstance(each, Shard)), None)
        if cut is not None:
            raise InvalidState(
                f"model.params[{cut!r}]",
                expected="a worker that has whole tensors",
                found="a part of one",
                fix="let each worker be one process",
            )
        self._check_trained(trained)

    def _check_trained(self, trained: Mapping[str, object]) -> None:
        """Refuse a parameter that is trained on one side only; also where one was frozen or unfrozen in the loop, or the server was started again with another model."""
        exchanged = {name for names in self._client.fragments for name in names}
        sides = {"there": exchanged - trained.keys(), "here": trained.keys() - exchanged}
        differ = [f"{', '.join(sorted(names)[:8])} only {side}" for side, names in sides.items() if names]
        if differ:
            raise InvalidState(
                "model",
                expected=f"the {len(exchanged)} trained parameters of the server",
                found=f"{len(trained)}; trained {', and '.join(differ)}",
                fix="build and freeze the model as the server does, and leave requires_grad as it is in the loop",
            )

    def _exchange(self, live: TakesWeights, unit: WorkUnit, before: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert live.outside is not None
        trained, frozen, buffers = live.outside.parts()
        self._check_trained(trained)
        _check_fixed(before, buffers)
        names = self._client.fragments[self._client.round % len(self._client.fragments)]
        found = self._client.send(unit, {name: trained[name] for name in names})
        if found is None:
            self._count_late(unit)
        else:
            self._exchanged = {**trained, **frozen, **buffers, **found}
        try:
            live.take_weights()
        finally:
            self._exchanged = None

    def _count_late(self, unit: WorkUnit) -> None:
        self.late_units += 1
        if self.late_units == 1:
            warn_user(
                f"{self}: the server took nothing of the work on samples {unit.start} to {unit.stop}, and they are trained again unless they had counted: "
                "it came after the end of its round, another worker was first, or the server was started again. If it happens often, raise the "
                "server's grace_secs, or shorten its units; worker.late_units counts further ones",
                LateWork,
            )


def _check_fixed(before: Sequence[tuple[str, torch.Tensor]], now: Mapping[str, torch.Tensor]) -> None:
    """Refuse a buffer that training changes, such as the statistics of a batch norm: each worker would have its own, in silence."""
    for name, each in before:
        if tensor_bytes(each) != tensor_bytes(now[name]):
            raise InvalidState(
                f"model.buffers[{name!r}]",
                expected="a buffer that training does not change: only trained parameters are exchanged",
                found="other values after a unit",
                fix="use a layer without such statistics, such as LayerNorm or GroupNorm, or freeze them with .eval()",
            )
