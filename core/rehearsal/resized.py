"""What two runs on different numbers of ranks have alike: all that does not belong to ranks, and the position that ranks share."""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from trainfold.core.rehearsal.trajectory import RunDifference, SavedStep, Stretch

_DATA: Final = "dataset"
_OF_RANK: Final = "@rank"  # in the path of a leaf that one rank has
_SHARED: Final = ("['epoch']", "['shared']['seed']", "['shared']['length']", "['shared']['next']")
_COUNTED: Final = ("trainer", _DATA)


def without_ranks(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """The same processes without the components that belong to ranks, such as random streams.

    Of the positions in the data, what counts over all ranks stays: the epoch, the order, and the next sample.

    Args:
        stretches: of all runs that are compared; what belongs to ranks in one of them is left out of all.

    Examples:
        >>> leaves = {"rng@rank0.value": "a", "rng@rank1.value": "b", "trainer.step": "4"}
        >>> saved = SavedStep({"rng": "xxh3:1", "trainer": "xxh3:2"}, leaves)
        >>> (found,) = without_ranks([Stretch(1, 0, False, False, 4, {}, {("run", 4): saved})])
        >>> found.saved["run", 4]
        SavedStep(components={'trainer': 'xxh3:2'}, leaves={'trainer.step': '4'})
    """
    every = [saved for stretch in stretches for saved in stretch.saved.values()]
    own = {name for saved in every for name in saved.components if _belongs_to_ranks(saved, name)}
    return tuple(
        attrs.evolve(each, saved={key: _left(saved, own) for key, saved in each.saved.items()}) for each in stretches
    )


def of_ranks(stretches: Sequence[Stretch]) -> tuple[str, ...]:
    """The components that belong to ranks, without a position in the data that ranks share."""
    every = [saved for stretch in stretches for saved in stretch.saved.values()]
    shares = any(_position(saved) for saved in every)
    found = {name: None for saved in every for name in saved.components if _belongs_to_ranks(saved, name)}
    return tuple(name for name in found if name != _DATA or not shares)


def of_counts(found: Sequence[RunDifference]) -> tuple[RunDifference, ...]:
    """The differences that another number of ranks does not explain: in the number of steps, the counts, and the position in the data."""
    return tuple(each for each in found if each.kind == "end" or each.name in _COUNTED)


def _belongs_to_ranks(saved: SavedStep, name: str) -> bool:
    return any(path.startswith(f"{name}{_OF_RANK}") for path in saved.leaves)


def _left(saved: SavedStep, own: set[str]) -> SavedStep:
    components = {name: text for name, text in saved.components.items() if name not in own}
    starts = tuple(f"{name}{mark}" for name in own for mark in (_OF_RANK, ".", "["))
    leaves = {path: text for path, text in saved.leaves.items() if not (starts and path.startswith(starts))}
    position = _position(saved) if _DATA in own else {}
    if position:
        epoch, seed, length, at = position.values()
        components[_DATA] = f"epoch {epoch}, sample {at} of {length} in the order of seed {seed}"
        leaves |= position
    return SavedStep(components, leaves)


def _position(saved: SavedStep) -> Mapping[str, str]:
    """The leaves of the position that all ranks share, in the form that one rank has; empty if the position belongs to each rank."""
    for start in (f"{_DATA}{_OF_RANK}0.value", f"{_DATA}.value"):
        if all(f"{start}{name}" in saved.leaves for name in _SHARED):
            return {f"{_DATA}.value{name}": saved.leaves[f"{start}{name}"] for name in _SHARED}
    return {}
