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
        ulps: the same in units in the last place; None where it is not known.
    """

    path: str
    text: str = ""
    differing: int | None = None
    size: float | None = None
    ulps: int | None = None


@final
@attrs.frozen
class Evidence:
    """What is known of two runs.

    Attributes:
        difference: the first step in which their logs differ; None if none does, or one of them has no log.
        rank: the one whose logs differ there; None where those of several do, or none.
        alike: what is known of both, and the same in both up to where they part: of each step after the last state that is the same, ``samples``,
            ``batch``, ``streams``, ``host_streams``, ``loss``, ``norm``, and ``streams before`` it; of the states and contracts saved there, what `of_states` lists.
        before: which results some earlier step of these shows, up to the one before: ``loss``, ``norm``, ``state``.
        is_whole: whether both have a record of each of these steps, on all ranks.
        is_settled: whether the state just before the step is known to be the same.
        ranks: how many saved the states.
        same_at: the latest step before the difference at which both have a checkpoint, and the same state; None if there is none.
        apart_at: the first one after it at which they have different states; None if there is none.
        leaves: those that differ there.
        absent: components that only one of them has there.
        settings: keys of their contracts that differ: (key, of the first, of the second).
        rates: first rates of groups of optimizers that differ, in the same form: no settings, as they may follow from another cause.
        environment: those of the numerical environment, in the same form.
        seeds: the seeds of their streams, if they differ, and the streams were never seen to be the same.
        generators: components that are random generators, and elsewhere at ``apart_at``.
        host: streams of python and numpy that are elsewhere in the first checkpoint that both have, or in the last one that was compared.
        unsaved: the paths of what changes with training and that is in no checkpoint, as one of them says: a resume resets it.
        workers: how many workers the loaders of both have, in words, if these are not as many.
        draws: which of them draw from such streams, by the logs; None if these do not show it.
        drew_beside: whether torch's streams are known to have moved otherwise after the step and before its state, as in an evaluation with dropout.
        unrecorded: the first and the last step just before the difference, and after the last state that is the same, of which a log has no record;
            None without any.
        repeats: whether the program of the first did again what the first, and the second, did; None where that is not known.
        own: whether the program of each did again what that run did; None where that is not known.
        elsewhere: whether the program of each was run again in another environment than the run, or without what no checkpoint has, so that another result says nothing.
        is_one_program: whether one program was run again for both.
        reached: the last step that the program of each ran again; None where that was not tried.
    """

    difference: StepDifference | None = None
    rank: int | None = None
    alike: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    is_whole: bool = False
    is_settled: bool = False
    ranks: int = 1
    same_at: int | None = None
    apart_at: int | None = None
    leaves: tuple[LeafApart, ...] = ()
    absent: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    rates: tuple[tuple[str, str, str], ...] = ()
    environment: tuple[tuple[str, str, str], ...] = ()
    seeds: tuple[str, str] | None = None
    generators: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    workers: tuple[str, str] | None = None
    draws: HostDraws | None = None
    drew_beside: bool = False
    unrecorded: tuple[int, int] | None = None
    repeats: tuple[bool | None, bool | None] = (None, None)
    own: tuple[bool | None, bool | None] = (None, None)
    elsewhere: tuple[bool, bool] = (False, False)
    is_one_program: bool = False
    reached: tuple[int | None, int | None] = (None, None)

    @property
    def is_by_state(self) -> bool:
        """Whether only a state differs where they part: one before the first step that differs, or that after it, and not in both model and optimizer, as after another gradient."""
        step = self.difference
        if step is None or (self.apart_at is not None and self.apart_at < step.step):
            return True
        return step.parts == ("state",) and not {"model", "optimizer"} <= {*step.components}

    @property
    def repeat_themselves(self) -> tuple[bool | None, bool | None]:
        """Whether the program of each does again what that run did, in its environment; one that repeats the second is the program of the second, too."""
        own = self.own[0], True if self.repeats[1] else self.own[1]
        first, second = (None if away and not again else again for again, away in zip(own, self.elsewhere, strict=True))
        return first, second
