"""A pause of the cyclic garbage collector while a large value is built."""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def without_collecting(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function with the cyclic garbage collector paused.

    Building the values for 1e5 leaves allocates millions of objects and frees none of them, so each collection in between
    walks everything and finds nothing: measured, two thirds of the time of a plan.

    Examples:
        >>> without_collecting(gc.isenabled)()
        False
        >>> gc.isenabled()
        True
    """

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return paused
