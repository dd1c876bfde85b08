"""What the server of DiLoCo and a worker say to each other, beside tensors; both check every field."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch

from trainfold.backends.peers.channel import Channel
from trainfold.backends.weights.served import received_tensor
from trainfold.core.diloco.work_units import WorkUnit
from trainfold.core.errors import PeerRefused
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.source import Wanted

VERSION: Final = 1
_LONGEST: Final = 64  # characters of a mark
T = TypeVar("T")


def field(message: Mapping[str, Any], name: str, read: Callable[[Any], T], peer: str) -> T:
    """A field of a message that any program may have made.

    Raises:
        PeerRefused: if it is missing, or is not what it has to be.

    Examples:
        >>> field({"send": [0, 8]}, "send", unit_of, "a worker")
        WorkUnit(start=0, stop=8)
    """
    try:
        return read(message[name])
    except (KeyError, TypeError, ValueError) as error:
        raise PeerRefused(
            peer,
            expected=f"a message of DiLoCo, version {VERSION}, with {name}",
            found=f"{type(error).__name__}: {error}"[:200],
            fix="use the same version on both sides; look at who else can reach this port",
        ) from error


def unit_of(value: Any) -> WorkUnit:
    """A unit: two numbers."""
    start, stop = value
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop:
        raise ValueError("two numbers, the smaller one first")
    return WorkUnit(start, stop)


def number_of(value: Any) -> int:
    """A number from 0 on."""
    if type(value) is not int or value < 0:
        raise ValueError("a number from 0 on")
    return value


def round_mark(value: Any) -> str:
    """A mark: a short text."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"a text of at most {_LONGEST} characters")
    return value


def fragment_names(value: Any) -> tuple[tuple[str, ...], ...]:
    """The names of each fragment."""
    if not isinstance(value, list) or not all(isinstance(name, str) for names in value for name in names):
        raise TypeError("lists of names")
    return tuple(tuple(names) for names in value)


def send_tensors(channel: Channel, tensors: Mapping[str, torch.Tensor], **last: Any) -> None:
    """Send tensors, each after its name, and at the end their number, with ``last``."""
    for name, tensor in tensors.items():
        channel.send({"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)})
        channel.send_bytes(tensor_bytes(tensor))
    channel.send({"end": len(tensors), **last})


def receive_tensors(
    channel: Channel, like: Mapping[str, torch.Tensor], peer: str, first: Mapping[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """Receive floating tensors of these names and shapes, each once; return them, and the message at the end.

    Args:
        channel: to the other side.
        like: what is expected; no memory is taken for anything else.
        peer: the other side, for messages.
        first: the first message, if it has come already.

    Raises:
        PeerRefused: for anything else.
        PeerLost: if the other side is gone or late.
    """
    wanted = {
        name: Wanted(dtype_name(each.dtype), tuple(each.shape), whole_box(tuple(each.shape)))
        for name, each in like.items()
    }
    found: dict[str, torch.Tensor] = {}
    for message in _until_end(channel, first):
        if "end" in message:
            missing = wanted.keys() - found.keys()
            if missing:
                raise _refused(peer, f"all {len(wanted)} tensors", f"nothing for {', '.join(sorted(missing)[:8])}")
            return found, message
        left = {name: each for name, each in wanted.items() if name not in found}
        name, tensor = received_tensor(channel, message, left, peer)
        if not tensor.is_floating_point():
            raise _refused(peer, "floating tensors", f"{name!r}, {tensor.dtype}")
        found[name] = tensor
    raise AssertionError("a channel ends with an error")


def _until_end(channel: Channel, first: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if first is not None:
        yield first
    while True:
        yield channel.receive()


def _refused(peer: str, expected: str, found: str) -> PeerRefused:
    return PeerRefused(peer, expected=expected, found=found, fix="let server and workers build the same model")
