"""`Holders`: which rank gives which part of a tensor that ranks hold in parts. Imports no torch."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.replica_shares import box_of
from trainfold.core.layout.slices import Box, check_cover, intersect, volume


@final
@attrs.frozen
class Holders:
    """What all ranks hold of tensors.

    Attributes:
        ranks: for each rank, leaf path -> spec, by rule where there is one; ranks that describe all alike share one object.
    """

    ranks: tuple[Mapping[str, LeafSpec], ...]

    def check(self) -> None:
        """Check that the ranks have each tensor once.

        Raises:
            InvalidState: naming the leaf, if slices that ranks list do not tile it.
        """
        for path, spec in self.ranks[0].items():
            if not self._is_one_rule(spec):
                check_cover(path, list(self._listed(path)), spec.shape)

    def parts(self, path: str, box: Box) -> list[tuple[int, Box]]:
        """Which rank gives what of a box.

        Law: the parts tile the box. Each lies inside of what its rank holds, and no lower rank holds the same.

        Examples:
            >>> from trainfold.core.layout.mesh import make_mesh
            >>> from trainfold.core.layout.placement import make_placement
            >>> rows = LeafSpec("int8", (4,), placement=make_placement(make_mesh((2, 2)), [[1]]))
            >>> Holders(({"w": rows},) * 4).parts("w", ((1, 4),))
            [(0, ((1, 2),)), (1, ((2, 4),))]
        """
        spec = self.ranks[0][path]
        if not self._is_one_rule(spec):
            held = self._listed(path)
        elif spec.placement is None:
            held = {box_of(spec, 0): 0}
        else:
            held = {
                box_of(spec, rank): rank for rank in sorted(spec.placement.ranks_meeting(box, spec.shape), reverse=True)
            }
        met = ((rank, intersect(box, each)) for each, rank in held.items())
        return sorted((rank, each) for rank, each in met if each is not None and volume(box))

    def _is_one_rule(self, spec: LeafSpec) -> bool:
        return not spec.slices and all(each is self.ranks[0] for each in self.ranks)

    def _listed(self, path: str) -> dict[Box, int]:
        """Each box that some rank holds, with the lowest such rank."""
        held: dict[Box, int] = {}
        for rank, specs in enumerate(self.ranks):
            for box in specs[path].slices or (box_of(specs[path], rank),):
                if volume(box):
                    held.setdefault(box, rank)
        return held
