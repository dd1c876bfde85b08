"""Components that are left out: optional ones of a rank, and then every rank leaves them out; or all, by a selection. One rank warns for all of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.backends.user_warning import warn_user
from trainfold.core.component_names import nothing_selected
from trainfold.core.errors import NothingSelected, OptionalLeftOut
from trainfold.core.layout.world import Collectives


def texts_of_left_out(reported: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The components to leave out, with the text of the warning for each.

    Args:
        reported: by rank, component -> why this rank leaves it out.

    Examples:
        >>> texts_of_left_out([{}, {"log": "cannot be saved: it is a file"}])["log"]
        'the optional component log is left out on every rank: on rank 1 it cannot be saved: it is a file; its objects keep the state that they have now'
    """
    found = {}
    for name in dict.fromkeys(name for each in reported for name in each):
        ranks = [rank for rank, each in enumerate(reported) if name in each]
        why = reported[ranks[0]][name]
        if len(reported) == 1:
            what = f"it {why}; its object keeps the state that it has now"
        else:
            where = ", ".join(map(str, ranks))
            what = f"on rank {where} it {why}; its objects keep the state that they have now"
        everywhere = " on every rank" if len(reported) > 1 else ""
        found[name] = f"the optional component {name} is left out{everywhere}: {what}"
    return found


def warn_of_left_out(texts: Mapping[str, str], world: Collectives) -> None:
    """Warn once a run. Every rank calls with the same texts; a warning that raises does so on all of them."""

    def warn() -> None:
        for text in texts.values():
            warn_user(text, OptionalLeftOut)

    if texts:
        on_rank_zero(world, warn, doing="warn", is_vote=True)


def warn_of_nothing(names: Collection[str] | None, present: Iterable[str]) -> None:
    """Warn once a run of a selection that has no component.

    Args:
        names: the selection; None for all.
        present: the components that there are, on every rank.
    """
    text = nothing_selected(names, present=present)
    if text is not None:
        warn_for_all(text, NothingSelected)
