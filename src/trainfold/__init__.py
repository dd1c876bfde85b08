"""A PyTorch training run as a value: pure steps, exact resume, durable checkpoints without pickle.

Training is a fold: ``state' = step(state, batch)``. The names here are re-exports; each is documented where it lives.
Importing this package imports nothing else; a name brings its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainfold.core.components import merge as merge
    from trainfold.core.components import select as select
    from trainfold.core.components import validate_components as validate_components
    from trainfold.core.errors import TrainfoldError as TrainfoldError
    from trainfold.core.state import Progress as Progress
    from trainfold.core.state import TrainState as TrainState


_MODULE_OF = {
    "Progress": "trainfold.core.state",
    "TrainState": "trainfold.core.state",
    "TrainfoldError": "trainfold.core.errors",
    "merge": "trainfold.core.components",
    "select": "trainfold.core.components",
    "validate_components": "trainfold.core.components",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 the table is the list


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
