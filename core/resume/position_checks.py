"""Checks of a checkpoint's random key and position in the data, before anything is loaded.

The classes themselves take any value, because trees put specs into them.
"""

from typing import Final

import attrs

from trainfold.core.data.bounds import check_bounds
from trainfold.core.errors import CheckpointHostile, InvalidState
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.format.structure.scalars import Unbuilt, read_scalars
from trainfold.core.history.inventory import Inventory
from trainfold.core.json_values import shown
from trainfold.core.problem import Problem, problem_of
from trainfold.core.resume.request import ResumeRequest

_KEY: Final = "trainfold.Key"
_CURSOR: Final = "trainfold.DataCursor"
KEY_BITS: Final = 128  # as in `trainfold.core.rng`, which imports torch; a test compares them


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


def _values(component: ComponentRecord) -> list[Unbuilt]:
    """The keys and positions that a component consists of; they hold no tensors."""
    found = [node for node in component.nodes if isinstance(node, dict) and node.get("node") in (_KEY, _CURSOR)]
    return [read_scalars(node, component.name) for node in found]


def _problem(value: Unbuilt, where: str) -> Problem | None:
    held = value.fields
    if value.kind == _KEY and not 0 <= held["bits"] < 1 << KEY_BITS:
        return problem_of(
            CheckpointHostile(f"{where}: rng.bits", expected=f"{KEY_BITS} bits", found=shown(held["bits"]),
                              fix='start a new key with reset={"rng": "why"}, or load an older step')
        )  # fmt: skip
    if value.kind == _CURSOR:
        try:
            check_bounds(held["length"], seed=held["seed"], epoch=held["epoch"], next_index=held["next_index"])
        except InvalidState as error:
            return problem_of(
                CheckpointHostile(f"{where}: {error.where}", expected=error.expected, found=error.found,
                                  fix='start with the first epoch with reset={"dataset": "why"}, or load an older step')
            )  # fmt: skip
    return None
