"""The data probe: at a resume, the last batch trained on is drawn again, and its digest compared with the recorded one.

This module decides whether to probe, and compares; the iterators of `loaders` draw the batch.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Final

from trainfold.adapters.batches.batch_digest import PREFIX
from trainfold.adapters.batches.draws import Drawn, LastBatch
from trainfold.adapters.batches.feed import mismatch
from trainfold.core.errors import DataPositionMismatch
from trainfold.core.json_values import shown
from trainfold.core.resume.drift import DriftAction, verdict_of

_LOG = logging.getLogger("trainfold")
_WHERE: Final = "state.dataset.draws.last"


def is_wanted(policy: Mapping[str, DriftAction]) -> bool:
    """Whether to draw the last batch again.

    Examples:
        >>> is_wanted({}), is_wanted({"data_probe": "adapt"})
        (True, False)
    """
    return verdict_of("data_probe", _WHERE, policy) != "adapt"


def compare_batch(
    last: LastBatch, found: Drawn | None, policy: Mapping[str, DriftAction], *, drew_from: Collection[str] = ()
) -> DataPositionMismatch | None:
    """Compare the batch with the one that was drawn now: return the error to raise if they differ, or log it if the policy warns.

    Args:
        last: the last batch of the position.
        found: the batch drawn now; None at the end of the data.
        policy: the policy of the restore.
        drew_from: components under ``extra`` that this draw has changed and whose values before the batch are unknown. If
            there are any, a difference proves nothing.
    """
    if found is not None and found.digest == last.digest:
        return None
    if not last.digest.startswith(PREFIX):
        _LOG.warning(
            "the last batch of the position is not compared: an older trainfold computed its digest in another way"
        )
        return None
    if drew_from and found is not None:
        names = ", ".join(f"extra[{name!r}]" for name in drew_from)
        _LOG.warning(
            "the data of this run are not compared with the data that it was trained on: its batches are drawn from %s, whose value before the "
            "last batch is unknown. Its value after that batch was restored, so the run continues exactly, but a different dataset would go "
            "unnoticed. To compare the data, keep %s as an attribute of the dataset or sampler",
            names,
            names,
        )
        return None
    now = "nothing" if found is None else found.kind
    seeded = (
        "seed before the data are made, such as with torch.manual_seed(0), if they are random; otherwise "
        if now == last.kind
        else ""
    )
    error = mismatch(
        _WHERE,
        f"the last batch of the position, drawn again, to be what was trained on, {shown(last.kind)}",
        "one that looks the same but has other values" if now == last.kind else f"another one, {shown(now)}",
        f"{seeded}use the dataset, transforms, tokenizer, collate_fn and sampler that the run was started with; put generators and counters that they "
        "use, other than the global streams, under extra= and make them attributes of the dataset or sampler, with num_workers=0; in a "
        "stream with a state_dict, save what it draws when its iteration starts; to change the data on purpose, pass "
        'policy={"data_probe": "warn"}; for data that cannot be read twice, pass policy={"data_probe": "adapt"}, which draws nothing',
    )
    if verdict_of("data_probe", _WHERE, policy) == "refuse":
        return error
    _LOG.warning("%s", error)
    return None


def warn_uncompared(kind: str, why: str, policy: Mapping[str, DriftAction]) -> None:
    """Warn that no batch is drawn again, so the data are not compared.

    Args:
        kind: the name of the loader's kind.
        why: the reason.
        policy: the policy of the restore.
    """
    if is_wanted(policy):
        _LOG.warning(
            "the data of this run are not compared with the data that it was trained on: %s, of the %s, and so its last batch is not drawn "
            "again. Another dataset of the same length, or a changed transform, tokenizer or collate_fn, would go unnoticed, and so would "
            "a stream that draws when its iteration starts. Compare the data yourself, or use a plain DataLoader over a map-style dataset, "
            'which is compared; policy={"data_probe": "adapt"} silences this warning',
            why,
            kind,
        )
