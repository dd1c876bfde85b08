"""Helpers shared by the tests of rank refusals."""

from trainfold.core.errors import (
    RanksDisagree,
)

PATIENT = {"timeout_secs": 60.0, "grace_secs": 10.0}


def disagreements(outcomes):
    """The text that every rank raised; nothing but it."""
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, RanksDisagree) for error in errors), errors
    (text,) = {str(error) for error in errors}
    return text


# --- replicas that have drifted apart ---------------------------------------------------------------------------------


def refusal(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the test reads it
        return f"{type(error).__name__}: {error}"
    return "nothing"
