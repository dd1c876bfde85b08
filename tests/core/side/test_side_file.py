"""Names of files in a checkpoint stay in their directory, whatever they are."""

import os
from pathlib import PurePosixPath

from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.side.side_file import check_side_names

NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "a\\b", "ü", "a\n"]), min_size=1, max_size=4).map("/".join)


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
@example(["a", "a/b"])
@example(["..a", "a..", "..."])
@example(["/a"])
def test_names_are_accepted_if_each_is_a_file_of_its_own_below_the_directory(names):
    """R08: the model is what the path means: normal, below the directory, and no file in the place of a directory."""
    try:
        check_side_names(names, "files")
    except InvalidArgument:
        accepted = False
    else:
        accepted = True
    plain = [name for name in names if name.isprintable() and "\\" not in name]
    below = [name for name in plain if name and not PurePosixPath(name).is_absolute() and os.path.normpath(f"/d/{name}").startswith("/d/")]  # fmt: skip
    normal = [name for name in below if os.path.normpath(name) == name]
    apart = not any(PurePosixPath(name) in PurePosixPath(other).parents for name in normal for other in normal)
    assert accepted == (normal == names and "." not in names and apart)
