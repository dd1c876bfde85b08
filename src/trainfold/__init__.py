"""A PyTorch training run as a value: pure steps, exact resume, durable checkpoints without pickle.

Training is a fold: ``state' = step(state, batch)``. Where to begin::

    attach, CheckpointManager               a loop of your own, as one value: saved when due, resumed exactly
    init_state, make_step, optimizer, Loss  the same loop, composed of pure functions
    save, plan, load, fingerprint           a state to a run on a disk, and back, or every reason why not
    evaluate, metrics                       what is measured, to the bit, whatever the batch size and the ranks
    replay                                  steps run again, and compared with the log of a run
    select, merge, TrainState, bind_model   the value, its components, and calling its model
    SignalRequests, StopFile                what may ask a run to save or to stop

The rest is public by subject::

    accumulation, schedules, random, data   what a step is made of, and where it is
    plans, states                           decisions as values, and what they decide about
    managers, retention                     when a run is saved, and what stays
    evaluation, metrics                     evaluation in parts
    construct                               a model on the meta device, and values for what no checkpoint has
    weights, diloco                         weights from outside, and many workers on a slow network
    transforms                              other names, cuts and dtypes for weights
    stores, ranks                           where bytes go, and who takes part
    errors                                  all of them, each with its fix

``trainfold.properties.laws`` and ``trainfold.properties.contracts`` test your own parts; `trainfold demo` shows it all.
The names here are re-exports, each documented where it lives. Importing this package imports nothing else; the first use of a
name imports its module.
"""

from importlib import import_module as _import
from typing import Any as _Any

__version__ = "0.1.0"

_MODULES = (
    "accumulation",
    "construct",
    "data",
    "diloco",
    "errors",
    "evaluation",
    "managers",
    "metrics",
    "plans",
    "random",
    "ranks",
    "retention",
    "schedules",
    "states",
    "stores",
    "transforms",
    "weights",
)
_MODULE_OF = {  # ``__init__.pyi`` says the same to type checkers
    name: module
    for module, names in {
        "trainfold.adapters.evaluation.evaluate": ("evaluate",),
        "trainfold.adapters.flight.flight_log": ("replay",),
        "trainfold.adapters.live.attach": ("attach",),
        "trainfold.adapters.live.live": ("Live",),
        "trainfold.adapters.manager.disabled": ("DisabledManager",),
        "trainfold.adapters.manager.manager": ("CheckpointManager",),
        "trainfold.adapters.requests.sources": ("SignalRequests",),
        "trainfold.adapters.requests.stop_file": ("StopFile",),
        "trainfold.backends.ranks.in_process": ("SingleProcess",),
        "trainfold.backends.ranks.torch_distributed": ("TorchCollectives",),
        "trainfold.backends.runs.api": ("load", "plan", "save"),
        "trainfold.backends.runs.commit": ("SaveResult",),
        "trainfold.backends.stores.local": ("LocalStore",),
        "trainfold.core.errors": ("ResumeRefused", "SaveFailed", "TrainfoldError"),
        "trainfold.core.format.fingerprint": ("fingerprint",),
        "trainfold.core.step.optimizer": ("optimizer",),
        "trainfold.core.resume.resume_plan": ("Refusal", "ResumePlan"),
        "trainfold.core.state.components": ("merge", "select"),
        "trainfold.core.state.leaves": ("Leaves",),
        "trainfold.core.state.state": ("Progress", "TrainState"),
        "trainfold.core.step.bind": ("bind_model",),
        "trainfold.core.step.init_state": ("init_state",),
        "trainfold.core.step.loss": ("Loss",),
        "trainfold.core.step.step": ("make_step",),
    }.items()
    for name in names
}

__all__ = ["__version__", *_MODULES, *_MODULE_OF]  # noqa: PLE0604 the tables are the list


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        found = _import(f"{__name__}.{name}")
    elif name in _MODULE_OF:
        found = getattr(_import(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
