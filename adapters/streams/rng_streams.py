"""Captures and restores the global random streams: python, numpy, torch, and the accelerator that the model is on.

They are captured as plain values (ints, floats, arrays), never as pickles, and written back bit for bit. Only the
model's device is read, so a state does not depend on which other devices are visible.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

import attrs
import numpy as np
import torch

from trainfold.adapters.components.component import Undo, wrong_kind
from trainfold.adapters.sharded.dtensor import device_of_mesh, has_random_tracker, make_random_tracker
from trainfold.adapters.streams.stream_states import check_numpy_state, check_python_state, check_torch_state
from trainfold.backends.derived_streams import NO_STREAMS
from trainfold.backends.derived_streams import STREAMS_VERSION as VERSION
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.format.codec import DENSE
from trainfold.core.json_values import shown
from trainfold.core.state.state import Opaque

Streams: TypeAlias = dict[str, Any]

_TRACKED: Final = "dtensor"  # whether DTensors have drawn from the accelerator's stream
_IS_CPU: Final = attrgetter("is_cpu")


def bound_device(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The accelerator that computes with these tensors, or None for the CPU. FSDP2 may keep them on the CPU and compute elsewhere."""
    if not all(map(_IS_CPU, tensors)):  # nearly always, or never
        return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    return None if set(map(type, tensors)) <= DENSE else device_of_mesh(tensors)


def capture_streams(device: torch.device | None = None) -> Streams:
    """Read every global stream; none of them moves.

    Args:
        device: the accelerator to include, or None.

    Returns:
        A dict of plain values: ``python``, ``numpy``, ``torch``, and the accelerator's under its type, ``cuda``.

    Examples:
        >>> streams = capture_streams()
        >>> sorted(streams)
        ['numpy', 'python', 'seed', 'torch', 'version']
    """
    return read_streams(device)()


