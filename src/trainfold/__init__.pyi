"""The names of `trainfold` for type checkers; at run time they are loaded from the tables of ``__init__.py`` when first used."""

from trainfold import (
    accumulation as accumulation,
    construct as construct,
    data as data,
    diloco as diloco,
    errors as errors,
    evaluation as evaluation,
    managers as managers,
    metrics as metrics,
    plans as plans,
    random as random,
    ranks as ranks,
    retention as retention,
    schedules as schedules,
    states as states,
    stores as stores,
    transforms as transforms,
    weights as weights,
)
from trainfold.adapters.evaluation.evaluate import evaluate as evaluate
from trainfold.adapters.flight.flight_log import replay as replay
from trainfold.adapters.live.attach import attach as attach
from trainfold.adapters.live.live import Live as Live
from trainfold.adapters.manager.disabled import DisabledManager as DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager as CheckpointManager
from trainfold.adapters.requests.sources import SignalRequests as SignalRequests
from trainfold.adapters.requests.stop_file import StopFile as StopFile
from trainfold.backends.ranks.in_process import SingleProcess as SingleProcess
from trainfold.backends.ranks.torch_distributed import TorchCollectives as TorchCollectives
from trainfold.backends.runs.api import load as load, plan as plan, save as save
from trainfold.backends.runs.commit import SaveResult as SaveResult
from trainfold.backends.stores.local import LocalStore as LocalStore
from trainfold.core.errors import (
    ResumeRefused as ResumeRefused,
    SaveFailed as SaveFailed,
    TrainfoldError as TrainfoldError,
)
from trainfold.core.format.fingerprint import fingerprint as fingerprint
from trainfold.core.step.optimizer import optimizer as optimizer
from trainfold.core.resume.resume_plan import Refusal as Refusal, ResumePlan as ResumePlan
from trainfold.core.state.components import merge as merge, select as select
from trainfold.core.state.leaves import Leaves as Leaves
from trainfold.core.state.state import Progress as Progress, TrainState as TrainState
from trainfold.core.step.bind import bind_model as bind_model
from trainfold.core.step.init_state import init_state as init_state
from trainfold.core.step.loss import Loss as Loss
from trainfold.core.step.step import make_step as make_step

__version__: str
