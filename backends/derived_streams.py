"""`derive_streams`: random streams as a function of a seed, a step and a share of the data; on another number of ranks a run continues with them."""

import logging
import random
from typing import Any, Final

import numpy as np
import torch

from trainfold.core.layout.world import Collectives
from trainfold.core.resume.resume_plan import ResumePlan
from trainfold.core.resume.resumed import drift_of_streams, seed_of_other_ranks
from trainfold.core.rng import fold_in, make_key, seed_of
from trainfold.core.state.state import Opaque, TrainState

_LOG: Final = logging.getLogger("trainfold")
STREAMS_VERSION = 1  # of the form in which a live run saves its streams
NO_STREAMS: Final = frozenset({"dtensor", "share", "shares"})
"""What is saved beside streams: whether DTensors have drawn from that of the accelerator; which share of the data the rank read, and of how many."""


def derive_streams(seed: int, *, step: int, rank: int = 0, device: torch.device | None = None) -> dict[str, Any]:
    """New streams as a function of the seed, the step and the share of the data, for a resume on another number of ranks.

    Args:
        seed: of the run; ``streams["seed"]`` of the captured streams.
        step: at which the run resumes.
        rank: of this process, or the share of the data that it reads, so that ranks with the same share have the same streams.
        device: the accelerator to include, or None.

    Returns:
        Streams that no other step or rank has. Put them into the state before the restore.

    Examples:
        >>> one, other = derive_streams(0, step=5), derive_streams(0, step=5, rank=1)
        >>> torch.equal(one["torch"], other["torch"])
        False
    """
    key = fold_in(make_key(seed), "streams", step, "rank", rank)
    version, words, gauss = random.Random(seed_of(fold_in(key, "python"))).getstate()  # noqa: S311 (no secret)
    numpy_seed = seed_of(fold_in(key, "numpy"))
    torch_seed = seed_of(fold_in(key, "torch"))
    found: dict[str, Any] = {
        "version": STREAMS_VERSION,
        "seed": seed,
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.RandomState([numpy_seed & 0xFFFFFFFF, numpy_seed >> 32]).get_state(legacy=False),
        "torch": torch.Generator().manual_seed(torch_seed).get_state(),
    }
    if device is not None:
        found[device.type] = torch.Generator(device).manual_seed(torch_seed).get_state()
    return found


def with_derived_streams(state: TrainState, plan: ResumePlan, *, share: int | None, rank: int) -> TrainState:
    """The state with new streams, if those of the checkpoint belong to other ranks or shares of the data and the plan lets them go.

    Args:
        state: that was resumed; it still has the streams of the script.
        plan: of the resume.
        share: of the data that this rank reads; None for the one that the streams of the script name, or else one a rank.
        rank: this rank.
    """
    seed = seed_of_other_ranks(plan)
    if seed is None or not isinstance(state.rng, Opaque):
        return state
    others = {name: value for name, value in state.rng.value.items() if name in NO_STREAMS}
    device = next(iter(state.rng.value.keys() - others.keys() - {"version", "seed", "python", "numpy", "torch"}), None)
    mine = others.get("share", rank) if share is None else share
    streams = derive_streams(seed, step=plan.step, rank=mine, device=None if device is None else torch.device(device))
    return state.evolve(rng=Opaque({**streams, **others}))


def tell_of_streams(outcome: ResumePlan, world: Collectives) -> None:
    """Log, once a run, that the streams are new ones, if they are."""
    seed, drift = seed_of_other_ranks(outcome), drift_of_streams(outcome)
    if seed is not None and drift is not None and world.rank == 0:
        _LOG.warning(
            "%s: the saved random streams belong to %s and cannot continue on %s; new ones are derived from seed %d, step %d and the share of the "
            "data that a rank reads: equal on ranks with the same share, and the same at each resume from this checkpoint",
            f"{outcome.run}/{outcome.checkpoint}", drift.saved.removeprefix("random streams of "), drift.wanted.partition(";")[0], seed, outcome.step,
        )  # fmt: skip
