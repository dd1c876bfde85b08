"""`Drift`: a difference between a checkpoint and the run that resumes, and the verdict on each kind of difference."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.checks import mapping_given
from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import printable

DriftAction: TypeAlias = Literal["refuse", "warn", "adapt"]

# kind -> (default verdict, verdicts that a policy may choose, what differs)
KINDS: Mapping[str, tuple[DriftAction, frozenset[str], str]] = {
    "missing": ("refuse", frozenset({"refuse", "warn", "adapt"}), "a wanted leaf is not saved; adapt keeps the target's"),
    "unexpected": ("refuse", frozenset({"refuse", "warn", "adapt"}), "a saved leaf is not wanted; adapt leaves it out"),
    "dtype": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another dtype; adapt casts to the target's"),
    "shape": ("refuse", frozenset({"refuse"}), "another shape; nothing can be adapted"),
    "kind": ("refuse", frozenset({"refuse"}), "a tensor on one side and a scalar on the other"),
    "missing_component": ("refuse", frozenset({"refuse", "warn", "adapt"}), "a component is not saved; adapt keeps the target's"),
    "external_weights": ("refuse", frozenset({"refuse", "warn", "adapt"}), "saved without its model on purpose"),
    "outside_weights": ("refuse", frozenset({"refuse", "warn", "adapt"}), "frozen weights from outside a checkpoint that are not those that the run was trained with"),
    "per_rank": ("refuse", frozenset({"refuse", "warn", "adapt"}), "saved for each rank of another world; adapt keeps the target's"),
    "streams": ("adapt", frozenset({"refuse", "warn", "adapt"}), "random streams of each rank of another world, or of other shares of the data; new ones are derived from the seed, the step and the share of the data"),
    "data_ranks": ("refuse", frozenset({"refuse", "warn", "adapt"}), "the place in the data of each rank of another world; with adapt, loaders with a state of their own continue by the index of their share, and others are at their start"),
    "world": ("adapt", frozenset({"refuse", "warn", "adapt"}), "another number of ranks"),
    "versions": ("warn", frozenset({"refuse", "warn", "adapt"}), "another version of torch, numpy or trainfold"),
    "optimizer": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another optimizer class"),
    "hyperparameters": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another hyperparameter; adapt takes the target's"),
    "implementation": ("warn", frozenset({"refuse", "warn", "adapt"}), "another foreach of an optimizer, such as tensor parallelism demands; the target's is taken, and the last bits may differ"),
    "horizon": ("refuse", frozenset({"refuse", "warn", "adapt"}), "the schedule ends elsewhere; adapt takes the target's"),
    "schedule": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another schedule; adapt takes the target's"),
    "scheduler": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another setting of a torch scheduler; adapt takes the target's and keeps the count"),
    "schedule_function": ("warn", frozenset({"refuse", "warn", "adapt"}), "another function of a scheduler, such as the lambda of a LambdaLR, or another value in an object that it holds; the target's stays"),
    "scheduler_own": ("refuse", frozenset({"refuse", "warn"}), "another setting of a scheduler that is not one of torch's, so that it cannot be replayed; set it on the object after the restore"),
    "settings": ("warn", frozenset({"refuse", "warn", "adapt"}), "another setting of an attached object, such as the growth_interval of a GradScaler or the p of a Dropout; the values in its state are loaded as saved"),
    "samples": ("refuse", frozenset({"refuse", "warn", "adapt"}), "other samples to draw: how many, with which weights, or of which subset; adapt takes the target's from the next epoch on"),
    "files": ("refuse", frozenset({"refuse", "warn", "adapt"}), "other bytes in a file that belongs to the run, such as its tokenizer; the files on the disk stay, and later checkpoints have them"),
    "environment": ("warn", frozenset({"refuse", "warn", "adapt"}), "another numerical environment, such as the number of threads: other bits"),
    "dataset_size": ("refuse", frozenset({"refuse"}), "the dataset has another length, so positions mean other samples"),
    "dataset": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another data order"),
    "batch_size": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another batch size"),
    "accumulate": ("refuse", frozenset({"refuse", "warn", "adapt"}), "another number of microbatches"),
    "num_workers": ("refuse", frozenset({"refuse", "warn", "adapt"}), "other loader workers, where random streams have moved; adapt starts new streams"),
    "data_probe": ("refuse", frozenset({"refuse", "warn", "adapt"}), "the last batch, drawn again, is another; adapt draws none"),
    "contract": ("refuse", frozenset({"refuse", "warn", "adapt"}), "any other key of the contract"),
    "unproven": ("refuse", frozenset({"refuse", "warn", "adapt"}), "a contract key of this run that the checkpoint does not have"),
    "uncompared": ("warn", frozenset({"refuse", "warn", "adapt"}), "a contract key of the checkpoint that this run does not have"),
}  # fmt: skip

# kind -> its recipe on the page docs/how-to/change-a-run.md; `Drift.recipe` has the exceptions
RECIPES: Mapping[str, str] = {
    "scheduler": "Extend the run",
    "scheduler_own": "Extend the run",
    "schedule": "Extend the run",
    "horizon": "Extend the run",
    "hyperparameters": "Change another hyperparameter",
    "optimizer": "Change the optimizer",
    "batch_size": "Change the batch size",
    "samples": "Change which samples are drawn",
    "missing": "Change the layers",
    "unexpected": "Change the layers",
    "shape": "Observers that resize",
}
_CAUSES: Final = ("missing", "unexpected", "shape")  # the others tend to follow from these
RATE: Final = "Change the learning rate"
UNFREEZE: Final = "Unfreeze layers"
# kind -> the reset that helps if no policy does
_RESETS: Mapping[str, str] = {
    "optimizer": 'start its state from scratch with reset={"optimizer": "why"}',
    "dataset_size": 'begin with the first epoch of these data with reset={"dataset": "why"}',
}
ENVIRONMENT: Final = "environment."  # the prefix of the keys of the numerical environment
# kind -> the wider kind whose verdict counts if a policy does not name the kind itself
_WIDER: Mapping[str, str] = {
    "schedule": "scheduler",
    "horizon": "scheduler",
    "schedule_function": "scheduler",
    "scheduler_own": "scheduler",
    "implementation": "hyperparameters",
}
_LIVE: Final = "live"  # the value in a contract of a hyperparameter that a scheduler moves
GROUPS: Final = "optimizer.groups: "  # the prefix of a drift about a parameter that only one side's optimizer has


@final
@attrs.frozen
class Drift:
    """One difference.

    Attributes:
        kind: a key of ``KINDS``.
        where: the leaf path, the component or the contract key.
        saved: the value in the checkpoint.
        wanted: the value in this run.
        verdict: what is done about it.
    """

    kind: str
    where: str
    saved: str
    wanted: str
    verdict: DriftAction

    @property
    def to_type(self) -> DriftAction | None:
        """The verdict to pass in a policy if the difference is intended; None if no policy helps."""
        allowed = KINDS[self.kind][1]
        if self.kind in _RESETS:
            return None
        return "adapt" if "adapt" in allowed else "warn" if "warn" in allowed else None

    @property
    def reset(self) -> str | None:
        """The reset that helps if no policy does."""
        return _RESETS.get(self.kind)

    @property
    def is_loss(self) -> bool:
        """Whether the policy costs something: a leaf that starts at the script's values, or is dropped."""
        return self.kind in {"missing", "unexpected"}

    @property
    def recipe(self) -> str | None:
        """The recipe for this drift on the page docs/how-to/change-a-run.md."""
        if self.kind == "shape" and not self.is_of_buffer:
            return None
        last = self.where.rpartition(".")[2]
        if (self.kind == "hyperparameters" and last == "lr") or (self.kind == "scheduler" and ".groups[" in self.where):
            return RATE
        if self.is_loss and self.where.startswith(GROUPS):
            return UNFREEZE
        return None if self.where.startswith("optimizer.masters") else RECIPES.get(self.kind)

    @property
    def follows(self) -> bool:
        """Whether it usually follows from another drift, as the slots of a parameter follow from the parameter."""
        return self.where.startswith(("optimizer.slots[", "optimizer.groups: ", "optimizer.masters["))

    @property
    def is_of_buffer(self) -> bool:
        """Whether a buffer of a module has another shape. A buffer that takes its size from a batch may not have seen one yet."""
        return self.kind == "shape" and ".buffers['" in self.where

    @property
    def adapts_a_scheduler(self) -> bool:
        """Whether attached schedulers continue under the settings of the run. A function with the verdict ``warn`` changes nothing."""
        if self.where == "scheduler":  # only one side has a scheduler
            return False
        is_attached = self.kind == "scheduler" or (self.where == "scheduler.kind" and self.wanted.startswith("["))
        return (is_attached and self.verdict != "refuse") or (
            self.kind == "schedule_function" and self.verdict == "adapt"
        )

    def __str__(self) -> str:
        saved, wanted = self._text(self.saved), self._text(self.wanted)
        return printable(f"{self.verdict:7} {self.kind:18} {self.where}: saved {saved}, wanted {wanted}")

    def _text(self, value: str) -> str:
        return "one that a scheduler moves" if value == _LIVE and self.kind == "hyperparameters" else value


