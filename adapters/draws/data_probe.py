"""The data probe: the last batch of a position, drawn again, is what was trained on (W03)."""

import logging
from collections.abc import Collection, Mapping
from typing import Final

from trainfold.adapters.draws.batch_digest import PREFIX
from trainfold.adapters.draws.draws import Drawn, Last
from trainfold.adapters.draws.feed import mismatch
from trainfold.core.errors import DataPositionMismatch
from trainfold.core.json_values import shown
from trainfold.core.resume.drift import DriftAction, verdict_of

_LOG = logging.getLogger("trainfold")
_WHERE: Final = "state.dataset.draws.last"


def is_wanted(policy: Mapping[str, DriftAction]) -> bool:
    """Whether the last batch is to be drawn again.

    Examples:
        >>> is_wanted({}), is_wanted({"data_probe": "adapt"})
        (True, False)
    """
    return verdict_of("data_probe", _WHERE, policy) != "adapt"


def compared(
    last: Last, found: Drawn | None, policy: Mapping[str, DriftAction], *, drew_from: Collection[str] = ()
) -> DataPositionMismatch | None:
    """What is to be raised, if the batch is another one; where the policy says so, it is only logged.

    Args:
        last: the last batch of the position.
        found: what was drawn now; None at the end of the data.
        policy: of the restore.
        drew_from: components under ``extra`` that this draw has changed, and that are not known as they were before the batch: then a
            difference says nothing.
    """
    if found is not None and found.digest == last.digest:
        return None
    if not last.digest.startswith(PREFIX):
        _LOG.warning(
            "the last batch of the position is not compared: an older trainfold wrote its digest in another way"
        )
        return None
    if drew_from and found is not None:
        names = ", ".join(f"extra[{name!r}]" for name in drew_from)
        _LOG.warning(
            "the data of this run are not compared with those that it was trained on: its batches are drawn from %s, which is not known as it "
            "was before the last one. It is as it was restored, so the run goes on exactly; another dataset would go on unnoticed. To have "
            "them compared, let the dataset or sampler hold %s as an attribute",
            names,
            names,
        )
        return None
    now = "nothing" if found is None else found.kind
    error = mismatch(
        _WHERE,
        f"the last batch of the position, drawn again, to be what was trained on, {shown(last.kind)}",
        "one that looks the same and has other values" if now == last.kind else f"another one, {shown(now)}",
        "give the dataset, its transforms, the tokenizer and the collate_fn that the run was started with, and its sampler; what they draw from "
        "or count with beside the global streams belongs under extra=, held by the dataset or the sampler as an attribute, with num_workers=0; a "
        "stream with a state_dict keeps in it what it drew when its iteration was started; to go on with other data on purpose, say "
        'policy={"data_probe": "warn"}; policy={"data_probe": "adapt"} draws nothing, for data that cannot be read twice',
    )
    if verdict_of("data_probe", _WHERE, policy) == "refuse":
        return error
    _LOG.warning("%s", error)
    return None


def say_uncompared(kind: str, why: str, policy: Mapping[str, DriftAction]) -> None:
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
