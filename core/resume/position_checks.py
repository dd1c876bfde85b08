"""Checks of a checkpoint's random key and position in the data, before anything is loaded.

The classes themselves take any value, because trees put specs into them.
"""

from typing import Any, Final

import attrs

from trainfold.core.data.cursor import DataCursor, check_cursor
from trainfold.core.errors import CheckpointHostile, InvalidState
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.history.inventory import Inventory
from trainfold.core.json_values import shown
from trainfold.core.problem import Problem, problem_of
from trainfold.core.resume.request import ResumeRequest
from trainfold.core.rng import KEY_BITS, Key

_CHECKED: Final = frozenset({"trainfold.Key", "trainfold.DataCursor"})


def with_positions_checked(inventory: Inventory, request: ResumeRequest) -> Inventory:
    """The inventory with a problem for each checkpoint that cannot be resumed at the position that it claims.

    Components that the request leaves out or resets are not checked. Every rank checks the parts of all ranks, so that all of them choose
    the same checkpoint.

    Args:
        inventory: the run, with the manifests that are known.
        request: what was asked for.
    """
    for entry in inventory.entries:
        if entry.manifest is not None and entry.problem is None:
            problem = _position_problem(entry.manifest, request, f"{inventory.run}/{entry.name}")
            if problem is not None:
                inventory = inventory.with_entry(attrs.evolve(entry, problem=problem))
    return inventory


def _position_problem(manifest: Manifest, request: ResumeRequest, where: str) -> Problem | None:
    for component in manifest.components:
        is_asked = request.components is None or component.name in request.components
        if is_asked and component.name not in request.reset:
            for value in _values(component):
                problem = _problem(value, where)
                if problem is not None:
                    return problem
    return None


def _values(component: ComponentRecord) -> list[Any]:
    """The keys and positions that a component consists of; they hold no tensors."""
    found = [node for node in component.nodes if isinstance(node, dict) and node.get("node") in _CHECKED]
    return [rebuild(node, component.name, lambda *_: None) for node in found]


def _problem(value: Any, where: str) -> Problem | None:
    if isinstance(value, Key) and not 0 <= value.bits < 1 << KEY_BITS:
        return problem_of(
            CheckpointHostile(f"{where}: rng.bits", expected=f"{KEY_BITS} bits", found=shown(value.bits),
                              fix='start a new key with reset={"rng": "why"}, or load an older step')
        )  # fmt: skip
    if isinstance(value, DataCursor):
        try:
            check_cursor(value, length=value.length)
        except InvalidState as error:
            return problem_of(
                CheckpointHostile(f"{where}: {error.where}", expected=error.expected, found=error.found,
                                  fix='start with the first epoch with reset={"dataset": "why"}, or load an older step')
            )  # fmt: skip
    return None
