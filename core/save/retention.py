"""`Retention`: a policy for which complete checkpoints stay, and the plan of those that may be deleted."""

from collections.abc import Collection, Iterable, Mapping
from typing import final

import attrs

from trainfold.core.best.score import Direction, checked_direction
from trainfold.core.checks import count, positive
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.retention_rules import All, Best, Every, Last, Newer, Rule, Saved

__all__ = ["Retention", "RetentionPlan", "Rule", "Saved", "check_keep_last", "keep_all", "keep_best", "keep_every", "keep_last",
           "keep_newer", "plan_left_behind", "plan_retention"]  # fmt: skip


@final
@attrs.frozen
class Retention:
    """Keeps each checkpoint that any of its rules keeps. Make it with `keep_last` and the like; ``a | b`` keeps what either keeps.

    Laws: ``(a | b).kept(...) == a.kept(...) | b.kept(...)``, so no rule uses up the budget of another. The order of the rules and of the
    checkpoints makes no difference. Each checkpoint competes only with those that have all of its components, so an export of the model
    never replaces a whole checkpoint.

    Attributes:
        rules: at least one.

    Examples:
        >>> saved = [Saved("a", 10, score=0.1), Saved("b", 20, score=0.5), Saved("c", 30, score=0.3)]
        >>> policy = keep_last(1) | keep_best(1, direction="min")
        >>> sorted(policy.kept(saved, saved[-1])), str(policy)
        (['a', 'c'], 'the last one, the best one')
        >>> export = Saved("d", 40, parts=frozenset({"model"}))
        >>> sorted(keep_last(1).kept(saved, export))
        ['c', 'd']
    """

    rules: tuple[Rule, ...] = attrs.field()

    @rules.validator
    def _has_one(self, _: object, rules: tuple[Rule, ...]) -> None:
        if not isinstance(rules, tuple) or not rules:
            raise InvalidArgument("rules", expected="at least one rule, in a tuple", found=shown(rules),
                                  fix="pass keep_last(1) to keep as little as possible")  # fmt: skip

    def __or__(self, other: "Retention") -> "Retention":
        """Keep what either keeps."""
        if not isinstance(other, Retention):
            return NotImplemented
        return Retention((*self.rules, *(rule for rule in other.rules if rule not in self.rules)))

    def __str__(self) -> str:
        return ", ".join(map(str, self.rules))

    def kept(self, checkpoints: Iterable[Saved], written: Saved) -> frozenset[str]:
        """The names that some rule keeps. `plan_retention` adds the checkpoints that stay for other reasons."""
        return frozenset(self.reasons(checkpoints, written))

    def reasons(self, checkpoints: Iterable[Saved], written: Saved) -> dict[str, tuple[str, ...]]:
        """The names that some rule keeps, oldest first, each with the rules that keep it."""
        ordered = tuple(one for one in _oldest_first(checkpoints, written) if _takes_part(one, written))
        keepers = [(str(rule), _kept_by(rule, ordered)) for rule in self.rules]
        found = {one.name: tuple(why for why, names in keepers if one.name in names) for one in ordered}
        return {name: why for name, why in found.items() if why}


def keep_last(k: int | None) -> Retention:
    """Keep the newest ``k``, including the one just written.

    Args:
        k: how many; 0 and None for all.

    Raises:
        InvalidArgument: unless it is an int >= 0 or None.
    """
    return Retention((Last(k) if (k := check_keep_last(k, "k")) else All(),))


def keep_every(n_steps: int) -> Retention:
    """Keep the first checkpoint at or after each multiple of ``n_steps`` permanently, as `should_save` counts them.

    Args:
        n_steps: optimizer steps, >= 1.

    Raises:
        InvalidArgument: for anything else.
    """
    return Retention((Every(count("n_steps", n_steps, fix="count optimizer steps")),))


def keep_best(n: int, *, direction: Direction) -> Retention:
    """Keep the ``n`` best, as `plan_best` ranks them: of equal scores the earlier step.

    The rule does not keep a checkpoint whose score is unknown or not finite.

    Args:
        n: how many, >= 1.
        direction: ``"min"`` if less is better, ``"max"`` if more is.

    Raises:
        InvalidArgument: for anything else.
    """
    return Retention((Best(count("n", n, fix="keep at least the best one"), checked_direction(direction)),))


def keep_newer(age_secs: float) -> Retention:
    """Keep those that were committed at most ``age_secs`` ago. A checkpoint of unknown age, or from the future, counts as new.

    A manager asks right after a commit, so ages are from that commit on, by the clock of the store; `trainfold prune` takes the clock of its machine.

    After a longer pause it keeps only the first new checkpoint. Add ``| keep_last(2)``.

    Args:
        age_secs: seconds, >= 0.

    Raises:
        InvalidArgument: unless it is a finite number >= 0.
    """
    return Retention((Newer(positive("age_secs", age_secs, least=0, fix="count seconds")),))


def keep_all() -> Retention:
    """Keep all of them."""
    return Retention((All(),))


@final
@attrs.frozen
class RetentionPlan:
    """What stays and what may be deleted. Prints as a table.

    Attributes:
        kept: name -> why, oldest first.
        deleted: the names to delete, oldest first.
    """

    kept: Mapping[str, tuple[str, ...]]
    deleted: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(name, "stays", ", ".join(why)) for name, why in self.kept.items()]
        rows += [(name, "goes", "nothing keeps it") for name in self.deleted]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {what:<5}  {why}" for name, what, why in rows)