def read_streams(device: torch.device | None = None) -> Callable[[], Streams]:
    """Read every global stream now; the returned function makes plain values of them later, in any thread.

    Examples:
        >>> streams = read_streams()
        >>> before = torch.rand(1)
        >>> restore_streams(streams())
        >>> torch.equal(before, torch.rand(1))
        True
    """
    version, words, gauss = random.getstate()
    read: Streams = {
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (user code draws from this stream)
        "torch": torch.get_rng_state(),
    }
    if device is not None:
        read[device.type] = torch.get_device_module(device).get_rng_state(device)
    seed = torch.initial_seed()

    def streams() -> Streams:
        python = {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
        return {"version": VERSION, "seed": seed, "python": python, **read}

    return streams


def restore_streams(streams: Streams, device: torch.device | None = None) -> None:
    """Write captured streams back, bit for bit.

    Args:
        streams: from `capture_streams`; check streams from elsewhere with `stream_problems` first.
        device: the accelerator to write, or None.
    """
    random.setstate(_python_state(streams["python"]))
    np.random.set_state(streams["numpy"])  # noqa: NPY002 (user code draws from this stream)
    torch.set_rng_state(streams["torch"].cpu())
    if device is not None:
        torch.get_device_module(device).set_rng_state(streams[device.type].cpu(), device)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """Run a block and put every global stream back to where it was before, also when the block raises.

    Examples:
        >>> before = torch.get_rng_state()
        >>> with preserved_rng():
        ...     _ = torch.rand(3), random.random()
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    streams = capture_streams(device)
    try:
        yield
    finally:
        restore_streams(streams, device)


def stream_problems(
    streams: Any, device: torch.device | None = None, *, path: str = "state.rng"
) -> list[TrainfoldError]:
    """Every reason why streams cannot be written here: each is checked, and tried on a new generator.

    Args:
        streams: a value from any source.
        device: the accelerator that needs a stream, or None.
        path: where they are in the state, for messages.

    Returns:
        The problems; empty for streams captured on the same layout.
    """
    version = streams.get("version") if isinstance(streams, dict) else type(streams).__qualname__
    if type(version) is not int or version != VERSION:
        return [
            InvalidState(
                f"{path}.version",
                expected=f"random streams of version {VERSION}",
                found=shown(version),
                fix="resume with the trainfold that wrote them, or replace them with derive_streams(seed, step=...)",
            )
        ]
    wanted = ["python", "numpy", "torch", *([device.type] if device is not None else [])]
    found: list[TrainfoldError] = []
    if extra := sorted(map(shown, streams.keys() - {"version", "seed", *NO_STREAMS, *wanted})):
        found.append(_not_usable(f"{path}[{extra[0]}]", "no stream of a device that this run is not on"))
    if type(streams.get("seed", 0)) is not int:
        found.append(_not_usable(f"{path}['seed']", "an int", shown(streams["seed"])))
    for name in wanted:
        where = f"{path}[{name!r}]"
        if name not in streams:
            found.append(_not_usable(where, "a stream, because it is in use", "none"))
            continue
        try:
            _try_stream(name, streams[name], device)
        except Exception as error:  # noqa: BLE001 - generators raise exceptions of any class
            found.append(_not_usable(where, f"the state of this process's {name} generator", str(error)))
    return found


def moved_stream_problems(streams: Any, *, path: str) -> list[TrainfoldError]:
    """Every reason why these streams cannot be written. An absent stream has not moved since it was seeded.

    Examples:
        >>> moved_stream_problems({}, path="x"), len(moved_stream_problems({"torch": 1, "oboe": 2}, path="x"))
        ([], 2)
    """
    if not isinstance(streams, dict):
        return [_not_usable(path, "random streams by name", type(streams).__qualname__)]
    found: list[TrainfoldError] = []
    for name, value in streams.items():
        where = f"{path}[{name!r}]"
        if name not in ("python", "numpy", "torch"):
            found.append(_not_usable(where, "python, numpy or torch"))
            continue
        try:
            _try_stream(name, value, None)
        except Exception as error:  # noqa: BLE001 - as above
            found.append(_not_usable(where, f"the state of this process's {name} generator", str(error)))
    return found


def _try_stream(name: str, value: Any, device: torch.device | None) -> None:
    if name == "python":
        check_python_state(value)
    elif name == "numpy":
        check_numpy_state(value, np.random.get_state(legacy=False)["bit_generator"])  # noqa: NPY002 (user code draws from it)
    else:
        check_torch_state(value, device if name != "torch" and device is not None else "cpu")


def _python_state(value: Any) -> tuple[int, tuple[int, ...], float | None]:
    return value["version"], tuple(value["words"].tolist()), value["gauss"]


def _not_usable(where: str, expected: str, found: str = "one") -> InvalidState:
    return InvalidState(
        where,
        expected=expected,
        found=found,
        fix="resume on the same kind of device; or replace the streams with derive_streams(seed, step=...), "
        "or leave rng out with components=, on purpose",
    )


def _unknown() -> None:
    """No share: nothing says how the ranks train."""


@final
@attrs.frozen
class RngPart:
    """The ``rng`` component of a live run.

    Attributes:
        device: the accelerator that the model is on, or None.
        mesh: of the model's DTensors, or None.
        share: returns the share of the data that this rank reads, and their number; None where nothing says it.
    """

    device: torch.device | None = None
    mesh: Any = None
    share: Callable[[], tuple[int, int] | None] = attrs.field(default=_unknown, eq=False)
    may_refuse = False

    def capture(self) -> Opaque:
        """The streams, as `Opaque`: only a generator knows the form of its state."""
        return self.read()()

    def read(self) -> Callable[[], Opaque]:
        """Read the streams now; the returned function makes the component later, in any thread."""
        streams = read_streams(self.device)
        beside: Streams = {_TRACKED: True} if has_random_tracker() else {}
        if (known := self.share()) is not None:
            beside["share"], beside["shares"] = known
        return lambda: Opaque({**streams(), **beside})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Whether every stream is there and usable."""
        if not isinstance(saved, Opaque):
            return [wrong_kind("state.rng", "the captured random streams of a loop", saved)]
        return stream_problems(saved.value, self.device)

    def write(self, saved: Any) -> Undo:
        """Write the streams back; if a generator refuses its state, all streams stay as they were."""
        before = capture_streams(self.device)
        try:
            if self.mesh is not None and saved.value.get(_TRACKED) and not has_random_tracker():
                make_random_tracker(self.mesh)  # before the streams: it would replace them later
            restore_streams(saved.value, self.device)
        except Exception:
            restore_streams(before, self.device)
            raise
        return lambda: restore_streams(before, self.device)
