"""`kept_by`: what a checkpoint of a trainer of Lightning has beside its components. `go_on`: puts it back, at the first batch of a resume."""

from collections.abc import Mapping
from typing import Any, Final

from trainfold.adapters.bridges.lightning_logged import is_alike, states_of_metrics, sums_of
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.user_warning import warn_user

_ELSEWHERE: Final = ("state_dict", "optimizer_states", "lr_schedulers")  # components of their own
_OF_SCHEDULE: Final = ("interval", "frequency", "monitor", "strict", "reduce_on_plateau")


def kept_by(trainer: Any, saved: Mapping[str, Any], *, is_at_end: bool) -> dict[str, Any]:
    """What Lightning saves and what it does not, without the components.

    Args:
        trainer: between two batches.
        saved: what it has saved now.
        is_at_end: whether its training has ended.
    """
    checkpoint = {name: value for name, value in saved.items() if name not in _ELSEWHERE}
    if not is_alike(saved["state_dict"], trainer.strategy.lightning_module_state_dict()):
        checkpoint["state_dict"] = saved["state_dict"]  # a hook has put others there, such as averages
    return {
        "checkpoint": checkpoint,
        "metrics": dict(trainer.callback_metrics),
        "sums": sums_of(trainer),
        "states": states_of_metrics(trainer.lightning_module),
        "is_at_end": is_at_end,
        "schedules": _schedules(trainer),
    }


def go_on(trainer: Any, kept: Mapping[str, Any]) -> None:
    """Let the loops go on where they were; a schedule that is stepped otherwise is a warning.

    Args:
        trainer: at the first batch, with everything else restored.
        kept: from `kept_by`, with ``accumulates`` where a callback had changed that.
    """
    saved, wanted = kept.get("schedules", []), _schedules(trainer)
    if saved and saved != wanted:
        warn_user(
            f"the schedulers are stepped otherwise: saved {saved}, wanted {wanted}; put it back if it is not meant",
            ResumeDrift,
        )
    trainer.callback_metrics.update(kept["metrics"])
    if kept["is_at_end"]:
        return
    trainer.accumulate_grad_batches = kept.get("accumulates") or trainer.accumulate_grad_batches
    for name, states in kept["states"].items():
        vars(trainer.lightning_module.get_submodule(name)).update(states)
    fit = trainer.fit_loop
    fit.load_state_dict(kept["checkpoint"]["loops"]["fit_loop"])
    steps = fit.epoch_loop
    for each in (fit, steps, steps.val_loop, steps.automatic_optimization, steps.manual_optimization):
        each.on_iteration_done()  # it goes on inside of them, and does not begin them again


def _schedules(trainer: Any) -> list[dict[str, Any]]:
    return [{name: getattr(each, name) for name in _OF_SCHEDULE} for each in trainer.lr_scheduler_configs]
