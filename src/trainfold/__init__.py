"""A PyTorch training run as a value: pure steps, exact resume, durable checkpoints without pickle.

Training is a fold: ``state' = step(state, batch)``. Where to begin::

    init_state, make_step, optimizer, Loss                  compose a run from functions
    bind_model                                              call the model with a state's parameters, to evaluate
    constant, linear, cosine, wsd, horizon                  schedules: functions of the step
    check_plan, accumulation_steps, windows                 how many microbatches make a step, before a model exists
    save, plan, load, fingerprint                           a state to a run on a disk, and back, or every reason why not
    attach, CheckpointManager                               the same for mutable torch objects, in the background if you like
    SignalRequests, StopFile                                what may ask a run to save or to stop
    keep_last, keep_every, keep_best, keep_newer            which checkpoints stay
    create_checkpoint_manager, CheckpointConfig             a manager from a config, also one of your own
    advise_cadence                                          how often to save
    TrainState, select, merge                               the value, and its components
    DataCursor, sample_order, shard_of                      where a run is in its data
    make_key, fold_in, forked_rng                           randomness as an argument
    metrics, evaluate, eval_batches, time_limit             what is measured, to the bit, whatever the batch size and the ranks
    TorchCollectives                                        ranks of torch.distributed
    make_best_record, is_better, decide_best, save_best     which checkpoint is the best, decided once
    plan_save, plan_resume, Store, Collectives              what the above are made of

``trainfold.properties.laws`` and ``trainfold.properties.contracts`` test your own parts; `trainfold demo` shows it all.
The names here are re-exports, each documented where it lives. Importing this package imports nothing else; a name brings its
module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainfold import metrics as metrics
    from trainfold.adapters.bridges.torchmetrics import TorchMetric as TorchMetric
    from trainfold.adapters.evaluation.evaluate import evaluate as evaluate
    from trainfold.adapters.evaluation.time_limit import time_limit as time_limit
    from trainfold.adapters.live.live import Live as Live
    from trainfold.adapters.live.live import attach as attach
    from trainfold.adapters.manager.config import CheckpointConfig as CheckpointConfig
    from trainfold.adapters.manager.config import create_checkpoint_manager as create_checkpoint_manager
    from trainfold.adapters.manager.disabled import DisabledManager as DisabledManager
    from trainfold.adapters.manager.manager import CheckpointManager as CheckpointManager
    from trainfold.adapters.manager.protocol import CheckpointManagerLike as CheckpointManagerLike
    from trainfold.adapters.manager.protocol import LoadDecision as LoadDecision
    from trainfold.adapters.manager.protocol import Restored as Restored
    from trainfold.adapters.manager.protocol import SaveOutcome as SaveOutcome
    from trainfold.adapters.requests.sources import Asked as Asked
    from trainfold.adapters.requests.sources import Combined as Combined
    from trainfold.adapters.requests.sources import RequestSource as RequestSource
    from trainfold.adapters.requests.sources import SignalRequests as SignalRequests
    from trainfold.adapters.requests.stop_file import StopFile as StopFile
    from trainfold.backends.ranks.in_process import SingleProcess as SingleProcess
    from trainfold.backends.ranks.torch_distributed import TorchCollectives as TorchCollectives
    from trainfold.backends.runs.api import load as load
    from trainfold.backends.runs.api import plan as plan
    from trainfold.backends.runs.api import save as save
    from trainfold.backends.runs.best_file import load_best as load_best
    from trainfold.backends.runs.best_file import save_best as save_best
    from trainfold.backends.runs.load import CheckpointPassedOver as CheckpointPassedOver
    from trainfold.backends.runs.load import ResumeDrift as ResumeDrift
    from trainfold.backends.runs.quarantine_file import QuarantineIgnored as QuarantineIgnored
    from trainfold.backends.runs.save import SaveResult as SaveResult
    from trainfold.backends.stores.local import LocalStore as LocalStore
    from trainfold.backends.stores.memory import MemoryStore as MemoryStore
    from trainfold.backends.stores.protocol import Store as Store
    from trainfold.core.best.record import BestRecord as BestRecord
    from trainfold.core.best.record import decide_best as decide_best
    from trainfold.core.best.record import is_better as is_better
    from trainfold.core.best.record import make_best_record as make_best_record
    from trainfold.core.data.cursor import DataCursor as DataCursor
    from trainfold.core.data.cursor import make_cursor as make_cursor
    from trainfold.core.data.eval_cursor import DistributedEvalCursor as DistributedEvalCursor
    from trainfold.core.data.eval_cursor import eval_batches as eval_batches
    from trainfold.core.data.eval_cursor import make_eval_cursor as make_eval_cursor
    from trainfold.core.data.permutation import Permutation as Permutation
    from trainfold.core.data.permutation import sample_order as sample_order
    from trainfold.core.data.shares import even_split as even_split
    from trainfold.core.data.shares import shard_of as shard_of
    from trainfold.core.errors import CheckpointDamaged as CheckpointDamaged
    from trainfold.core.errors import NonFinite as NonFinite
    from trainfold.core.errors import RankFailed as RankFailed
    from trainfold.core.errors import RestoreRefused as RestoreRefused
    from trainfold.core.errors import ResumeRefused as ResumeRefused
    from trainfold.core.errors import RunLocked as RunLocked
    from trainfold.core.errors import SaveFailed as SaveFailed
    from trainfold.core.errors import StateDonated as StateDonated
    from trainfold.core.errors import TrainfoldError as TrainfoldError
    from trainfold.core.evaluate.evaluation import Evaluation as Evaluation
    from trainfold.core.evaluate.evaluation import evaluation_of as evaluation_of
    from trainfold.core.evaluate.suite import Tally as Tally
    from trainfold.core.evaluate.suite import no_tally as no_tally
    from trainfold.core.format.fingerprint import fingerprint as fingerprint
    from trainfold.core.layout.world import Collectives as Collectives
    from trainfold.core.layout.world import World as World
    from trainfold.core.layout.world import make_world as make_world
    from trainfold.core.optim.optimizer import Optimizer as Optimizer
    from trainfold.core.optim.optimizer import optimizer as optimizer
    from trainfold.core.optim.schedule import Schedule as Schedule
    from trainfold.core.optim.schedule import constant as constant
    from trainfold.core.optim.schedule import cosine as cosine
    from trainfold.core.optim.schedule import horizon as horizon
    from trainfold.core.optim.schedule import linear as linear
    from trainfold.core.optim.schedule import wsd as wsd
    from trainfold.core.resume.drift import Drift as Drift
    from trainfold.core.resume.planner import plan_resume as plan_resume
    from trainfold.core.resume.resume_plan import Refusal as Refusal
    from trainfold.core.resume.resume_plan import ResumePlan as ResumePlan
    from trainfold.core.rng import Key as Key
    from trainfold.core.rng import fold_in as fold_in
    from trainfold.core.rng import forked_rng as forked_rng
    from trainfold.core.rng import make_key as make_key
    from trainfold.core.rng import seed_of as seed_of
    from trainfold.core.save.cadence import advise_cadence as advise_cadence
    from trainfold.core.save.events import Event as Event
    from trainfold.core.save.retention import Retention as Retention
    from trainfold.core.save.retention import keep_all as keep_all
    from trainfold.core.save.retention import keep_best as keep_best
    from trainfold.core.save.retention import keep_every as keep_every
    from trainfold.core.save.retention import keep_last as keep_last
    from trainfold.core.save.retention import keep_newer as keep_newer
    from trainfold.core.save.retention import plan_retention as plan_retention
    from trainfold.core.save.save_plan import SavePlan as SavePlan
    from trainfold.core.save.save_plan import plan_save as plan_save
    from trainfold.core.save.triggers import Verdict as Verdict
    from trainfold.core.state.components import merge as merge
    from trainfold.core.state.components import select as select
    from trainfold.core.state.components import validate_components as validate_components
    from trainfold.core.state.leaves import Leaves as Leaves
    from trainfold.core.state.masters import refresh_masters as refresh_masters
    from trainfold.core.state.spec import Difference as Difference
    from trainfold.core.state.spec import LeafSpec as LeafSpec
    from trainfold.core.state.spec import ScalarSpec as ScalarSpec
    from trainfold.core.state.spec import diff_specs as diff_specs
    from trainfold.core.state.spec import spec_of as spec_of
    from trainfold.core.state.state import ModelState as ModelState
    from trainfold.core.state.state import Opaque as Opaque
    from trainfold.core.state.state import OptimizerState as OptimizerState
    from trainfold.core.state.state import ParamGroup as ParamGroup
    from trainfold.core.state.state import Progress as Progress
    from trainfold.core.state.state import TrainState as TrainState
    from trainfold.core.state.state import make_progress as make_progress
    from trainfold.core.step.accumulation import accumulation_steps as accumulation_steps
    from trainfold.core.step.accumulation import check_plan as check_plan
    from trainfold.core.step.accumulation import windows as windows
    from trainfold.core.step.bind import bind_model as bind_model
    from trainfold.core.step.init_state import init_state as init_state
    from trainfold.core.step.loss import Loss as Loss
    from trainfold.core.step.step import make_step as make_step


_MODULE_OF = {
    "Asked": "trainfold.adapters.requests.sources",
    "BestRecord": "trainfold.core.best.record",
    "CheckpointConfig": "trainfold.adapters.manager.config",
    "CheckpointDamaged": "trainfold.core.errors",
    "CheckpointManager": "trainfold.adapters.manager.manager",
    "CheckpointManagerLike": "trainfold.adapters.manager.protocol",
    "CheckpointPassedOver": "trainfold.backends.runs.load",
    "Collectives": "trainfold.core.layout.world",
    "Combined": "trainfold.adapters.requests.sources",
    "DataCursor": "trainfold.core.data.cursor",
    "Difference": "trainfold.core.state.spec",
    "DisabledManager": "trainfold.adapters.manager.disabled",
    "DistributedEvalCursor": "trainfold.core.data.eval_cursor",
    "Drift": "trainfold.core.resume.drift",
    "Evaluation": "trainfold.core.evaluate.evaluation",
    "Event": "trainfold.core.save.events",
    "Key": "trainfold.core.rng",
    "LeafSpec": "trainfold.core.state.spec",
    "Leaves": "trainfold.core.state.leaves",
    "Live": "trainfold.adapters.live.live",
    "LoadDecision": "trainfold.adapters.manager.protocol",
    "LocalStore": "trainfold.backends.stores.local",
    "Loss": "trainfold.core.step.loss",
    "MemoryStore": "trainfold.backends.stores.memory",
    "ModelState": "trainfold.core.state.state",
    "NonFinite": "trainfold.core.errors",
    "Opaque": "trainfold.core.state.state",
    "Optimizer": "trainfold.core.optim.optimizer",
    "OptimizerState": "trainfold.core.state.state",
    "ParamGroup": "trainfold.core.state.state",
    "Permutation": "trainfold.core.data.permutation",
    "Progress": "trainfold.core.state.state",
    "QuarantineIgnored": "trainfold.backends.runs.quarantine_file",
    "RankFailed": "trainfold.core.errors",
    "Refusal": "trainfold.core.resume.resume_plan",
    "RequestSource": "trainfold.adapters.requests.sources",
    "RestoreRefused": "trainfold.core.errors",
    "Restored": "trainfold.adapters.manager.protocol",
    "ResumeDrift": "trainfold.backends.runs.load",
    "ResumePlan": "trainfold.core.resume.resume_plan",
    "ResumeRefused": "trainfold.core.errors",
    "Retention": "trainfold.core.save.retention",
    "RunLocked": "trainfold.core.errors",
    "SaveFailed": "trainfold.core.errors",
    "SaveOutcome": "trainfold.adapters.manager.protocol",
    "SavePlan": "trainfold.core.save.save_plan",
    "SaveResult": "trainfold.backends.runs.save",
    "ScalarSpec": "trainfold.core.state.spec",
    "Schedule": "trainfold.core.optim.schedule",
    "SignalRequests": "trainfold.adapters.requests.sources",
    "SingleProcess": "trainfold.backends.ranks.in_process",
    "StateDonated": "trainfold.core.errors",
    "StopFile": "trainfold.adapters.requests.stop_file",
    "Store": "trainfold.backends.stores.protocol",
    "Tally": "trainfold.core.evaluate.suite",
    "TorchCollectives": "trainfold.backends.ranks.torch_distributed",
    "TorchMetric": "trainfold.adapters.bridges.torchmetrics",
    "TrainState": "trainfold.core.state.state",
    "TrainfoldError": "trainfold.core.errors",
    "Verdict": "trainfold.core.save.triggers",
    "World": "trainfold.core.layout.world",
    "accumulation_steps": "trainfold.core.step.accumulation",
    "advise_cadence": "trainfold.core.save.cadence",
    "attach": "trainfold.adapters.live.live",
    "bind_model": "trainfold.core.step.bind",
    "check_plan": "trainfold.core.step.accumulation",
    "constant": "trainfold.core.optim.schedule",
    "cosine": "trainfold.core.optim.schedule",
    "create_checkpoint_manager": "trainfold.adapters.manager.config",
    "decide_best": "trainfold.core.best.record",
    "diff_specs": "trainfold.core.state.spec",
    "eval_batches": "trainfold.core.data.eval_cursor",
    "evaluate": "trainfold.adapters.evaluation.evaluate",
    "evaluation_of": "trainfold.core.evaluate.evaluation",
    "even_split": "trainfold.core.data.shares",
    "fingerprint": "trainfold.core.format.fingerprint",
    "fold_in": "trainfold.core.rng",
    "forked_rng": "trainfold.core.rng",
    "horizon": "trainfold.core.optim.schedule",
    "init_state": "trainfold.core.step.init_state",
    "is_better": "trainfold.core.best.record",
    "keep_all": "trainfold.core.save.retention",
    "keep_best": "trainfold.core.save.retention",
    "keep_every": "trainfold.core.save.retention",
    "keep_last": "trainfold.core.save.retention",
    "keep_newer": "trainfold.core.save.retention",
    "linear": "trainfold.core.optim.schedule",
    "load": "trainfold.backends.runs.api",
    "load_best": "trainfold.backends.runs.best_file",
    "make_best_record": "trainfold.core.best.record",
    "make_cursor": "trainfold.core.data.cursor",
    "make_eval_cursor": "trainfold.core.data.eval_cursor",
    "make_key": "trainfold.core.rng",
    "make_progress": "trainfold.core.state.state",
    "make_step": "trainfold.core.step.step",
    "make_world": "trainfold.core.layout.world",
    "merge": "trainfold.core.state.components",
    "metrics": "trainfold",
    "no_tally": "trainfold.core.evaluate.suite",
    "optimizer": "trainfold.core.optim.optimizer",
    "plan": "trainfold.backends.runs.api",
    "plan_resume": "trainfold.core.resume.planner",
    "plan_retention": "trainfold.core.save.retention",
    "plan_save": "trainfold.core.save.save_plan",
    "refresh_masters": "trainfold.core.state.masters",
    "sample_order": "trainfold.core.data.permutation",
    "save": "trainfold.backends.runs.api",
    "save_best": "trainfold.backends.runs.best_file",
    "seed_of": "trainfold.core.rng",
    "select": "trainfold.core.state.components",
    "shard_of": "trainfold.core.data.shares",
    "spec_of": "trainfold.core.state.spec",
    "time_limit": "trainfold.adapters.evaluation.time_limit",
    "validate_components": "trainfold.core.state.components",
    "windows": "trainfold.core.step.accumulation",
    "wsd": "trainfold.core.optim.schedule",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 the table is the list


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f"{module}.{name}" if module == __name__ else module)
    value = globals()[name] = found if module == __name__ else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
