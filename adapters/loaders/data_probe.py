"""The data probe: the last batch of a position, drawn again, is what was trained on (W03)."""

import logging
from collections.abc import Mapping
from typing import Final

from trainfold.adapters.loaders.draws import Last
from trainfold.adapters.loaders.feed import mismatch
from trainfold.core.errors import DataPositionMismatch
from trainfold.core.policy import Verdict, verdict_of

_LOG = logging.getLogger("trainfold")
_WHERE: Final = "state.dataset.draws.last"


def is_wanted(policy: Mapping[str, Verdict]) -> bool:
    """Whether the last batch is to be drawn again.

    Examples:
        >>> is_wanted({}), is_wanted({"data_probe": "adapt"})
        (True, False)
    """
    return verdict_of("data_probe", _WHERE, policy) != "adapt"


def compared(last: Last, found: str, policy: Mapping[str, Verdict]) -> DataPositionMismatch | None:
    """What is to be raised, if the batch is another one; where the policy says so, it is only logged.

    Args:
        last: the last batch of the position.
        found: the digest of what was drawn.
        policy: of the restore.
    """
    if found == last.digest:
        return None
    error = mismatch(
        _WHERE,
        f"the last batch of the position, drawn again, to be what was trained on ({last.digest})",
        f"another one ({found})",
        "give the dataset, its transforms, the tokenizer and the collate_fn that the run was started with, and let them "
        "draw from the global streams or from the index; a stream with a state_dict keeps in it what it drew when its iteration was "
        "started; to go on with other data on purpose, say "
        'policy={"data_probe": "warn"}; policy={"data_probe": "adapt"} draws nothing, for data that cannot be read twice',
    )
    if verdict_of("data_probe", _WHERE, policy) == "refuse":
        return error
    _LOG.warning("%s", error)
    return None


def say_uncompared(kind: str, why: str, policy: Mapping[str, Verdict]) -> None:
    """Warn that nothing is drawn again (W03).

    Args:
        kind: what the loader is called.
        why: the reason.
        policy: of the restore.
    """
    if is_wanted(policy):
        _LOG.warning(
            "the data of this run are not compared with those that it was trained on: %s, of the %s, and so its last batch is not drawn "
            "again. Another dataset of the same length, a changed transform, tokenizer or collate_fn would go on unnoticed, and so would "
            "a stream that draws when its iteration starts. Compare them yourself; a plain DataLoader over a map-style dataset is "
            'compared; policy={"data_probe": "adapt"} says that you know',
            why,
            kind,
        )
