"""Handles optional components: one that cannot be saved or restored is left out, and the reason is returned for a warning."""

from collections.abc import Collection, Mapping
from typing import Any

from trainfold.adapters.components.component import ComponentAdapter
from trainfold.core.checks import names_given
from trainfold.core.errors import InvalidArgument, TrainfoldError, error_text
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.validate import check_kinds


def optional_given(names: Collection[str], extra: Collection[str]) -> frozenset[str]:
    """Check the names of optional components.

    Raises:
        InvalidArgument: for a name that is not under ``extra``: what trains is never optional.
    """
    given = frozenset(names_given(names) or ())
    unknown = sorted(given - set(extra))
    if unknown:
        raise InvalidArgument(
            "attach.optional",
            expected=f"names under extra=, which are {sorted(extra)}",
            found=unknown,
            fix="leave them out: the model, the optimizer and the data are never optional",
        )
    return given


def captured(parts: Mapping[str, ComponentAdapter], optional: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each component, without optional ones that cannot be saved; and why these are left out.

    Args:
        parts: the components.
        optional: names of those that need not be saved.
    """
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, part in parts.items():
        if name not in optional:
            found[name] = _captured_part(name, part)
            continue
        try:
            value = part.capture()
            described, _ = describe(value, name)
            check_kinds(described.node, name)
        except Exception as error:  # noqa: BLE001 (the user's code; whatever it raises, the run continues)
            left_out[name] = f"cannot be saved: {error_text(error)}"
        else:
            found[name] = value
    return found, left_out


def _captured_part(name: str, part: ComponentAdapter) -> Any:
    """The value of a component. What its own code raises keeps its type, which may be that of an exception of a signal's handler."""
    try:
        return part.capture()
    except TrainfoldError:
        raise
    except Exception as error:
        error.add_note(
            f"raised while {name!r} was captured for a checkpoint; its state_dict() or get function must work at every save"
        )
        raise


def unfit(parts: Mapping[str, ComponentAdapter], saved: Mapping[str, Any], optional: Collection[str]) -> dict[str, str]:
    """The optional components that the state lacks or that cannot take its values, each with the reason.

    Args:
        parts: the components.
        saved: the components of the state.
        optional: names of those that need not be restored.
    """
    found: dict[str, str] = {}
    for name in sorted(optional):
        if name not in parts:
            continue
        try:
            reasons = parts[name].problems(saved[name]) if name in saved else ["the state does not have it"]
        except Exception as error:  # noqa: BLE001 (as above)
            reasons = [error_text(error)]
        if reasons:
            found[name] = f"cannot be restored: {reasons[0]}"
    return found
