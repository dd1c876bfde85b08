"""Parts that one thread makes and another sends: all of them in their order, few at a time, and an end for both whatever fails."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.backends.buckets.bucket_cases import counted
from obstore.store import MemoryStore

from trainfold.backends.stores.object_store import fed as module
from trainfold.backends.stores.object_store.fed import fed
from trainfold.backends.stores.object_store.object_store import ObjectStore


class Broken(Exception):
    """What a test raises."""


@given(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 6)), st.one_of(st.none(), st.integers(0, 6)))
def test_what_is_sent_is_what_was_made_or_both_end_with_the_first_failure(count, made_until, sent_until):
    """At no time are there more than two parts that were made and not sent."""
    made, sent, here = [], [], threading.get_ident()

    def parts():
        for number in range(count):
            if number == made_until:
                raise Broken("made")
            assert threading.get_ident() == here
            made.append(number)
            assert len(made) - len(sent) <= 3
            yield number
        if made_until == count:
            raise Broken("made")

    def send(given):
        assert threading.get_ident() != here
        for number in given:
            if number == sent_until:
                raise Broken("sent")
            sent.append(number)
        return "done"

    fails_in_making = made_until is not None and made_until <= count
    fails_in_sending = sent_until is not None and sent_until < (made_until if fails_in_making else count)
    if not fails_in_making and not fails_in_sending:
        assert fed(send, parts()) == "done"
        assert made == sent == [*range(count)]
        return
    with pytest.raises(Broken) as caught:
        fed(send, parts())
    if not (fails_in_making and fails_in_sending):  # else either may be the first
        assert str(caught.value) == ("made" if fails_in_making else "sent")
    assert sent == [*range(len(sent))]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_ends_the_sending_before_it_is_raised(error):
    """Nothing is sent later, and what was sent does not count as all."""
    ended = []

    def parts():
        yield 1
        raise error

    def send(given):
        try:
            return list(given)
        except Exception as failure:
            ended.append(failure)
            raise

    with pytest.raises(error):
        fed(send, parts())
    assert len(ended) == 1


def test_without_another_thread_the_parts_are_sent_here(monkeypatch):
    """A thread that is never started, as without memory for it."""
    monkeypatch.setattr(module, "_PATIENCE", 0)

    class Without:
        def __init__(self, count):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def give(self, task):
            return task

    monkeypatch.setattr(module, "Helpers", Without)
    assert fed(list, iter(range(3))) == [0, 1, 2]


def test_a_large_file_is_copied_from_one_bucket_to_another():
    """Its parts are read by the client while the client sends others: it refuses to be called where it takes them."""
    client = MemoryStore()
    source, _ = counted(client)
    source.write("a", [bytes(9 << 20)], size_bytes=9 << 20)
    target = ObjectStore(MemoryStore(), url="memory://other")
    target.write("a", (source.read("a", start=start, stop=start + (1 << 20)) for start in range(0, 9 << 20, 1 << 20)), size_bytes=9 << 20)  # fmt: skip
    assert target.size("a") == 9 << 20


def test_parts_that_do_not_add_up_leave_no_object():
    """C04: the error of the parts is raised, and the upload is aborted."""
    store = ObjectStore(MemoryStore(), url="memory://run")

    def parts():
        yield bytes(9 << 20)
        raise Broken

    with pytest.raises(Broken):
        store.write("a", parts(), size_bytes=10 << 20)
    assert store.size("a") is None
