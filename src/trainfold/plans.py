"""The decisions of a save and of a resume, as values that exist before anything is written or loaded.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.runs.begin import begin_checkpoint
from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift, resume_target
from trainfold.backends.runs.one_view import examined
from trainfold.backends.runs.quarantine_file import QuarantineIgnored
from trainfold.backends.runs.restore import run_resume
from trainfold.backends.runs.save import run_save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.runs.snapshot import Snapshot, describe_state
from trainfold.core.history.inventory import Inventory
from trainfold.core.layout.leaf_spec import diff_specs
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.request import ResumeRequest, Target, resume_request
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.save_plan import SavePlan, plan_save
from trainfold.core.weights.several.fresh_start import FreshStart

__all__ = [
    "CheckpointPassedOver",
    "Drift",
    "FreshStart",
    "Inventory",
    "QuarantineIgnored",
    "Refusal",
    "ResumeDrift",
    "ResumePlan",
    "ResumeRequest",
    "SavePlan",
    "Snapshot",
    "Target",
    "begin_checkpoint",
    "describe_state",
    "diff_specs",
    "examined",
    "plan_resume",
    "plan_save",
    "read_inventory",
    "resume_request",
    "resume_target",
    "run_resume",
    "run_save",
]
