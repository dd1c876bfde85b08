"""A table of fields reads an object strictly: no other field, no other type, and errors that name the field (U04)."""

import pytest

from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.strict_json import (
    finite,
    int_of,
    items,
    positive_int_of,
    read_fields,
    row,
    text_of,
    yes_or_no,
)

TABLE = {
    "step": positive_int_of,
    "score": finite,
    "is_best": yes_or_no,
    "kept": items(row(finite, int_of), least=1, most=2),
    "notes": items(text_of, most=1),
}
GOOD = {"step": 1, "score": 0.5, "is_best": True, "kept": [[0.5, 0]], "notes": []}


def test_a_good_object_is_read_into_plain_immutable_values():
    assert read_fields(GOOD, TABLE, "x") == {**GOOD, "kept": ((0.5, 0),), "notes": ()}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"step": 0}, "x: step"),
        ({"step": True}, "x: step"),
        ({"step": 1.0}, "x: step"),
        ({"score": 1}, "x: score"),
        ({"score": float("inf")}, "x: score"),
        ({"is_best": 1}, "x: is_best"),
        ({"kept": []}, "x: kept"),
        ({"kept": [[0.5, 0]] * 3}, "x: kept"),
        ({"kept": [[0.5, 0], [0.5]]}, "x: kept[1]"),
        ({"kept": [[0.5, 0], [0.5, -1]]}, "x: kept[1]"),
        ({"kept": {}}, "x: kept"),
        ({"notes": [1]}, "x: notes[0]"),
        ({"more": 1}, "x"),
    ],
)
def test_the_error_names_the_field(changes, where):
    with pytest.raises(CheckpointHostile) as caught:
        read_fields({**GOOD, **changes}, TABLE, "x")
    assert caught.value.where == where


@pytest.mark.parametrize(
    "document", [None, [], 7, "x", *({k: v for k, v in GOOD.items() if k != name} for name in GOOD)]
)
def test_an_object_with_a_field_missing_is_refused_and_so_is_anything_else(document):
    with pytest.raises(CheckpointHostile):
        read_fields(document, TABLE, "x")
