"""`Fragments`: a partition of the trained tensors of a model, of which one part is exchanged in each round (streaming DiLoCo)."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument


@final
@attrs.frozen
class Fragments:
    """Which tensors are exchanged in which round; prints as a table. Make it with `fragments_of`.

    Law: the fragments are disjoint, none is empty, and together they have every name.

    Attributes:
        names: of each fragment, in the order of the model.
        elements: how many numbers each fragment has.
    """

    names: tuple[tuple[str, ...], ...]
    elements: tuple[int, ...]

    def due(self, number: int) -> tuple[str, ...]:
        """The names that are exchanged in the round with this number: fragment 0 in round 0, and each one again after all others."""
        return self.names[number % len(self.names)]

    def __str__(self) -> str:
        lines = ["fragment  tensors      elements  due in rounds"]
        for index, (names, size) in enumerate(zip(self.names, self.elements, strict=True)):
            rounds = ", ".join(str(index + turn * len(self.names)) for turn in range(3))
            lines.append(f"{index:8}  {len(names):7}  {size:12,}  {rounds}, ...")
        return "\n".join(lines)


def fragments_of(elements: Mapping[str, int], fragments: int = 1) -> Fragments:
    """Cut the tensors of a model into fragments of about the same size; the largest tensors are placed first.

    Args:
        elements: name -> number of elements, in the order of the model.
        fragments: how many; 1 exchanges the whole model in each round.

    Raises:
        InvalidArgument: if there are fewer tensors than fragments.

    Examples:
        >>> print(fragments_of({"a": 6, "b": 4, "c": 3}, 2))
        fragment  tensors      elements  due in rounds
               0        1             6  0, 2, 4, ...
               1        2             7  1, 3, 5, ...
    """
    number = count("fragments", fragments, fix="pass at least 1")
    if number > len(elements):
        raise InvalidArgument(
            "fragments",
            expected=f"at most {len(elements)}, the number of tensors that are trained",
            found=number,
            fix="pass fewer",
        )
    members: list[list[str]] = [[] for _ in range(number)]
    sizes = [0] * number
    for name in sorted(elements, key=lambda each: -elements[each]):
        index = min(range(number), key=lambda each: (len(members[each]) > 0, sizes[each]))  # an empty one first
        members[index].append(name)
        sizes[index] += elements[name]
    places = {name: place for place, name in enumerate(elements)}
    return Fragments(tuple(tuple(sorted(names, key=places.__getitem__)) for names in members), tuple(sizes))
