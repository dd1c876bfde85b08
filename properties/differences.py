"""Finds the first leaf in which two states differ in a bit; also the errors `LawBroken` and `ContractBroken`."""

from collections.abc import Sequence
from typing import Any

import torch

from trainfold.core import tree
from trainfold.core.format.codec import is_tensor_leaf, leaf_digest
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.components import components_of
from trainfold.core.state.spec import leaf_spec
from trainfold.core.state.state import TrainState
from trainfold.core.tensor_memory import byte_view


class LawBroken(AssertionError):
    """A law does not hold; the message names the law, the leaf, both sides, and the action.

    Attributes:
        law: the law's name.
        leaf: the path of the first leaf that differs, or what else broke.
    """

    def __init__(self, law: str, leaf: str, detail: str) -> None:
        super().__init__(f"{law}: {leaf}: {detail}")
        self.law = law
        self.leaf = leaf


class ContractBroken(AssertionError):
    """An implementation breaks rules of its contract; each is named with what was expected and found."""


def first_difference(one: TrainState, other: TrainState) -> tuple[str, str] | None:
    """The first leaf in which two states differ in a bit, with what each has; None if they are the same.

    Examples:
        >>> from trainfold import Progress
        >>> first_difference(TrainState(trainer=Progress(1)), TrainState(trainer=Progress(2)))
        ('trainer.step', '1 against 2')
    """
    if fingerprint(one) == fingerprint(other):
        return None
    return first_beyond(one, other, [""]) or ("state", "the fingerprints differ, but no leaf does")


def first_beyond(
    one: TrainState, other: TrainState, parts: Sequence[str], *, rtol: float = 0.0, atol: float = 0.0
) -> tuple[str, str] | None:
    """The first leaf of some parts in which two states differ by more than a tolerance, with what each has; or None.

    Args:
        one: a state; relative tolerances are relative to it.
        other: another.
        parts: beginnings of leaf paths, such as ``"optimizer"``, in the order in which they are compared.
        rtol: relative tolerance of tensors and numbers of a floating kind; all else is compared exactly.
        atol: absolute tolerance of the same.

    Examples:
        >>> from trainfold import Progress
        >>> first_beyond(TrainState(trainer=Progress(1), extra={"loss": 1.0}), TrainState(extra={"loss": 1.1}), ["loss"], atol=0.2)
        >>> first_beyond(TrainState(trainer=Progress(1)), TrainState(), ["trainer"])
        ('trainer.step', 'only one of the two has it')
    """
    mine, theirs = _leaves(one), _leaves(other)
    for part in parts:
        for path in (path for path in {**mine, **theirs} if path.startswith(part)):
            if path not in mine or path not in theirs:
                return path, "only one of the two has it"
            if str(leaf_spec(mine[path], path)) != str(leaf_spec(theirs[path], path)):
                return path, f"{leaf_spec(mine[path], path)} against {leaf_spec(theirs[path], path)}"
            same = leaf_digest(mine[path], path) == leaf_digest(theirs[path], path)
            if not same and not _are_close(mine[path], theirs[path], rtol=rtol, atol=atol):
                return path, values_of(mine[path], theirs[path])
    return None


def check_same(law: str, one: TrainState, other: TrainState, doing: str) -> None:
    """Raise `LawBroken` with the first leaf in which two states differ."""
    found = first_difference(one, other)
    if found is not None:
        raise LawBroken(law, found[0], f"{found[1]}; {doing}")


def clone(state: TrainState) -> TrainState:
    """A copy of a state in new memory, with the same bits; tied leaves stay tied."""
    copies: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), tensor.detach().clone())

    cloned: TrainState = tree.map_tensors(once, state)
    return cloned


def _leaves(state: TrainState) -> dict[str, Any]:
    return {
        path: leaf
        for name, component in components_of(state).items()
        for path, leaf in tree.named_leaves(component, name)
    }


def _are_close(one: Any, other: Any, *, rtol: float, atol: float) -> bool:
    if not isinstance(one, float | complex | torch.Tensor):
        return False
    mine, theirs = torch.as_tensor(one), torch.as_tensor(other)
    inexact = mine.is_floating_point() or mine.is_complex()
    return inexact and rtol + atol > 0 and torch.allclose(theirs, mine, rtol=rtol, atol=atol)


def tensor_difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """What differs between two tensors, or None."""
    if leaf_spec(one, "") != leaf_spec(other, ""):
        return f"{leaf_spec(one, '')} against {leaf_spec(other, '')}"
    return None if leaf_digest(one) == leaf_digest(other) else values_of(one, other)


def values_of(one: Any, other: Any) -> str:
    """Both sides of a difference in words: the first element that differs."""
    if not is_tensor_leaf(one) or not isinstance(one, torch.Tensor):
        return f"{one!r} against {other!r}"
    mine, theirs = one.reshape(-1), other.reshape(-1)
    raw_one, raw_other = byte_view(mine).reshape(len(mine), -1), byte_view(theirs).reshape(len(mine), -1)
    at = int((raw_one != raw_other).any(dim=1).nonzero()[0])
    return f"element {at} is {mine[at].item()!r} against {theirs[at].item()!r}"
