"""`FilePreference`: how many files a save makes of a state, as the place of a run prefers it. Imports no torch (ADR-0048)."""

from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument

ONE_A_RANK_FROM: Final = 1024
"""Ranks: with two data files and an index each, their commit asks for 3,072 sizes, and a slow store answers 3,200 in a second."""


@final
@attrs.frozen
class FilePreference:
    """Which files a store prefers. The default is what a save does without one.

    Attributes:
        one_a_rank_from: from so many ranks on, a rank writes one data file for all components, and otherwise one for each.
        object_bytes: leaves that ranks hold alike are shared by no more ranks than it takes for each of them to write so many bytes of a component; 0 for
            as many as there are.

    Raises:
        InvalidArgument: if ``one_a_rank_from`` is not a whole number from 1 on, or ``object_bytes`` not one from 0 on.

    Examples:
        >>> FilePreference(object_bytes=64 << 20).writers(16_384, 10**9)
        14
    """

    one_a_rank_from: int = ONE_A_RANK_FROM
    object_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        for name, value, least in (
            ("one_a_rank_from", self.one_a_rank_from, 1),
            ("object_bytes", self.object_bytes, 0),
        ):
            if type(value) is not int or value < least:
                raise InvalidArgument(
                    f"FilePreference.{name}",
                    expected=f"a whole number >= {least}",
                    found=repr(value),
                    fix="correct it, or leave it out",
                )

    def writers(self, ranks: int, nbytes: int) -> int:
        """How many ranks write bytes that all of them hold.

        Law: at most as many as there are, and as many as can have ``object_bytes`` each; but one at least.

        Args:
            ranks: that hold them.
            nbytes: of a component.
        """
        return ranks if not self.object_bytes else max(1, min(ranks, nbytes // self.object_bytes))


NO_PREFERENCE: Final = FilePreference()
"""Of a store that does not say."""
