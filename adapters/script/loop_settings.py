"""`LoopSettings`: what only the loop says, in its calls of `Live.check` and `Live.microbatch`, kept for the next resume and compared after it."""

from collections.abc import Mapping
from typing import Any, Final, final

import attrs

from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.backends.runs.load import ResumeDrift
from trainfold.core.errors import InvalidState, RestoreRefused
from trainfold.core.json_values import Json
from trainfold.core.resume.drift import DriftAction, make_drift
from trainfold.core.state.notes import CLIP_NORM, RAMP, SCHEDULE, WEIGHTED

_VARIES: Final = "live"  # as for a hyperparameter that a scheduler moves
_NONE: Any = object()


@final
class LoopSetting:
    """A value while every call of the run had the same one, and they were two at least. It is in no object, so only the calls show it.

    The first call after a restore is compared with the value of the checkpoint. A loop that changes it as it goes may have any. A single
    call does not say whether the loop does, so its value is kept in a list, and is not compared.

    Args:
        key: of the contract: the call, and the name of the value.
        is_whole: whether one call says it for the whole run, as a schedule does.
    """

    def __init__(self, key: str, *, is_whole: bool = False) -> None:
        self._key = key
        self._is_whole = is_whole
        self._kept: dict[str, Json] = {}  # empty before the first call
        self._resumed: tuple[int, Mapping[str, DriftAction]] | None = None  # until the first call after a restore

    def contract(self) -> dict[str, Any]:
        """The value; a list with it after a single call; empty before the first one."""
        return self._kept

    def met(self, value: Json) -> None:
        """Note the value of a call.

        Raises:
            RestoreRefused: if it is not that of the checkpoint, and the policy of the restore refuses other settings.
        """
        known, resumed, first = self._kept.get(self._key, _NONE), self._resumed, value if self._is_whole else [value]
        if known is _NONE:
            now = first
        elif known in (value, [value]):
            now = value
        elif resumed is None or known == _VARIES or isinstance(known, list):
            now = _VARIES
        else:
            self._compare(known, value, *resumed)
            now = first
        self._kept, self._resumed = {self._key: now}, None

    def restored(self, contract: Mapping[str, Any], step: int, policy: Mapping[str, DriftAction]) -> None:
        """Take over the value in a checkpoint's contract, which may have none."""
        self._kept = {key: value for key, value in contract.items() if key == self._key}
        self._resumed = step, policy

    def _compare(self, saved: Json, now: Json, step: int, policy: Mapping[str, DriftAction]) -> None:
        drift = make_drift("settings", self._key, saved=saved, wanted=now, policy=policy)
        fix = f"pass {saved}, or policy={{'contract:{self._key}': 'adapt'}} to the manager if the change is meant"
        call, _, name = self._key.rpartition(".")
        if drift.verdict == "refuse":
            found = InvalidState(call, expected=f"{name}={saved}, as before step {step}", found=now, fix=fix)
            raise RestoreRefused(call, (found,))
        if drift.verdict == "warn":
            warn_for_all(f"{drift}, in the first {call} after step {step}, where this run resumed; {fix}", ResumeDrift)


@final
@attrs.frozen(eq=False)
class LoopSettings:
    """What a loop says.

    Attributes:
        clip_norm: of `Live.check`.
        weighted: whether its loss has a weight.
        schedule: of the pipeline that it checks: its microbatches, and what it divides gradients by; empty without one.
        ramp: the schedule of `Live.microbatch`, as microbatches of all shares of the data; empty without one.
    """

    clip_norm: LoopSetting = attrs.field(factory=lambda: LoopSetting(CLIP_NORM))
    weighted: LoopSetting = attrs.field(factory=lambda: LoopSetting(WEIGHTED))
    schedule: LoopSetting = attrs.field(factory=lambda: LoopSetting(SCHEDULE, is_whole=True))
    ramp: LoopSetting = attrs.field(factory=lambda: LoopSetting(RAMP, is_whole=True))

    def contract(self) -> dict[str, Any]:
        """All of them, as far as the loop has said them."""
        return {key: value for each in self._each for key, value in each.contract().items()}

    def restored(self, contract: Mapping[str, Any], step: int, policy: Mapping[str, DriftAction]) -> None:
        """Take over what a checkpoint's contract has."""
        for each in self._each:
            each.restored(contract, step, policy)

    @property
    def _each(self) -> tuple[LoopSetting, ...]:
        return self.clip_norm, self.weighted, self.schedule, self.ramp
