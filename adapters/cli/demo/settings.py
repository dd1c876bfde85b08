"""`DemoSettings`: the settings shared by the demo's two runs. Does not import torch, because the parent process never needs it."""

import json
from pathlib import Path
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.step.accumulation import accumulation_steps, check_plan

SETTINGS_FILE = "demo.json"
MADE_BY = "trainfold demo"
_MIN_STEPS = 6
_SAVES = 6
_BATCH_SIZE = 8
_MICROBATCH_SIZE = 4
_WORLDS = tuple(each for each in range(1, _BATCH_SIZE + 1) if _BATCH_SIZE % each == 0)
_THREADS = 1  # two threads that wait for each other are slow on a busy machine


@final
@attrs.frozen
class DemoSettings:
    """What to train, and how. Make it with `make_settings`.

    Attributes:
        steps: optimizer steps of the whole run.
        seed: determines the initial weights, the dropout, the order of the data and the moments of the kills.
        donate: whether a step may write the new state into the storage of the old one.
        save_every: steps between two checkpoints.
        kills: the smallest number of kills of the second run; one of them is during a save.
        threads: torch threads, the same in every process: another number may round sums differently.
        layers: transformer blocks.
        width: width of the residual stream.
        heads: attention heads.
        context: bytes that the model sees.
        batch_size: windows per step.
        accumulate: microbatches per step.
        dropout: probability of dropout.
        heldout_bytes: length of the tail of the text that is used for the evaluation.
        nproc: processes of each run, which share each batch. torchrun starts several.
    """

    steps: int
    seed: int
    donate: bool
    save_every: int
    kills: int
    threads: int
    layers: int
    width: int
    heads: int
    context: int
    batch_size: int
    accumulate: int
    dropout: float
    heldout_bytes: int
    nproc: int


def make_settings(
    *, steps: int = 80, seed: int = 0, donate: bool = True, tiny: bool = False, nproc: int = 1
) -> DemoSettings:
    """Return checked settings.

    Args:
        steps: optimizer steps of the whole run.
        seed: of everything that is random, >= 0.
        donate: whether a step may consume the storage of its input.
        tiny: a model of 30 thousand parameters instead of 5 million, for tests.
        nproc: processes of each run, a divisor of the batch.

    Returns:
        The settings, with a checkpoint after each sixth of the run.

    Raises:
        InvalidArgument: if there are too few steps to kill the run three times, the seed is negative, or the batch cannot be shared evenly by so many processes.

    Examples:
        >>> make_settings(steps=60).save_every
        10
    """
    if steps < _MIN_STEPS:
        raise InvalidArgument(
            "--steps",
            expected=f"{_MIN_STEPS} or more, so that the run can be killed three times",
            found=steps,
            fix="pass more steps",
        )
    if not 0 <= seed < 2**63:
        raise InvalidArgument("--seed", expected="an int in [0, 2**63)", found=seed, fix="pass another seed")
    if nproc not in _WORLDS:
        raise InvalidArgument(
            "--nproc",
            expected=f"one of {', '.join(map(str, _WORLDS))}, which share the {_BATCH_SIZE} samples of a batch evenly",
            found=nproc,
            fix="2 processes are enough to see it",
        )
    accumulate = accumulation_steps(
        per_step=_BATCH_SIZE, per_microbatch=max(1, _MICROBATCH_SIZE // nproc), world_size=nproc
    )
    check_plan(microbatches=None, accumulate=accumulate, max_steps=steps)  # the text is read again at its end
    size = (
        {"layers": 2, "width": 32, "heads": 2, "context": 16, "heldout_bytes": 1 << 10}
        if tiny
        else {"layers": 6, "width": 256, "heads": 4, "context": 48, "heldout_bytes": 4 << 10}
    )
    return DemoSettings(
        steps=steps,
        seed=seed,
        donate=donate,
        save_every=steps // _SAVES,
        kills=3,
        threads=_THREADS,
        batch_size=_BATCH_SIZE,
        accumulate=accumulate,
        dropout=0.1,
        nproc=nproc,
        **size,
    )


def write_settings(settings: DemoSettings, directory: Path) -> None:
    """Write the settings where both runs read them; the file also marks the directory as one of the demo."""
    text = json.dumps({"made_by": MADE_BY, **attrs.asdict(settings)}, indent=2)
    (directory / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")


def read_settings(directory: Path) -> DemoSettings:
    """Read the settings that `write_settings` wrote."""
    found = json.loads((directory / SETTINGS_FILE).read_text(encoding="utf-8"))
    return DemoSettings(**{name: value for name, value in found.items() if name != "made_by"})
