"""`dry_capture`: tries at the first step what every save does, so that a run that cannot be saved fails at once."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from trainfold.adapters.components.component import ComponentAdapter
from trainfold.adapters.streams.rng_streams import RngPart, preserved_rng
from trainfold.core.errors import InvalidState, TrainfoldError, error_text
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.validate import check_kinds
from trainfold.core.state.contract import checked_contract


def dry_capture(
    parts: Mapping[str, ComponentAdapter],
    late: Callable[[], Iterable[TrainfoldError]],
    contract: Callable[[], Mapping[str, Any]],
    *,
    chosen: Collection[str] | None,
) -> tuple[TrainfoldError, ...]:
    """Capture and describe each component; nothing is copied, digested or written, and no random stream moves.

    Args:
        parts: the components that a save needs, with the random streams.
        late: returns what shows after the attach only.
        contract: returns what must be the same at a resume.
        chosen: the components to be saved; None for all.

    Returns:
        Every reason why a save would fail, in the order of the components.
    """
    rng = parts["rng"]
    assert isinstance(rng, RngPart)
    with preserved_rng(rng.device):  # the user's code may draw
        found = list(late())
        for name, part in parts.items():
            if chosen is None or name in chosen:
                found += _problems(name, lambda part=part, name=name: _describe(part, name))  # type: ignore[misc]
        found += _problems("contract", lambda: checked_contract(contract()))
    return tuple(found)


def _describe(part: ComponentAdapter, name: str) -> None:
    captured = part.capture()
    described, _ = describe(captured, name)
    check_kinds(described.node, name)


def _problems(name: str, attempt: Callable[[], Any]) -> list[TrainfoldError]:
    try:
        attempt()
    except TrainfoldError as error:
        return [error]
    except Exception as error:  # noqa: BLE001 (the user's own code: whatever it raises, a save would raise too)
        fix = "fix its state_dict() or get function; it must work from the first step on"
        return [InvalidState(name, expected="an object that returns its state", found=error_text(error), fix=fix)]
    return []
