"""Argument checks: one rule for numbers and choices everywhere, with a message for each place."""

import enum
import math
import re

import numpy as np
import pytest
import torch

from trainfold.core.checks import choice, count, positive
from trainfold.core.data.cursor import make_cursor
from trainfold.core.data.eval_cursor import make_eval_cursor
from trainfold.core.data.permutation import sample_order
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.history.quarantine import check_limit
from trainfold.core.metrics.confusion import F1, Confusion
from trainfold.core.metrics.moments import Variance
from trainfold.core.metrics.topk import TopK
from trainfold.core.resume.request import resume_request
from trainfold.core.rng import make_key
from trainfold.core.save.cadence import lost_fraction
from trainfold.core.save.retention import keep_every, keep_last, keep_newer
from trainfold.core.save.triggers import check_cadence, make_triggers
from trainfold.core.state.state import make_progress
from trainfold.core.step.accumulation import windows


class Size(enum.IntEnum):
    SMALL = 4


def test_a_count_is_a_whole_number_and_comes_back_as_a_plain_int():
    assert type(count("n", Size.SMALL, fix="count")) is int
    assert count("n", 0, least=0, fix="count") == 0
    for wrong in (True, 1.0, "1", None, np.int64(3), torch.tensor(3), -1, 0):
        with pytest.raises(InvalidArgument, match=r"n: expected an int >= 1, found .*; count"):
            count("n", wrong, fix="count")
    with pytest.raises(InvalidState, match=re.escape("n: expected an int in [0, 4), found 4; count")):
        count("n", 4, least=0, below=4, fix="count", error=InvalidState)


def test_a_positive_number_is_finite_and_may_be_of_numpy_or_torch():
    assert positive("secs", np.float32(0.5), fix="count") == positive("secs", torch.tensor(0.5), fix="count") == 0.5
    assert positive("secs", 0, least=0, fix="count") == 0.0
    for wrong in (0, -1.0, math.inf, math.nan, True, "1", None, 1j):
        with pytest.raises(InvalidArgument, match=r"secs: expected a finite number > 0, found .*; count"):
            positive("secs", wrong, fix="count")


def test_a_choice_is_one_of_those_listed():
    assert choice("tail", "drop", ("drop", "step"), fix="choose") == "drop"
    for wrong in ("x", None, [], 1):
        with pytest.raises(InvalidArgument, match=re.escape("tail: expected one of ('drop', 'step'), found ")):
            choice("tail", wrong, ("drop", "step"), fix="choose")


PLACES = (
    (make_key, "seed: expected an int, found", [0.0]),
    (lambda n: sample_order(n, 0, 8), "sample_order.seed: expected an int in [0, 18446744073709551616), found", [-1]),
    (lambda n: make_progress(step=n), "state.trainer.step: expected an int >= 0, found", [-1]),
    (lambda n: make_cursor(length=n, seed=0), "state.dataset.length: expected an int in [1, ", [0]),
    (lambda n: make_eval_cursor(8, global_batch_size=n), "DistributedEvalCursor.global_batch_size: expected an int in [1, ", [0]),
    (check_limit, "limit: expected an int >= 1, found", [0]),
    (lambda n: resume_request(step=n), "step: expected an int >= 0, found", [-1]),
    (check_cadence, "every: expected an int >= 1, or None, found", [0]),
    (lambda n: make_triggers(every_secs=n), "every_secs: expected a finite number > 0, or None, found", [0, math.inf]),
    (keep_last, "k: expected an int >= 0, or None, found", [-1]),
    (keep_every, "n_steps: expected an int >= 1, found", [0]),
    (keep_newer, "age_secs: expected a finite number >= 0, found", [-1, math.nan]),
    (lambda n: lost_fraction(n, save_secs=1, step_secs=1, mtbf_secs=9), "every_steps: expected an int >= 1, found", [0]),
    (lambda n: lost_fraction(1, save_secs=n, step_secs=1, mtbf_secs=9), "save_secs: expected a finite number >= 0, found", [-1]),
    (lambda n: windows([], n), "accumulate: expected an int >= 1, found", [0]),
    (TopK, "TopK.k: expected an int >= 1, found", [0]),
    (Confusion, "Confusion.classes: expected an int >= 1, found", [0]),
    (lambda n: Variance(ddof=n), "Variance.ddof: expected an int >= 0, found", [-1]),
    (lambda n: F1(3, average=n), "F1.average: expected one of ('macro', 'micro', 'none'), found", ["mean"]),
)  # fmt: skip


@pytest.mark.parametrize(("call", "says", "more"), PLACES, ids=[says.partition(":")[0] for _, says, _ in PLACES])
def test_each_place_refuses_what_is_not_such_a_number_with_its_own_message(call, says, more):
    for wrong in (True, "1", [], *more):
        with pytest.raises(TrainfoldError, match=re.escape(says)):
            call(wrong)
