"""The decisions of a save and of a resume as values, before anything is touched.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.runs.load import CheckpointPassedOver, ResumeDrift
from trainfold.backends.runs.quarantine_file import QuarantineIgnored
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.save_plan import SavePlan, plan_save

__all__ = [
    "CheckpointPassedOver",
    "Drift",
    "QuarantineIgnored",
    "Refusal",
    "ResumeDrift",
    "ResumePlan",
    "SavePlan",
    "plan_resume",
    "plan_save",
]
