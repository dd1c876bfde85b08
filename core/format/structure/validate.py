"""Whether a component's structure matches its classes: a parameter's name is text, masters are tensors by name, a counter is an int.

`places` proves that a node is well formed; this proves that it is the node that it claims to be.
"""

from trainfold.core.errors import InvalidState
from trainfold.core.format.structure.kinds import ANYTHING, Misfit
from trainfold.core.format.structure.own_nodes import COMPONENTS, NODES
from trainfold.core.json_values import Json


def misfit_of(node: Json, name: str) -> Misfit | None:
    """The first position of a component's structure that does not match its class, or None.

    Args:
        node: the structure; well formed, as `trainfold.core.format.structure.places.places` proves.
        name: the component.

    Examples:
        >>> node = {"node": "trainfold.Progress", "fields": {"step": "three"}}
        >>> misfit_of(node, "trainer")
        Misfit(path='trainer.step', expected='an int', found="'three'")
        >>> misfit_of({"list": [node]}, "notes").path
        'notes[0].step'
    """
    found = COMPONENTS.get(name, ANYTHING).misfit(node, NODES)
    return None if found is None else found.below(name)


def check_kinds(node: Json, name: str) -> None:
    """Check a component before it is saved: a reader must accept what is written.

    Raises:
        InvalidState: naming the place.
    """
    misfit = misfit_of(node, name)
    if misfit is not None:
        raise InvalidState(
            f"state.{misfit.path}",
            expected=misfit.expected,
            found=misfit.found,
            fix="build this part as its class says; put your own values into `extra`",
        )
