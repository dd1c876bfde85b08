"""`StopRequest`: what a signal, a control file or a person may ask of a running loop, and how the ranks' requests become one."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias, get_args

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

StopRequest: TypeAlias = Literal["save", "stop", "save_and_stop", "abort"]
"""``save``: save now and go on. ``stop``: end here as at the last step. ``save_and_stop``: end here, and save whatever the
triggers say. ``abort``: end here and save nothing (R02)."""

REQUESTS: Final[tuple[StopRequest, ...]] = get_args(StopRequest)


def merge_requests(per_rank: Sequence[Iterable[StopRequest]]) -> tuple[StopRequest, ...]:
    """Make one answer of what was asked of each rank, so that all act alike (R01).

    Law: neither the order of the ranks, nor that of their requests, nor how often something was asked makes a difference;
    what some ranks have merged already can be merged with the others'. ``abort`` wins over everything.

    Args:
        per_rank: the requests of each rank.

    Returns:
        Each request once, in the order of `REQUESTS`; ``("abort",)`` alone if any rank was asked to.

    Raises:
        InvalidArgument: for what is no request.

    Examples:
        >>> merge_requests([(), ("stop", "save"), ("save",)])
        ('save', 'stop')
        >>> merge_requests([("save_and_stop",), ("abort",)])
        ('abort',)
    """
    if not any(per_rank):
        return ()  # at nearly every step
    asked = {checked_request(request) for requests in per_rank for request in requests}
    return ("abort",) if "abort" in asked else tuple(request for request in REQUESTS if request in asked)


def checked_request(request: object) -> StopRequest:
    """The request, if it is one.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> checked_request("save")
        'save'
    """
    for known in REQUESTS:
        if isinstance(request, str) and request == known:
            return known
    raise InvalidArgument("request", expected=f"one of {', '.join(REQUESTS)}", found=shown(request),
                          fix="'save_and_stop' is what most schedulers' warnings mean")  # fmt: skip
