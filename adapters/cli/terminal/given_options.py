"""The arguments that several commands have, and how their values are read as typed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from trainfold.adapters.cli.terminal.duration import seconds_of


def whole_typed(_type: object, tokens: Sequence[Token]) -> int:
    """An int as typed: cyclopts alone would read 7.5 as 8."""
    typed = tokens[0].value
    try:
        return int(typed)
    except ValueError:
        raise ValueError(f'"{typed}" is not a whole number') from None


def numbers_typed(_type: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Ints as typed, with commas between them."""
    typed = tokens[0].value
    try:
        return tuple(int(each) for each in typed.split(","))
    except ValueError:
        raise ValueError(f'"{typed}" is not a whole number, or several such as 3,2') from None


def names_typed(_type: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Names as typed, with commas between them."""
    return tuple(dict.fromkeys(name.strip() for token in tokens for name in token.value.split(",")))


def seconds_typed(_type: object, tokens: Sequence[Token]) -> float:
    """A duration as typed."""
    return seconds_of(tokens[0].value)


DURATION = Parameter(converter=seconds_typed, metavar="DURATION")

NAMES = Parameter(converter=names_typed, n_tokens=1, metavar="NAME[,NAME...]")

Components = Annotated[
    tuple[str, ...] | None,
    NAMES,
    Parameter(help="Look at these components alone, such as model,ema; without it at all of them."),
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of tables.")]
RunPath = Annotated[Path, Parameter(help="Directory of a run, such as runs/a.")]
CheckpointPath = Annotated[
    Path, Parameter(help="A checkpoint, such as runs/a/step-00000120, or a run: then its newest one.")
]
Patience = Annotated[
    float,
    DURATION,
    Parameter(show_default=lambda _: "10m", help="How long the program may be silent before it counts as hanging."),
]