def plan_retention(
    checkpoints: Iterable[Saved], *, policy: Retention, written: Saved, protected: Collection[str] = ()
) -> RetentionPlan:
    """Decide which checkpoints stay and which may be deleted after a commit.

    Laws: each checkpoint is either kept or deleted. The one just written stays, and so do the protected ones; they use up none of the budget
    of the policy. Checkpoints of a higher step or a later timeline than the one just written stay too, because a rewind has left them behind.
    Planning again after the deletion deletes nothing. A checkpoint that the policy would keep of the whole history is never deleted on the
    way.

    Args:
        checkpoints: every *complete* checkpoint of the run's lineage, in any order. Leave out incomplete ones, those in quarantine and those
            of another timeline: they neither count nor protect others.
        policy: what to keep, such as ``keep_last(3) | keep_every(10_000)``.
        written: the checkpoint that was committed just now. It replaces an entry of the same name in ``checkpoints``.
        protected: the names that a pointer, a hold or a best refers to; a mapping gives each its reason.

    Returns:
        The plan.

    Raises:
        InvalidArgument: if ``protected`` is a single text.

    Examples:
        >>> saved = [Saved(f"step-{step:02}", step) for step in (5, 10, 15, 20)]
        >>> print(plan_retention(saved, policy=keep_last(2) | keep_every(10), written=saved[-1]))
        step-10  stays  every 10 steps
        step-15  stays  the last 2
        step-20  stays  just written, the last 2, every 10 steps
        step-05  goes   nothing keeps it
        >>> plan_retention(saved, policy=keep_last(1), written=saved[-1], protected={"step-05": "the best"}).deleted
        ('step-10', 'step-15')
    """
    if isinstance(protected, str):
        raise InvalidArgument("protected", expected="names", found=shown(protected), fix="put the name into a set")
    return _planned(checkpoints, policy, written, protected)


def plan_left_behind(
    checkpoints: Iterable[Saved], *, policy: Retention | None, protected: Mapping[str, str]
) -> RetentionPlan:
    """Decide which of the checkpoints left behind by rewinds stay, and which may be deleted.

    Laws: without a policy all of them stay. With a policy, those stay that it keeps of them alone, and the protected ones. The present lineage
    of the run neither counts nor is deleted.

    Args:
        checkpoints: the complete checkpoints that the present lineage does not go through, in any order.
        policy: what to keep of them, such as ``keep_newer(7 * 86_400)``; None for all.
        protected: name -> why, for those that a pointer or a best refers to.

    Returns:
        The plan.

    Examples:
        >>> left = [Saved(f"step-{step}", step, timeline=0) for step in (20, 30, 40)]
        >>> print(plan_left_behind(left, policy=keep_last(1), protected={"step-20": "the best"}))
        step-20  stays  the best
        step-40  stays  left behind, the last one
        step-30  goes   nothing keeps it
    """
    ordered = tuple(sorted(checkpoints, key=lambda one: (one.timeline, one.step, one.name)))
    free = tuple(one for one in ordered if one.name not in protected)
    rules = (All(),) if policy is None else policy.rules
    keepers = [(str(rule), _kept_by(rule, free)) for rule in rules] if free else []
    kept: dict[str, tuple[str, ...]] = {}
    for one in ordered:
        why = tuple(f"left behind, {text}" for text, names in keepers if one.name in names)
        if one.name in protected:
            why = (protected[one.name],)
        if why:
            kept[one.name] = why
    return RetentionPlan(kept, tuple(one.name for one in ordered if one.name not in kept))


def check_keep_last(keep_last: int | None, where: str = "keep_last") -> int | None:
    """Return a checked number of checkpoints to keep.

    Raises:
        InvalidArgument: unless it is an int >= 0 or None.

    Examples:
        >>> check_keep_last(3)
        3
    """
    if keep_last is None:
        return None
    return count(where, keep_last, least=0, expected="an int >= 0, or None", fix="0 or None keeps all of them")


def _planned(
    checkpoints: Iterable[Saved], policy: Retention, written: Saved, protected: Collection[str]
) -> RetentionPlan:
    ordered = _oldest_first(checkpoints, written)
    free = [one for one in ordered if one.name not in protected]
    by_policy = policy.reasons(free, written)
    kept: dict[str, tuple[str, ...]] = {}
    for one in ordered:
        why = by_policy.get(one.name, ())
        if one.name in protected:
            why = (protected[one.name] if isinstance(protected, Mapping) else "protected", *why)
        if not _takes_part(one, written):
            why = (*why, "later than what was written")
        if one.name == written.name:
            why = ("just written", *why)
        if why:
            kept[one.name] = why
    return RetentionPlan(kept, tuple(one.name for one in ordered if one.name not in kept))


def _kept_by(rule: Rule, ordered: tuple[Saved, ...]) -> frozenset[str]:
    """What a rule keeps of each set of components, among the checkpoints that have all of them (ADR-0018)."""
    found: set[str] = set()
    for parts in {one.parts for one in ordered}:
        able = tuple(one for one in ordered if one.parts is None or (parts is not None and one.parts >= parts))
        found |= rule.kept(able) & {one.name for one in able if one.parts == parts}
    return frozenset(found)


def _oldest_first(checkpoints: Iterable[Saved], written: Saved) -> list[Saved]:
    """All of them; the one just written replaces an entry of its name."""
    others = (one for one in checkpoints if one.name != written.name)
    return sorted((*others, written), key=lambda one: (one.step, one.timeline, one.name))


def _takes_part(one: Saved, written: Saved) -> bool:
    return one.step <= written.step and one.timeline <= written.timeline
