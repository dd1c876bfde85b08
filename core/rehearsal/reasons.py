"""Likely reasons for a difference after a resume, from what differs and what does not."""

from collections.abc import Collection, Sequence
from typing import Final

from trainfold.core.rehearsal.trajectory import ABSENT, RunDifference

_BUILT_IN: Final = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
_STREAMS: Final = ("python", "numpy", "torch", "cuda")
_NOT_SAVED: Final = "something that the step uses is not saved. Put what it is under extra=, as a pair of functions (get, set) if need be"
_SOMETHING_ELSE: Final = (
    f"the data position and the random streams are the same, so the step was another one: {_NOT_SAVED}"
)
_NO_POSITION: Final = (
    "no loader is attached, so nothing saves which batch comes next: a loop that begins with the first one at each start trains on other "
    "batches after a resume. Attach the loader and iterate over live.batches(); or put the position under extra= as a pair of functions "
    "(get, set), and begin the loop there"
)
OTHER_BATCH: Final = (
    "the steps have other samples on another number of ranks: give the loader a trainfold.data.GlobalBatchSampler, whose batch size counts "
    "the samples of all ranks, so that each sample is read once on any number of ranks"
)


def likely_reasons(found: Sequence[RunDifference], saved: Collection[str] = ("dataset",)) -> tuple[str, ...]:
    """The probable reasons why a resumed process differs, the likeliest first.

    Args:
        found: what differs, in the order of events.
        saved: the components that the program saves.

    Examples:
        >>> drift = RunDifference(6, "value", "ema_loss", "0x1p+0", "0x1p-1", 2, 5)
        >>> print(likely_reasons([drift])[0])
        no component differs, so the recorded ema_loss comes from something beside them, such as a running average in a \
variable: record the plain value, or attach the average under extra=
    """
    if not found:
        return ()
    components = [each for each in found if each.kind == "component"]
    if not components:
        return _of_ends(found) or _of_values(found)
    first = components[0].step
    changed = {each.name: each for each in components if each.step == first}
    reasons = [*_of_data(changed), *_of_streams(changed), *_of_optimizer(changed), *_of_scheduler(changed)]
    reasons += _of_model(changed, saved)
    if "trainer" in changed:
        reasons.append(
            "trainer: steps, samples or tokens are counted otherwise; check what the loop gives to live.advance(), and that no "
            "counter of the loop's own decides it"
        )
    reasons += [
        f"{name}: either its state_dict() does not bring all of it back: compare its attributes before a save and after the restore; or it is "
        "updated with something that is not saved, such as a decay that follows a counter of the loop's own"
        for name in changed
        if name not in _BUILT_IN
    ]
    first_step = found[0].step - (found[0].kind == "value")
    if first_step > found[0].resumed_at + 1:
        reasons.append(
            f"the first steps after the resume are the same, up to step {first_step}: look at what the loop does then for the "
            "first time, such as at an epoch's end, an evaluation, or every so many steps by a counter of its own"
        )
    return tuple(reasons)


def _of_ends(found: Sequence[RunDifference]) -> tuple[str, ...]:
    """Why a loop ended at another step although everything before that step is the same."""
    if found[0].kind != "end":
        return ()
    return (
        (
            "the loop ended at another step, and all before that is the same: what ends it is not saved, such as a count of steps, a best "
            "loss or the patience of an early stop in a variable: put it under extra=, as a pair of functions (get, set) if need be; or "
            "compute it from live.progress.step"
        ),
    )


def _of_values(found: Sequence[RunDifference]) -> tuple[str, ...]:
    """Why recorded values differ although no component does."""
    values = [each for each in found if each.kind == "value"]
    names = " and ".join(dict.fromkeys(each.name for each in values))
    if all(ABSENT in (each.expected, each.found) for each in values):
        return (
            (
                f"no component differs; {names} is recorded in other steps, so what decides when is not saved, such as a counter of the "
                "loop's own: compute it from live.progress.step"
            ),
        )
    return (
        (
            f"no component differs, so the recorded {names} comes from something beside them, such as a running average in a "
            "variable: record the plain value, or attach the average under extra="
        ),
    )


def _of_data(changed: dict[str, RunDifference]) -> list[str]:
    if "dataset" not in changed:
        return []
    return [
        (
            "dataset: the position or the order of the data is another one; iterate over live.batches() alone, attach every "
            "loader, and give a sampler with state of its own state_dict() and load_state_dict()"
        )
    ]


def _of_streams(changed: dict[str, RunDifference]) -> list[str]:
    if "rng" not in changed:
        return []
    paths = " ".join(leaf for leaf, *_ in changed["rng"].leaves)
    which = [name for name in _STREAMS if name in paths]
    named = f" ({', '.join(which)})" if which else ""
    return [
        (
            f"rng{named}: random numbers were drawn otherwise. Either something draws between manager.restore() and the first batch "
            "(a dataset, a model or an evaluation made after it: restore last, just before the loop), or how many are drawn depends on "
            "something that is not saved (Dropout.p, a counter, a submodule that went to eval mode)"
        )
    ]


def _of_optimizer(changed: dict[str, RunDifference]) -> list[str]:
    if "optimizer" not in changed:
        return []
    paths = [leaf for leaf, *_ in changed["optimizer"].leaves]
    if any("group" in path or "hyper" in path or ".lr" in path for path in paths):
        return [
            (
                "optimizer: its settings differ, such as the learning rate: attach the scheduler that sets them, or compute them from "
                "live.progress.step and not from a counter of the loop's own"
            )
        ]
    if "model" not in changed:
        return [
            (
                "optimizer: its moments differ and the model does not: an optimizer inside this one, or a wrapper around it, "
                "keeps state that is not attached"
            )
        ]
    return []


def _of_scheduler(changed: dict[str, RunDifference]) -> list[str]:
    if "scheduler" not in changed:
        return []
    return [
        (
            "scheduler: it was stepped another number of times: step it before manager.step(), in the body of the one loop, and not "
            "after an inner loop over batches"
        )
    ]


def _of_model(changed: dict[str, RunDifference], saved: Collection[str]) -> list[str]:
    if "model" not in changed:
        return []
    leaves = [leaf for leaf, *_ in changed["model"].leaves]
    if leaves and all("buffer" in leaf for leaf in leaves):
        return [
            (
                "model: buffers differ and parameters do not: a forward in train mode that is not repeated, such as an evaluation "
                "without model.eval() after the save"
            )
        ]
    if {"rng", "dataset"} & changed.keys():
        return []
    first = [_SOMETHING_ELSE]
    if "dataset" not in saved:
        extra = sorted(set(saved) - {*_BUILT_IN})
        first = [
            f"the random streams and what is under extra= ({', '.join(extra)}) are the same, so the step was another one: {_NOT_SAVED}"
        ]
        if not extra:
            first = [_NO_POSITION, f"or, if the batch is the right one, {_NOT_SAVED}"]
    return [
        *first,
        "- a variable of the loop: a counter, a temperature, a loss scale, a moving average; a hidden state or gradients carried over to the next step",
        "- the samples: a generator or counter that the dataset, sampler or collate holds itself, in loader workers too",
        "- the model: a non-persistent buffer, Dropout.p or another attribute that changes, a submodule in eval mode",
        "- the optimizer: moments that a wrapper keeps in attributes of its own, or another optimizer inside it",
    ]
