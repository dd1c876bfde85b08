"""`GeneratorPart`: a user's random generator under ``extra``, of torch, numpy or python."""

import random
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from trainfold.adapters.components.component import Undo, copied, kind_of, wrong_kind
from trainfold.adapters.streams.stream_states import check_numpy_state, check_python_state, check_torch_state
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.printable import with_article
from trainfold.core.state.state import Opaque

_KINDS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(target: object) -> bool:
    """Whether an object is a random generator that `GeneratorPart` takes.

    Examples:
        >>> is_generator(np.random.default_rng(0)), is_generator(np.random)
        (True, False)
    """
    return isinstance(target, _KINDS) and not isinstance(target, random.SystemRandom)


@final
@attrs.frozen
class GeneratorPart:
    """A generator as a component. It is written in place, so code that refers to it keeps the same object.

    Examples:
        >>> generator = torch.Generator().manual_seed(1)
        >>> part = GeneratorPart(generator, "noise")
        >>> saved = part.capture()
        >>> first = torch.rand(1, generator=generator)
        >>> _ = part.write(saved)
        >>> torch.equal(first, torch.rand(1, generator=generator))
        True
    """

    target: Any
    path: str

    def capture(self) -> Opaque:
        """Its kind and its state, as plain values."""
        return Opaque({"kind": self._kind(), "state": _state(self.target)})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Whether such a generator accepts the state, tried on a new one."""
        if not isinstance(saved, Opaque) or not isinstance(saved.value, dict) or "state" not in saved.value:
            return [wrong_kind(self.path, "the saved state of a random generator", saved)]
        if saved.value.get("kind") != self._kind():
            return [self._refused(f"the state of {with_article(self._kind())}", str(saved.value.get("kind"))[:80])]
        try:
            _check(self.target, saved.value["state"])
        except Exception as error:  # noqa: BLE001 - generators raise exceptions of any class
            return [self._refused(f"a state that {with_article(self._kind())} accepts", str(error)[:200])]
        return []

    def write(self, saved: Any) -> Undo:
        """Set its state."""
        before = _state(self.target)
        _set(self.target, copied(saved.value["state"]))
        return lambda: _set(self.target, before)

    def _kind(self) -> str:
        bits = getattr(self.target, "bit_generator", None)
        return kind_of(self.target) if bits is None else f"{kind_of(self.target)}({type(bits).__name__})"

    def _refused(self, expected: str, found: str) -> InvalidState:
        return InvalidState(self.path, expected=expected, found=found or "a state without a kind",
                            fix="register the generator that the state was captured from, or leave it out")  # fmt: skip


def _state(target: Any) -> Any:
    if isinstance(target, torch.Generator):
        return target.get_state()
    if isinstance(target, random.Random):
        version, words, gauss = target.getstate()
        return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
    if isinstance(target, np.random.RandomState):
        return target.get_state(legacy=False)
    return target.bit_generator.state


def _set(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state.cpu())
    elif isinstance(target, random.Random):
        target.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(target, np.random.RandomState):
        target.set_state(state)
    else:
        target.bit_generator.state = state


def _check(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        check_torch_state(state, target.device)
    elif isinstance(target, random.Random):
        check_python_state(state)
    elif isinstance(target, np.random.RandomState):
        check_numpy_state(state, target.get_state(legacy=False)["bit_generator"])
    else:
        kind = type(target.bit_generator)
        if state["bit_generator"] in ("MT19937", "Philox"):
            check_numpy_state({"has_gauss": 0, "gauss": 0.0, **state}, kind.__name__)
        made = kind(0)
        made.state = state
        if repr(made.state) != repr(state):
            raise ValueError("a state that the generator does not return as it was set")
