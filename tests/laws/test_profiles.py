"""How many examples a law is tried with: a share in the usual run, many times as many in `make laws`."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "")


@given(nothing=st.none())
def test_one_that_says_nothing(nothing):
    assert nothing is None


@settings(max_examples=600)
@given(nothing=st.none())
def test_one_that_asks_for_more(nothing):
    assert nothing is None


@settings(max_examples=5)
@given(nothing=st.none())
def test_one_that_asks_for_few(nothing):
    assert nothing is None


@settings(max_examples=50_000)
@given(nothing=st.none())
def test_one_that_means_it(nothing):
    assert nothing is None


@pytest.mark.skipif(bool(PROFILE), reason="another profile has other numbers")
@pytest.mark.parametrize(
    ("test", "count"),
    [
        (test_one_that_says_nothing, 40),
        (test_one_that_asks_for_more, 240),
        (test_one_that_asks_for_few, 5),
        (test_one_that_means_it, 50_000),
    ],
)
def test_the_usual_run_tries_a_share_of_the_examples(request, test, count):
    """Every law runs a few examples in the usual run; `make laws` searches deeply."""
    collected = {item.originalname for item in request.session.items if item.path == request.path}
    if test.__name__ not in collected:
        pytest.skip("it is not part of this run")
    assert (
        test._hypothesis_internal_use_settings.max_examples == count
    )  # the test checks that Hypothesis still has this name
