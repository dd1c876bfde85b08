"""`Clipping`: the limit of the gradient's norm that a loop gives to `Live.check`, kept for the next resume and compared after it."""

from collections.abc import Mapping
from typing import Any, Final, final

from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.backends.runs.load import ResumeDrift
from trainfold.core.errors import InvalidState, RestoreRefused
from trainfold.core.json_values import Json, encode_scalar
from trainfold.core.resume.drift import DriftAction, make_drift
from trainfold.core.state.notes import CLIP_NORM

_VARIES: Final = "live"  # as for a hyperparameter that a scheduler moves

_NONE: Any = object()


@final
class Clipping:
    """The limit while every check of the run had the same one, and they were two at least. It is in no object, so only the checks show it.

    The first check after a restore is compared with the limit of the checkpoint. A loop that changes its limit as it goes may have any. A single
    check does not say whether the loop does, so its limit is kept in a list, and is not compared.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Json] = {}  # empty before the first check
        self._resumed: tuple[int, Mapping[str, DriftAction]] | None = None  # until the first check after a restore

    def contract(self) -> dict[str, Any]:
        """The limit, None for no clipping; a list with it after a single check; empty before the first one."""
        return self._kept

    def checked(self, clip_norm: float | None) -> None:
        """Note the limit of a check.

        Raises:
            RestoreRefused: if it is not that of the checkpoint, and the policy of the restore refuses other settings.
        """
        limit, resumed = encode_scalar(clip_norm, CLIP_NORM), self._resumed
        known = self._kept.get(CLIP_NORM, _NONE)
        if known is _NONE:
            now: Json = [limit]
        elif known in (limit, [limit]):
            now = limit
        elif resumed is None or known == _VARIES or isinstance(known, list):
            now = _VARIES
        else:
            self._compare(known, limit, *resumed)
            now = [limit]
        self._kept, self._resumed = {CLIP_NORM: now}, None

    def restored(self, contract: Mapping[str, Any], step: int, policy: Mapping[str, DriftAction]) -> None:
        """Take over the limit in a checkpoint's contract, which may have none."""
        self._kept = {key: value for key, value in contract.items() if key == CLIP_NORM}
        self._resumed = step, policy

    def _compare(self, saved: Json, now: Json, step: int, policy: Mapping[str, DriftAction]) -> None:
        drift = make_drift("settings", CLIP_NORM, saved=saved, wanted=now, policy=policy)
        fix = f"pass {saved}, or policy={{'contract:{CLIP_NORM}': 'adapt'}} to the manager if the change is meant"
        if drift.verdict == "refuse":
            found = InvalidState("live.check", expected=f"clip_norm={saved}, as before step {step}", found=now, fix=fix)
            raise RestoreRefused("live.check", (found,))
        if drift.verdict == "warn":
            warn_for_all(
                f"{drift}, in the first live.check after step {step}, where this run resumed; {fix}", ResumeDrift
            )
