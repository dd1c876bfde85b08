"""`PendingComponents`: keeps restored components until `Live.register` attaches their objects."""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final, final

from trainfold.adapters.components.component import ComponentAdapter, copied
from trainfold.adapters.live.restore import write_all
from trainfold.adapters.script.attached_settings import changed_settings, saved_settings, warn_changed
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.errors import InvalidState, RestoreRefused
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")


@final
class PendingComponents:
    """Values kept by a restore, and the settings of their objects according to the checkpoint.

    Attributes:
        values: component -> its value.
        settings: what must be the same once the objects are attached.
        policy: of the last restore.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.policy: Mapping[str, DriftAction] = {}

    def restored(
        self, state: TrainState, saved: Mapping[str, Any], parts: Collection[str], chosen: Collection[str] | None
    ) -> None:
        """Keep the components of a restored state that nothing is attached for, and log them.

        Args:
            state: that was restored.
            saved: its components.
            parts: the run's components.
            chosen: the restored components; None for all. Those that were not chosen stay pending.
        """
        leftover = [name for name in saved if name not in parts and (chosen is None or name in chosen)]
        kept = {name: copied(saved[name]) for name in leftover if name in state.extra}
        if kept:
            log_for_all("the state has %s, not registered here: kept until live.register()", list(kept))
        if len(kept) < len(leftover):
            ignored = [name for name in leftover if name not in kept]
            log_for_all("the state has %s, and no attached object takes it: ignored", ignored)
        unchosen = {} if chosen is None else {name: each for name, each in self.values.items() if name not in chosen}
        self.values = {**unchosen, **kept}
        self.settings = {key: value for name in kept for key, value in saved_settings(state.contract, name).items()}

    def give(self, name: str, parts: Mapping[str, ComponentAdapter], settings: Mapping[str, Any]) -> None:
        """Write pending values into the components of a new object.

        Args:
            name: of the object.
            parts: its components.
            settings: of the object now.

        Raises:
            RestoreRefused: with every reason why they cannot be written; nothing is.
        """
        pending = {each: part for each, part in parts.items() if each in self.values}
        drifts = changed_settings(saved_settings(self.settings, name), settings, self.policy)
        reasons = [reason for each, part in pending.items() for reason in part.problems(self.values[each])]
        reasons += [
            InvalidState("live.register", expected=f"{each.where} = {each.saved}", found=each.wanted, fix="put it back")
            for each in drifts
            if each.verdict == "refuse"
        ]
        if reasons:
            raise RestoreRefused(f"live.register({name!r})", tuple(reasons))
        write_all(pending, self.values)
        warn_changed(drifts)
        done = saved_settings(self.settings, name)
        self.settings = {key: value for key, value in self.settings.items() if key not in done}
        self.values = {each: value for each, value in self.values.items() if each not in pending}
