"""Checks a saved state of a random generator by type, size and range, before any generator gets it.

The generators themselves check too little. numpy's accepts a position far outside its words, and the next draw reads there:
the process dies, or draws from other memory. So each state is checked here, tried on a new generator, and read back.
"""

import random
from typing import Any, Final

import numpy as np
import torch

from trainfold.core.json_values import shown
from trainfold.core.printable import with_article

_WORDS: Final = 624  # of a Mersenne Twister, which python, numpy and torch have
_PYTHON_VERSION: Final = 3
_POSITIONS: Final = {"MT19937": ("state", "pos", _WORDS), "Philox": (None, "buffer_pos", 4)}  # numpy checks neither
# seed, words left, whether it is seeded, index of the next word, the words, one normal number
_TORCH_CPU_BYTES: Final = 5056


def check_python_state(value: Any) -> tuple[int, tuple[int, ...], float | None]:
    """Check the state of a `random.Random` in the form of `capture_streams`.

    Args:
        value: from any source.

    Returns:
        The argument of `random.Random.setstate`.

    Raises:
        ValueError: if it is not such a state.

    Examples:
        >>> version, words, gauss = random.Random(0).getstate()
        >>> state = {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
        >>> check_python_state(state) == random.Random(0).getstate()
        True
    """
    _check(type(value) is dict and set(value) == {"version", "words", "gauss"}, "version, words and gauss", value)
    version, words, gauss = value["version"], value["words"], value["gauss"]
    _check(type(version) is int and version == _PYTHON_VERSION, f"version {_PYTHON_VERSION}", version)
    _check_array(words, np.uint32, (_WORDS + 1,), "words")
    _check(int(words[_WORDS]) <= _WORDS, f"a position of at most {_WORDS}", int(words[_WORDS]))
    _check(
        gauss is None or type(gauss) is float, "a float or None as the other half of a pair of normal numbers", gauss
    )
    state = (version, tuple(words.tolist()), gauss)
    random.Random().setstate(state)  # noqa: S311 (no secret)
    return state


def check_numpy_state(value: Any, kind: str) -> None:
    """Check the state of a numpy bit generator, in the form of ``RandomState.get_state(legacy=False)``.

    Args:
        value: from any source.
        kind: the class of the generator that it is for, ``"MT19937"``.

    Raises:
        ValueError: if it is not such a state.

    Examples:
        >>> state = np.random.RandomState(0).get_state(legacy=False)
        >>> check_numpy_state(state, "MT19937")
        >>> state["state"]["pos"] = 625
        >>> check_numpy_state(state, "MT19937")
        Traceback (most recent call last):
            ...
        ValueError: expected a position of 0 to 624, found 625
    """
    _check(type(value) is dict, "the state of a numpy generator", value)
    found = value.get("bit_generator")
    if type(found) is not str or found != kind:
        raise ValueError(
            f"the state of {with_article(_short(found))}, and numpy's global generator is {with_article(kind)}"
        )
    if kind in _POSITIONS:
        place, name, most = _POSITIONS[kind]
        held = value if place is None else value.get(place)
        position = held.get(name) if type(held) is dict else None
        _check(type(position) is int and 0 <= position <= most, f"a position of 0 to {most}", position)
    _check(value.get("has_gauss") in (0, 1), "0 or 1 as has_gauss", value.get("has_gauss"))
    trial = np.random.RandomState(getattr(np.random, kind)(0))
    trial.set_state(value)
    _check(_same(value, trial.get_state(legacy=False)), "a state that reads back as it was set", "another one")


def check_torch_state(value: Any, device: torch.device | str = "cpu") -> None:
    """Check the state of a torch generator.

    Args:
        value: from any source.
        device: of the generator that it is for.

    Raises:
        ValueError: if it is not such a state.

    Examples:
        >>> check_torch_state(torch.Generator().get_state())
        >>> check_torch_state(torch.zeros(5056, dtype=torch.uint8))
        Traceback (most recent call last):
            ...
        ValueError: expected the state of a generator that was seeded, found Invalid mt19937 state
    """
    _check(type(value) is torch.Tensor, "a tensor", value)
    trial = torch.Generator(device)
    size = trial.get_state().numel()
    state = value.cpu()
    _check(
        state.dtype == torch.uint8 and tuple(state.shape) == (size,),
        f"{size} bytes",
        f"{state.dtype} {tuple(state.shape)}",
    )
    if trial.device.type == "cpu" and size == _TORCH_CPU_BYTES:
        left, following = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
        inside = 1 <= left <= _WORDS and 0 <= following <= _WORDS and left + following <= _WORDS + 1
        _check(inside or not state.any(), f"a place among {_WORDS} words", f"{left} left from {following} on")
    try:
        trial.set_state(state)
    except RuntimeError as error:
        _check(False, "the state of a generator that was seeded", str(error).split("\n", 1)[0])  # noqa: FBT003
    _check(torch.equal(trial.get_state(), state), "a state that reads back as it was set", "another one")


def _check(fits: bool, expected: str, found: object) -> None:  # noqa: FBT001 - reads as a sentence
    if not fits:
        raise ValueError(f"expected {expected}, found {_short(found)}")


def _check_array(value: Any, dtype: Any, shape: tuple[int, ...], name: str) -> None:
    fits = type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
    _check(fits, f"{name} as {np.dtype(dtype)} {shape}", value)


def _short(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _same(a: Any, b: Any) -> bool:
    """Whether two states are of the same types and hold the same."""
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if type(a) is np.ndarray:
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)