def recipes_of(drifts: Sequence[Drift]) -> tuple[str, ...]:
    """The recipes that help, each once, those for causes first. The recipe for an unfrozen layer covers its consequences.

    Examples:
        >>> drifts = [make_drift(kind, kind, saved=1, wanted=2, policy={}) for kind in ("batch_size", "missing")]
        >>> recipes_of(drifts)
        ('Change the layers', 'Change the batch size')
    """
    causes = [drift for drift in drifts if drift.kind in _CAUSES]
    causes = [drift for drift in causes if not drift.follows] or causes
    others = [drift for drift in drifts if drift.kind not in _CAUSES and (drift.saved != "nothing" or not causes)]
    return tuple(dict.fromkeys(drift.recipe for drift in (*causes, *others) if drift.recipe is not None))


def check_policy(policy: Mapping[str, DriftAction] | None) -> dict[str, DriftAction]:
    """Check every kind and verdict of a policy, before anything is read.

    Args:
        policy: drift kind (or ``"contract:<key>"`` for one key) -> ``refuse``, ``warn`` or ``adapt``.

    Raises:
        InvalidArgument: for an unknown kind, a verdict that the kind cannot have, or a policy that is not a mapping of texts.

    Examples:
        >>> check_policy({"dtype": "adapt"})
        {'dtype': 'adapt'}
        >>> check_policy({"shape": "adapt"})
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: policy['shape']: expected one of ['refuse'], found 'adapt'; another \
shape; nothing can be adapted
    """
    checked: dict[str, DriftAction] = {}
    for kind, verdict in mapping_given("policy", policy, values=str).items():
        if kind not in KINDS and not kind.startswith("contract:"):
            raise InvalidArgument(
                f"policy[{kind!r}]", expected=f"a kind among {sorted(KINDS)}", found=kind, fix="correct the name"
            )
        _, allowed, about = KINDS["contract" if kind.startswith("contract:") else kind]
        if verdict not in allowed:
            raise InvalidArgument(
                f"policy[{kind!r}]", expected=f"one of {sorted(allowed)}", found=repr(verdict), fix=about
            )
        checked[kind] = verdict
    return checked


