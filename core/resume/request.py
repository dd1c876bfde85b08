"""`ResumeRequest` and `Target`: what a resume is asked for, and the run that wants it."""

from collections.abc import Mapping, Sequence
from typing import final

import attrs

from trainfold.core.checks import count, mapping_given, names_given
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.structure.describe import Described
from trainfold.core.json_values import Json
from trainfold.core.resume.drift import DriftAction, check_policy


@final
@attrs.frozen
class Target:
    """The run that wants to resume, without its values.

    Attributes:
        components: name -> description of what the run has now.
        contract: what the run says of itself, to be compared with what was saved.
        rank: this rank.
        world_size: ranks of this run.
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
    """What the caller asks for. Make it with `resume_request`.

    Attributes:
        step: an explicit step, or None for the newest of the current timeline.
        components: the components to load, or None for all.
        policy: drift kind -> verdict, where the default is not wanted.
        reset: component -> why it starts anew on purpose.
    """

    step: int | None = None
    components: tuple[str, ...] | None = None
    policy: Mapping[str, DriftAction] = attrs.field(factory=dict)
    reset: Mapping[str, str] = attrs.field(factory=dict)


def resume_request(
    *,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
) -> ResumeRequest:
    """Return a checked request.

    Args:
        step: an explicit step; None for the newest.
        components: the components to load; None for all.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``; see `KINDS` for the kinds and their defaults.
        reset: component -> why it starts anew; the reason is kept in the plan.

    Raises:
        InvalidArgument: for a negative step, an unknown kind, an empty reason, or what is no mapping and no list of names.

    Examples:
        >>> resume_request(step=120, reset={"rng": "a new seed on purpose"}).step
        120
    """
    if step is not None:
        step = count("step", step, least=0, fix="name a saved step")
    anew = mapping_given("reset", reset)
    for name, reason in anew.items():
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidArgument(
                f"reset[{name!r}]", expected="the reason in words", found=repr(reason), fix="say why it starts anew"
            )
    return ResumeRequest(step, names_given(components), check_policy(policy), anew)
