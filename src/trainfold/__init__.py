"""A PyTorch training run as a value: pure steps, exact resume, durable checkpoints without pickle.

Training is a fold: ``state' = step(state, batch)``. Where to begin::

    attach, CheckpointManager               a loop of your own, as one value: saved when due, resumed exactly
    init_state, make_step, optimizer, Loss  the same loop, composed of pure functions
    save, plan, load, fingerprint           a state to a run on a disk, and back, or every reason why not
    evaluate, metrics                       what is measured, to the bit, whatever the batch size and the ranks
    select, merge, TrainState, bind_model   the value, its components, and calling its model
    SignalRequests, StopFile                what may ask a run to save or to stop

The rest is public by subject::

    accumulation, schedules, random, data   what a step is made of, and where it is
    plans, states                           decisions as values, and what they decide about
    managers, retention                     when a run is saved, and what stays
    evaluation, metrics                     evaluation in parts
    stores, ranks                           where bytes go, and who takes part
    errors                                  all of them, each with its fix

``trainfold.properties.laws`` and ``trainfold.properties.contracts`` test your own parts; `trainfold demo` shows it all.
The names here are re-exports, each documented where it lives. Importing this package imports nothing else; a name brings its
module when it is first used.
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING as _CHECKED
from typing import Any as _Any

__version__ = "0.1.0"

if _CHECKED:
    from trainfold import accumulation as accumulation
    from trainfold import data as data
    from trainfold import errors as errors
    from trainfold import evaluation as evaluation
    from trainfold import managers as managers
    from trainfold import metrics as metrics
    from trainfold import plans as plans
    from trainfold import random as random
    from trainfold import ranks as ranks
    from trainfold import retention as retention
    from trainfold import schedules as schedules
    from trainfold import states as states
    from trainfold import stores as stores
    from trainfold.adapters.evaluation.evaluate import evaluate as evaluate
    from trainfold.adapters.live.live import Live as Live
    from trainfold.adapters.live.live import attach as attach
    from trainfold.adapters.manager.disabled import DisabledManager as DisabledManager
    from trainfold.adapters.manager.manager import CheckpointManager as CheckpointManager
    from trainfold.adapters.requests.sources import SignalRequests as SignalRequests
    from trainfold.adapters.requests.stop_file import StopFile as StopFile
    from trainfold.backends.ranks.in_process import SingleProcess as SingleProcess
    from trainfold.backends.ranks.torch_distributed import TorchCollectives as TorchCollectives
    from trainfold.backends.runs.api import load as load
    from trainfold.backends.runs.api import plan as plan
    from trainfold.backends.runs.api import save as save
    from trainfold.backends.runs.save import SaveResult as SaveResult
    from trainfold.backends.stores.local import LocalStore as LocalStore
    from trainfold.core.errors import RestoreRefused as RestoreRefused
    from trainfold.core.errors import ResumeRefused as ResumeRefused
    from trainfold.core.errors import SaveFailed as SaveFailed
    from trainfold.core.errors import TrainfoldError as TrainfoldError
    from trainfold.core.format.fingerprint import fingerprint as fingerprint
    from trainfold.core.optim.optimizer import optimizer as optimizer
    from trainfold.core.resume.resume_plan import Refusal as Refusal
    from trainfold.core.resume.resume_plan import ResumePlan as ResumePlan
    from trainfold.core.state.components import merge as merge
    from trainfold.core.state.components import select as select
    from trainfold.core.state.leaves import Leaves as Leaves
    from trainfold.core.state.state import Progress as Progress
    from trainfold.core.state.state import TrainState as TrainState
    from trainfold.core.step.bind import bind_model as bind_model
    from trainfold.core.step.init_state import init_state as init_state
    from trainfold.core.step.loss import Loss as Loss
    from trainfold.core.step.step import make_step as make_step

_MODULES = (
    "accumulation",
    "data",
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
)
_MODULE_OF = {
    "CheckpointManager": "trainfold.adapters.manager.manager",
    "DisabledManager": "trainfold.adapters.manager.disabled",
    "Leaves": "trainfold.core.state.leaves",
    "Live": "trainfold.adapters.live.live",
    "LocalStore": "trainfold.backends.stores.local",
    "Loss": "trainfold.core.step.loss",
    "Progress": "trainfold.core.state.state",
    "Refusal": "trainfold.core.resume.resume_plan",
    "RestoreRefused": "trainfold.core.errors",
    "ResumePlan": "trainfold.core.resume.resume_plan",
    "ResumeRefused": "trainfold.core.errors",
    "SaveFailed": "trainfold.core.errors",
    "SaveResult": "trainfold.backends.runs.save",
    "SignalRequests": "trainfold.adapters.requests.sources",
    "SingleProcess": "trainfold.backends.ranks.in_process",
    "StopFile": "trainfold.adapters.requests.stop_file",
    "TorchCollectives": "trainfold.backends.ranks.torch_distributed",
    "TrainState": "trainfold.core.state.state",
    "TrainfoldError": "trainfold.core.errors",
    "attach": "trainfold.adapters.live.live",
    "bind_model": "trainfold.core.step.bind",
    "evaluate": "trainfold.adapters.evaluation.evaluate",
    "fingerprint": "trainfold.core.format.fingerprint",
    "init_state": "trainfold.core.step.init_state",
    "load": "trainfold.backends.runs.api",
    "make_step": "trainfold.core.step.step",
    "merge": "trainfold.core.state.components",
    "optimizer": "trainfold.core.optim.optimizer",
    "plan": "trainfold.backends.runs.api",
    "save": "trainfold.backends.runs.api",
    "select": "trainfold.core.state.components",
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