def make_drift(kind: str, where: str, *, saved: object, wanted: object, policy: Mapping[str, DriftAction]) -> Drift:
    """A drift with its verdict: that of the policy, or the default of its kind."""
    return Drift(kind, where, str(saved), str(wanted), verdict_of(kind, where, policy))


def verdict_of(kind: str, where: str, policy: Mapping[str, DriftAction]) -> DriftAction:
    """The verdict of a policy on a drift, or the default of its kind.

    ``scheduler`` also covers ``schedule``, ``horizon`` and ``schedule_function``, unless the policy names these. For base rates in the groups
    of an optimizer, ``hyperparameters`` counts as well, as it does for ``implementation``.

    Examples:
        >>> verdict_of("horizon", "scheduler.total", {"scheduler": "adapt"}), verdict_of("horizon", "scheduler.total", {})
        ('adapt', 'refuse')
    """
    wider = _WIDER.get(kind) or ("hyperparameters" if where.startswith("optimizer.") else "contract")
    default = KINDS[kind][0]
    if kind == "scheduler" and where == "scheduler":  # it was removed, so that the script sets the rates
        wider = "hyperparameters"
    if kind in _WIDER or (kind == "scheduler" and (".groups[" in where or where == "scheduler")):
        given = policy.get(wider, default)
        default = given if given in KINDS[kind][1] else default
    return policy.get(f"contract:{where}", policy.get(kind, default))
