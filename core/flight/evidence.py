"""`Evidence`: what the logs, the checkpoints and the replays of two runs show; `LeafApart`: one leaf that differs."""

from typing import final

import attrs

from trainfold.core.flight.step_difference import HostDraws, StepDifference


@final
@attrs.frozen
class LeafApart:
    """One leaf of two states that differs.

    Attributes:
        path: of the leaf.
        text: by how much, in words.
        differing: how many elements differ; None where that is not known.
        size: the largest difference of values; None where it is not known.
    """

    path: str
    text: str = ""
    differing: int | None = None
    size: float | None = None


@final
@attrs.frozen
class Evidence:
    """What is known of two runs.

    Attributes:
        difference: the first step in which their logs differ; None if none does, or one of them has no log.
        rank: the one whose logs differ there; None where those of several do, or none.
        shown: what both logs have of each step after the last state that is the same, up to where they part, such as ``batch``.
        before: what some earlier step of these shows, up to the one before; ``state`` too.
        is_settled: whether the state just before the step is known to be the same.
        is_compared: whether both have a checkpoint, so that their settings, environments and components were compared.
        same_at: the latest step at which both have a checkpoint, and the same state; None if there is none.
        apart_at: the first one after it at which they have different states; None if there is none.
        leaves: those that differ there.
        absent: components that only one of them has there.
        settings: keys of their contracts that differ: (key, of the first, of the second).
        environment: those of the numerical environment, in the same form.
        seeds: the seeds of their streams, if they differ.
        generators: components that are random generators, and elsewhere at ``apart_at``.
        host: streams of python and numpy that are elsewhere in the first checkpoint that both have.
        draws: which of them draw from such streams, by the logs; None if these do not show it.
        unrecorded: the first and the last step just before the difference, and after the last state that is the same, of which a log has no record;
            None without any.
        repeats: whether the program of the first did again what the first, and the second, did; None where that is not known.
        own: whether the program of each did again what that run did; None where that is not known.
        reached: the last step that the program of each ran again; None where that was not tried.
    """

    difference: StepDifference | None = None
    rank: int | None = None
    shown: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    is_settled: bool = False
    is_compared: bool = False
    same_at: int | None = None
    apart_at: int | None = None
    leaves: tuple[LeafApart, ...] = ()
    absent: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    environment: tuple[tuple[str, str, str], ...] = ()
    seeds: tuple[str, str] | None = None
    generators: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    draws: HostDraws | None = None
    unrecorded: tuple[int, int] | None = None
    repeats: tuple[bool | None, bool | None] = (None, None)
    own: tuple[bool | None, bool | None] = (None, None)
    reached: tuple[int | None, int | None] = (None, None)
