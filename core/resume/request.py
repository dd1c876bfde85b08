"""`ResumeRequest`: what the caller wants to load. `Target`: the run that resumes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.checks import count, mapping_given, names_given
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json
from trainfold.core.resume.drift import DriftAction, check_policy

if TYPE_CHECKING:
    from trainfold.core.transform.transform import Transform


@final
@attrs.frozen
class Target:
    """The run that resumes, without its values.

    Attributes:
        components: name -> description of the component that the run has now.
        contract: the contract of the run, to be compared with the saved one.
        rank: this rank.
        world_size: the number of ranks of this run.
        versions: library -> version.
    """

    components: Mapping[str, Described]
    contract: Mapping[str, Json] = attrs.field(factory=dict)
    rank: int = 0
    world_size: int = 1
    versions: Mapping[str, str] = attrs.field(factory=dict)


@final
@attrs.frozen
class ResumeRequest:
    """What the caller wants to load. Make it with `resume_request`.

    Attributes:
        step: an explicit step, or None for the newest of the current timeline.
        components: the components to load, or None for all.
        policy: drift kind -> verdict, to replace a default.
        reset: component -> why it starts from scratch on purpose.
        optional: components that the run can do without; they may be reset although neither the run nor the checkpoint has them.
        transform: gives the tensors of a checkpoint other names; None for none.
        new_streams: whether the streams of some rank belong to another share of the data than it reads, so that every rank derives new ones.
    """

    step: int | None = None
    components: tuple[str, ...] | None = None
    policy: Mapping[str, DriftAction] = attrs.field(factory=dict)
    reset: Mapping[str, str] = attrs.field(factory=dict)
    optional: frozenset[str] = frozenset()
    new_streams: bool = False
    transform: "Transform | None" = None


def resume_request(
    *,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
    transform: "Transform | None" = None,
) -> ResumeRequest:
    """Return a checked request.

    Args:
        step: an explicit step; None for the newest.
        components: the components to load; None for all.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``; see `KINDS` for the kinds and their defaults.
        reset: component -> why it starts from scratch; the plan keeps the reason.
        transform: rules that give the tensors of a checkpoint the names that they have now; None for none.

    Raises:
        InvalidArgument: for a negative step, an unknown kind, an empty reason, or an argument that is neither a mapping nor a list of names.

    Examples:
        >>> resume_request(step=120, reset={"rng": "a new seed on purpose"}).step
        120
    """
    if step is not None:
        step = count("step", step, least=0, fix="name a saved step")
    reasons = mapping_given("reset", reset)
    for name, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidArgument(
                f"reset[{name!r}]",
                expected="the reason in words",
                found=repr(reason),
                fix="write why it starts from scratch",
            )
    if transform is not None:
        _check_transform(transform)
    return ResumeRequest(step, names_given(components), check_policy(policy), reasons, transform=transform)


def _check_transform(given: object) -> None:
    from trainfold.core.transform.transform import Transform  # late: few resumes rename

    if not isinstance(given, Transform):
        raise InvalidArgument(
            "transform",
            expected="a transform, such as trainfold.transforms.rename(old, new)",
            found=type(given).__qualname__,
            fix="put several in order with trainfold.transforms.compose(...)",
        )
