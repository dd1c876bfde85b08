"""`SchedulerPart`: a learning rate scheduler, or several, as the ``scheduler`` component."""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.adapters.components.component import ObjectPart, Stateful, Undo, kind_of, wrong_kind
from trainfold.adapters.components.field_checks import field_problems
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.leaf_path import join
from trainfold.core.printable import with_article
from trainfold.core.state.state import Opaque


@final
@attrs.frozen
class SchedulerPart:
    """Schedulers behind one component; a restore never calls ``step()``.

    The learning rate itself is in the optimizer's param groups and is restored with them.

    Attributes:
        schedulers: one scheduler, or a list, tuple or dict of them.
    """

    schedulers: Any

    def _parts(self) -> list[ObjectPart]:
        return [
            ObjectPart(scheduler, path, same_keys=True)
            for path, scheduler in tree.named_leaves(self.schedulers, "scheduler")
        ]

    def capture(self) -> Any:
        """Return the ``state_dict()`` of each scheduler, in the same structure."""
        _, arrangement = tree.flatten(self.schedulers)
        return tree.unflatten(arrangement, [part.capture() for part in self._parts()])

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Check that the state has the same structure of the same schedulers, with fields of the right types."""
        parts, values = self._parts(), opaques(saved)
        if [part.path for part in parts] != list(values):
            return [
                InvalidState(
                    "scheduler",
                    expected=f"the states of {[part.path for part in parts]}",
                    found=f"the states of {list(values)}",
                    fix="attach as many schedulers as the state was captured from, in the same structure",
                )
            ]
        found = [problem for part in parts for problem in part.problems(values[part.path])]
        return found or [problem for part in parts for problem in _field_problems(part, values[part.path])]

    def write(self, saved: Any) -> Undo:
        """Load each scheduler; if one load fails, restore the old states of all."""
        values = opaques(saved)
        undos: list[Undo] = []

        def undo_all() -> None:
            for undo in reversed(undos):
                undo()

        try:
            undos.extend(part.write(values[part.path]) for part in self._parts())
        except Exception:
            undo_all()
            raise
        return undo_all

    def kinds(self) -> list[str]:
        """Return the classes, for the resume contract."""
        return [kind_of(part.target) for part in self._parts()]


def _field_problems(part: ObjectPart, saved: Opaque) -> list[TrainfoldError]:
    present, kind = part.target.state_dict(), kind_of(part.target)
    if not isinstance(present, Mapping):
        return []
    if not isinstance(saved.value, Mapping):
        return [wrong_kind(part.path, f"the fields of {with_article(kind)}", saved.value)]
    return field_problems(saved.value, present, part.path, is_torchs=kind.startswith("torch."))


def check_schedulers(schedulers: Any) -> Any:
    """Check attached schedulers.

    Raises:
        InvalidArgument: naming the first object that cannot be a scheduler.
    """
    for path, scheduler in tree.named_leaves(schedulers, "scheduler"):
        if not isinstance(scheduler, Stateful):
            raise InvalidArgument(
                path,
                expected="an object with state_dict and load_state_dict, such as a torch LRScheduler",
                found=f"{with_article(kind_of(scheduler))}",
                fix="attach the scheduler object itself; a pure function of the step needs no attaching",
            )
    return schedulers


def opaques(saved: Any) -> dict[str, Any]:
    """Return the state of each scheduler by its path, such as ``scheduler['critic']``."""
    found: dict[str, Any] = {}

    def collect(value: Any, path: str) -> None:
        level = None if isinstance(value, Opaque) else tree.one_level(value)
        if level is None:
            found[path] = value
            return
        kind, entries, children = level
        for entry, child in zip(entries, children, strict=True):
            collect(child, join(path, kind, entry))

    collect(saved, "scheduler")
    return found
