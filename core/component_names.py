"""The names that components may have. Imports no torch: commands that read a run need it."""

BUILTIN_COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")


def is_extra_name(name: object) -> bool:
    """Whether a user's own component may have this name.

    Examples:
        >>> is_extra_name("ema"), is_extra_name("model"), is_extra_name("a-b")
        (True, False, False)
    """
    return isinstance(name, str) and name.isidentifier() and name not in {*BUILTIN_COMPONENTS, "extra", "manifest"}
