"""What becomes of each checkpoint of the best in a copy: none that can be sent is forgotten, and none that a rewind replaced is missed."""

import pytest

from trainfold.core.errors import CheckpointDamaged, CheckpointTorn, CheckpointUnreadable
from trainfold.core.format.manifest import Head
from trainfold.core.history.best_copy import BestCopy, best_copy
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.problem import problem_of

NAME = "step-00000002"
NEWEST = Entry("step-00000005", Head("r", 5, timeline=1, forks=((0, 3),)))
DAMAGED = problem_of(CheckpointDamaged(NAME, expected="a", found="b", fix="c"))
DENIED = problem_of(CheckpointUnreadable(NAME, expected="a", found="b", fix="c"))
UNFINISHED = Entry(
    NAME, None, problem=problem_of(CheckpointTorn(NAME, expected="manifest.json", found="none", fix="c"))
)
WHOLE, RETRAINED = Entry(NAME, Head("r", 2)), Entry(NAME, Head("r", 2, timeline=1, forks=((0, 1),)))
SAVED_AGAIN = Entry(NAME, Head("r", 2, revision=1))


def with_problem(entry, problem):
    return Entry(entry.name, entry.head, problem=problem)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (WHOLE, WHOLE, BestCopy()),
        (WHOLE, None, BestCopy(lacking=(2,))),
        (WHOLE, RETRAINED, BestCopy(lacking=(2,))),
        (WHOLE, with_problem(WHOLE, DAMAGED), BestCopy(lacking=(2,))),
        (SAVED_AGAIN, WHOLE, BestCopy(lacking=(2,))),
        (with_problem(SAVED_AGAIN, DAMAGED), WHOLE, BestCopy()),
        (with_problem(WHOLE, DAMAGED), None, BestCopy(damaged={NAME: DAMAGED})),
        (with_problem(WHOLE, DAMAGED), RETRAINED, BestCopy(damaged={NAME: DAMAGED})),
        (with_problem(WHOLE, DENIED), None, BestCopy(unread=(DENIED,))),
        (None, WHOLE, BestCopy()),
        (None, None, BestCopy(nowhere=(NAME,))),
        (None, RETRAINED, BestCopy(nowhere=(NAME,))),
        (UNFINISHED, None, BestCopy(nowhere=(NAME,))),
        (UNFINISHED, WHOLE, BestCopy()),
        (RETRAINED, None, BestCopy()),
        (with_problem(RETRAINED, DAMAGED), None, BestCopy()),
    ],
)
def test_what_becomes_of_a_best(here, there, expected):
    source = Inventory("near", "r", (*([] if here is None else [here]), NEWEST))
    assert best_copy({NAME: 0}, source, Inventory("far", "r", () if there is None else (there,))) == expected


def test_a_best_that_the_run_has_left_behind_is_not_missed():
    left = Entry("step-00000004", Head("r", 4))
    assert best_copy({left.name: 0}, Inventory("near", "r", (left, NEWEST)), Inventory("far", "r", ())) == BestCopy()
