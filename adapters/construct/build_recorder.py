"""`BuildRecorder`: while it is active, tensors are made on the meta device, and a `Tape` gets every call that makes or writes one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainfold.adapters.construct.replay import CPU, results, value_of
from trainfold.adapters.construct.tape import EMPTY, Constant, Place, RecordedCall, Tape
from trainfold.core.errors import InvalidState

META: Final = torch.device("meta")
_ATEN: Final = torch.ops.aten
_TO: Final = _ATEN._to_copy.default  # noqa: SLF001  # its name
_REPLACE: Final = frozenset(
    {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_"}
)
_DEPENDS_ON_VALUES: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@final
class BuildRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's is not typed
    """Records on a tape what a build does with tensors.

    Attributes:
        tape: what was recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.tape = Tape()
        self._numbers: dict[int, int] = {}  # the address of a storage -> its number
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no address comes twice

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on meta was made while this was active."""
        return tensor.untyped_storage()._cdata in self._numbers  # noqa: SLF001  # as in `_number`

    def finish(self) -> Tape:
        """The tape, when nothing more is recorded."""
        self.tape.sizes = {number: storage.nbytes() for number, storage in enumerate(self._storages)}
        return self.tape

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor on the meta device lies."""
        return Place(
            self._number(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out one call, on the meta device where it makes a tensor, and record it."""
        given = dict(kwargs or {})
        tensors = _tensors((args, given))
        names = {each.name for each in function._schema.arguments}  # noqa: SLF001  # there is no public one
        if tensors and not any(each.is_meta for each in tensors):
            return self._with_values(function, args, given, tensors)
        if tensors and self._needs_values(function, args, given):
            key, found = self._real(function, args, given)
            if key or function is not _TO:
                return found
        made_on_meta = {**given, "device": META} if "device" in names else given
        if "pin_memory" in names:
            made_on_meta["pin_memory"] = False
        stand_ins = _mapped(args, _stand_in), {name: _mapped(each, _stand_in) for name, each in made_on_meta.items()}
        known = {self._number(each) for each in tensors if each.is_meta}
        found = function(*stand_ins[0], **stand_ins[1])
        self._record(function, args, given, found, known)
        return found

    def drawn(self, function: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Record a function that writes random numbers to a whole tensor, and chooses what it does by what it has drawn."""
        place = self.place(tensor)
        self._add(function, (place, *args), dict(kwargs), (None,), {place.storage}, draws=True, whole=place)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _with_values(self, function: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """A call without tensors on meta, which is carried out; what it puts on meta is a constant."""
        if torch.Tag.nondeterministic_seeded in function.tags and any(each.numel() for each in tensors):
            raise InvalidState(
                "construct.on_meta",
                expected="random numbers that are drawn into tensors made by torch.empty, torch.zeros or torch.randn",
                found=f"{function}, for a tensor made from values, such as by torch.tensor",
                fix="make the tensor by torch.empty: then its numbers come from the seed of the run",
            )
        found = function(*args, **kwargs)
        for value in results(found):
            if isinstance(value, torch.Tensor) and value.is_meta:
                source = next(each for each in tensors if each.shape == value.shape)
                self._add(_ATEN.clone.default, (Constant(source.to(value.dtype)),), {}, (self.place(value),), set())
        return found

    def _needs_values(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call has a result other than a tensor on meta: a number, a shape that depends on values, or a copy on the CPU."""
        if function is _TO:
            return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if any(tag in function.tags for tag in _DEPENDS_ON_VALUES):
            return True
        if any("Tensor" not in str(each.type) for each in function._schema.returns):  # noqa: SLF001  # as above
            return True
        return any(not each.is_meta for each in _tensors(_written(function, args, kwargs)))

    def _real(self, function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Carry out a call with values, replayed where they are on meta; (False, None) for a copy that depends on random numbers."""

        def real(value: Any) -> Any:
            return self._value(value) if isinstance(value, torch.Tensor) and value.is_meta else value

        places = [self.place(each) for each in _tensors((args, kwargs)) if each.is_meta]
        if any(call.draws for place in places for call in self.tape.calls_for(place.storage)):
            if function is _TO:
                return False, None
            raise InvalidState(
                "construct.on_meta",
                expected="a build that does not look at random numbers while it draws them",
                found=f"{function}, of a tensor whose values are drawn",
                fix="build the model outside on_meta, or take what the build decides from its configuration",
            )
        return True, function(*_mapped(args, real), **{name: _mapped(each, real) for name, each in kwargs.items()})

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return value_of(self.tape, self.place(tensor), None).clone()

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], found: Any, known: set[int]) -> None:
        made = []
        for value in results(found):
            is_tensor = isinstance(value, torch.Tensor)
            made.append(self.place(value) if is_tensor and self._number(value) not in known else None)
        written = _tensors(_written(function, args, kwargs))
        writes = {self._number(each) for each in written} | {place.storage for place in made if place is not None}
        if not writes and not function._schema.returns:  # noqa: SLF001  # as above
            writes = self.tape.written_with(
                known
            )  # a check, such as of a decomposition: it is made again with its values
        if not writes:
            return  # a view
        name = function.__name__.partition(".")[0]
        whole = self.place(written[0]) if written and name in _REPLACE else None
        if "dtype" in kwargs and kwargs["dtype"] is None and not _tensors(args) and made[0] is not None:
            kwargs = {**kwargs, "dtype": made[0].dtype}
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if "device" in kwargs:
            kwargs = {**kwargs, "device": CPU}
        self._add(function, args, kwargs, tuple(made), writes, draws=draws, whole=whole)

    def _add(  # noqa: PLR0913 - one call
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        made: tuple[Place | None, ...],
        writes: set[int],
        *,
        draws: bool = False,
        whole: Place | None = None,
    ) -> None:
        def kept(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.place(value) if value.is_meta else Constant(value.detach().clone())
            return None if isinstance(value, torch.Generator) else CPU if isinstance(value, torch.device) else value

        reads = _tensors((args, kwargs)) if function not in EMPTY else []
        numbers = {self._number(each) for each in reads if each.is_meta}
        numbers |= {each.storage for each in args if isinstance(each, Place)}
        kwargs = {name: _mapped(each, kept) for name, each in kwargs.items() if name != "pin_memory"}
        replaced = whole.storage if whole is not None and self._covers(whole) else None
        self.tape.add(
            RecordedCall(
                function,
                tuple(_mapped(args, kept)),
                kwargs,
                made,
                frozenset(numbers),
                frozenset(writes | {place.storage for place in made if place is not None}),
                draws,
                replaced,
                torch.get_default_dtype(),
            )
        )

    def _covers(self, place: Place) -> bool:
        """Whether a place is the whole of its storage."""
        steps = sum((size - 1) * stride for size, stride in zip(place.shape, place.stride, strict=True))
        count = torch.Size(place.shape).numel()
        is_dense = steps + 1 == count
        return is_dense and count * place.dtype.itemsize == self._storages[place.storage].nbytes()

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata  # noqa: SLF001  # there is no public identity of a storage without memory
        if address not in self._numbers:
            self._numbers[address] = len(self._storages)
            self.tape.sizes[len(self._storages)] = storage.nbytes()
            self._storages.append(storage)
        return self._numbers[address]


@contextmanager
def recorded() -> Iterator[BuildRecorder]:
    """Record what is built inside, also by those functions of ``torch.nn.init`` that do nothing for a tensor on meta."""
    recorder = BuildRecorder()
    module: Any = torch.nn.init
    original = getattr(module, "_no_grad_trunc_normal_", None)

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)  # type: ignore[misc, no-any-return] # it is there
        recorder.drawn(original, tensor, args, {**kwargs, "generator": None})  # type: ignore[arg-type] # as above
        return tensor

    try:
        if original is not None:
            module._no_grad_trunc_normal_ = trunc_normal  # it returns at once for a tensor on meta
        with recorder:
            yield recorder
    finally:
        if original is not None:
            module._no_grad_trunc_normal_ = original  # as above


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in the arguments of a call."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for one in value for each in _tensors(one)]
    return _tensors(list(value.values())) if isinstance(value, dict) else []


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments of a call, each changed."""
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return change(value)


def _stand_in(value: Any) -> Any:
    """A tensor on meta for one with values."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return value


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call writes to."""
    found = []
    for index, each in enumerate(function._schema.arguments):  # noqa: SLF001  # there is no public one
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(each.name))
    return found
