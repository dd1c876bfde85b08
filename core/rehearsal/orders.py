"""`Orders`: the orders of a rehearsal, or of a replay, to the managers of a program, as the text of an environment variable (ADR-0013)."""

import json
from collections.abc import Mapping
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

VARIABLE: Final = "TRAINFOLD_REHEARSAL"
RECORD_NAME: Final = "record.jsonl"
MANIFESTS_NAME: Final = "manifests"
KEPT_NAME: Final = "kept"
_WORDS: Final = ("home", "notes")
_COUNTS: Final = ("every", "steps", "linger_after")
_REPLAY: Final = {"source": str, "until_nonfinite": bool}


@final
@attrs.frozen
class ReplayOrders:
    """What a replay asks, beside what a rehearsal does.

    Attributes:
        source: the run that is replayed; its manager saves into the folder ``run`` of the home, which begins with one checkpoint of it.
        until_nonfinite: end at the first module whose output has a NaN or an infinity.
    """

    source: str
    until_nonfinite: bool = False


@final
@attrs.frozen
class Orders:
    """What a rehearsal asks of each manager that the program makes.

    Attributes:
        home: a directory. A manager whose run is in it stays there; any other manager saves into it during the rehearsal.
        notes: the directory for the records of this process: what happened, a copy of each manifest, and links to its files.
        every: save at the first boundary at or after each multiple of so many optimizer steps.
        steps: the run ends at the first boundary at or after this step.
        linger_after: wait briefly after each step that follows this one, so that a quick program does not outrun the kill.
        replay: what a replay asks; None in a rehearsal.
    """

    home: str
    notes: str
    every: int
    steps: int
    linger_after: int
    replay: ReplayOrders | None = None


def encode_orders(orders: Orders) -> str:
    """The text of the variable.

    Examples:
        >>> encode_orders(Orders("/r/whole", "/r/whole/start-1", every=5, steps=40, linger_after=40))
        '{"home": "/r/whole", "notes": "/r/whole/start-1", "every": 5, "steps": 40, "linger_after": 40}'
    """
    return json.dumps({name: value for name, value in attrs.asdict(orders).items() if value is not None})


def orders_of(environment: Mapping[str, str]) -> Orders | None:
    """The orders in an environment; None without a rehearsal.

    Raises:
        InvalidArgument: if the variable is set and does not hold orders: a run that only looks rehearsed must not start.

    Examples:
        >>> orders_of({}) is None
        True
        >>> text = encode_orders(Orders("/r/whole", "/r/whole/start-1", every=5, steps=40, linger_after=40))
        >>> orders_of({VARIABLE: text}).steps
        40
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    replay = found.pop("replay", None) if isinstance(found, dict) else None
    if (
        not isinstance(found, dict)
        or set(found) != {*_WORDS, *_COUNTS}
        or not (
            replay is None
            or (isinstance(replay, dict) and {name: type(each) for name, each in replay.items()} == _REPLAY)
        )
        or not all(isinstance(found[name], str) and found[name].startswith("/") for name in _WORDS)
        or not all(type(found[name]) is int and found[name] > 0 for name in _COUNTS)
    ):
        raise InvalidArgument(
            VARIABLE,
            expected="what `trainfold rehearse` or `trainfold replay` sets for the programs that they start",
            found=shown(text),
            fix=f"unset {VARIABLE}: only these commands set it",
        )
    return Orders(**found, replay=None if replay is None else ReplayOrders(**replay))
