"""Which checkpoint is resumed if some are damaged, and others cannot be read now: the newest that can be had, or none."""

import warnings
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.backends.runs_cases import saved_run, state_at

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.core.errors import CheckpointUnreadable, ResumeRefused
from trainfold.core.format.file_names import MANIFEST, directory_of, step_of
from trainfold.core.format.manifest import HEAD_BYTES

STEPS = (2, 4, 6)
PLACES = ("first line", "manifest", "length of a header", "tensors")
WHOLE = saved_run(*STEPS)


class Faulty:
    """A run of which some checkpoints have wrong bytes at one place, and others cannot be read there."""

    def __init__(self, faults, *, inner=WHOLE, has_hint=True):
        self.inner, self.faults, self.has_hint, self.tried = inner, faults, has_hint, Counter()

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def committed_at(self, name):
        return float(step_of(name.partition("/")[0]))

    def pointers(self):
        return self.inner.pointers() if self.has_hint else {}

    def read(self, name, *, start=0, stop=None):
        data = bytearray(self.inner.read(name, start=start, stop=stop))
        if name.endswith(MANIFEST):
            place = "first line" if stop == HEAD_BYTES else "manifest"
        else:
            place = "length of a header" if stop == 8 else "header"
        return bytes(self._met(name, place, data))

    def read_into(self, name, buffer, *, start=0):
        self.inner.read_into(name, buffer, start=start)
        self._met(name, "tensors", buffer)

    def _met(self, name, place, data):
        kind, where = self.faults.get(step_of(name.partition("/")[0]), (None, None))
        if where == place and kind == "unreadable":
            raise CheckpointUnreadable(
                f"{self.url}/{name}", expected="bytes from the store", found="503", fix="try again"
            )
        if where == place and kind == "damaged" and len(data):
            data[1 if place == "first line" else len(data) // 2] ^= 0x10
        return data


def resumed(faults, has_hint):
    """The law: the step that is resumed, or those for which the resume is refused; with none if none can be used."""
    unread = [
        step for step in STEPS if faults.get(step) == ("unreadable", "first line")
    ]  # of each, not even that it is older
    for step in reversed(STEPS):
        kind, _ = faults.get(step, (None, None))
        if kind == "unreadable":
            return "refused", [step] if has_hint else [step, *unread]
        if kind is None:
            return ("resumed", step) if has_hint or not unread else ("refused", unread)
    return "refused", []


FAULTS = st.dictionaries(
    st.sampled_from(STEPS), st.tuples(st.sampled_from(["damaged", "unreadable"]), st.sampled_from(PLACES))
)


@given(FAULTS, st.booleans())
@example({6: ("unreadable", "tensors")}, True)
@example({6: ("unreadable", "length of a header")}, True)
@example({6: ("damaged", "tensors"), 4: ("unreadable", "first line")}, True)
@example({6: ("unreadable", "tensors"), 4: ("damaged", "tensors")}, True)
@example({6: ("unreadable", "first line"), 4: ("damaged", "tensors"), 2: ("damaged", "tensors")}, True)
def test_a_resume_takes_the_newest_that_is_not_damaged_or_is_refused(faults, has_hint):
    """E01, P07: an older checkpoint is taken only for one that is proved bad."""
    what, steps = resumed(faults, has_hint)
    store = Faulty(faults, has_hint=has_hint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)
        if what == "resumed":
            assert trainfold.load(store, like=state_at(0)).trainer.step == steps
            return
        with pytest.raises(ResumeRefused) as refused:
            trainfold.load(store, like=state_at(0))
    reasons = refused.value.refusal.reasons
    named = [step_of(each.where.split("/")[1]) for each in reasons if each.error == "CheckpointUnreadable"]
    assert set(named) & set(steps) if steps else not named
    assert not refused.value.refusal.finds_nothing, "a program would start from scratch"
