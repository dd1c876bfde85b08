"""`StopRequest`: a request to a running loop by a signal, a control file or a user, and how the requests of all ranks are merged."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias, get_args

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

StopRequest: TypeAlias = Literal["save", "stop", "save_and_stop", "abort"]
"""``save``: save now and continue. ``stop``: end here as at the last step. ``save_and_stop``: end here and save, whatever the triggers say.
``abort``: end here and save nothing."""

REQUESTS: Final[tuple[StopRequest, ...]] = get_args(StopRequest)


def merge_requests(per_rank: Sequence[Iterable[StopRequest]]) -> tuple[StopRequest, ...]:
    """Merge the requests of all ranks, so that every rank acts the same.

    Law: the order of the ranks and of their requests makes no difference, nor does a repeated request. Merging in several steps gives the same
    result. ``abort`` wins over everything.

    Args:
        per_rank: the requests of each rank.

    Returns:
        Each request once, in the order of `REQUESTS`; ``("abort",)`` alone if any rank has it.

    Raises:
        InvalidArgument: for an unknown request.

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
    """Return a checked request.

    Raises:
        InvalidArgument: unless it is one of `REQUESTS`.

    Examples:
        >>> checked_request("save")
        'save'
    """
    for known in REQUESTS:
        if isinstance(request, str) and request == known:
            return known
    raise InvalidArgument("request", expected=f"one of {', '.join(REQUESTS)}", found=shown(request),
                          fix="'save_and_stop' is what most schedulers' warnings mean")  # fmt: skip
