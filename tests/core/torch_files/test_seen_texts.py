"""Objects that are written with the same bytes are read once, and are what they would be if each was read: also in pickles that no pickler writes."""

import pickle
from random import Random, SystemRandom

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.depth import IS_DEEP

from trainfold.core.errors import CheckpointHostile, TrainfoldError
from trainfold.core.torch_files.pickle_machine import Made, Name, read_pickle
from trainfold.core.torch_files.seen_texts import SeenTexts, is_alone


class Kind:
    """An object with a state."""

    def __init__(self, **state):
        self.__dict__.update(state)


class Size(tuple):
    """Is written as a call."""

    __slots__ = ()

    def __reduce__(self):
        return Size, (tuple(self),)


KIND, SIZE = f"{__name__}.Kind", f"{__name__}.Size"
NAMES = {KIND, SIZE}
CASES = 100_000 if IS_DEEP else 3000

states = st.fixed_dictionaries({
    "size": st.lists(st.sampled_from([0, 1, 300, 70_000, -5]), max_size=4).map(Size),
    "parts": st.lists(st.builds(Kind, at=st.integers(0, 1)) | st.sampled_from([None, True, 2.5, (), (1, 2, 3, 4)]), max_size=2),
})  # fmt: skip


def plain(value, open_=()):
    """A value that can be compared; one that holds itself is cut there."""
    if id(value) in open_:
        return "itself"
    inner = (*open_, id(value))
    if type(value) is Made:
        items = None if value.items is None else plain([list(each) for each in value.items], inner)
        return "made", value.name, plain(value.args, inner), plain(value.state, inner), items, value.is_new
    if type(value) is Name:
        return "name", value.text
    if type(value) in (list, tuple):
        return type(value).__name__, [plain(each, inner) for each in value]
    if type(value) is dict:
        return "dict", [(plain(key, inner), plain(each, inner)) for key, each in value.items()]
    return repr(value)


def outcome(data, alike):
    """What is read, or why it is not."""
    try:
        return plain(read_pickle(data, NAMES, "x", alike=alike))
    except TrainfoldError as error:
        return type(error), str(error)


@given(st.lists(states, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=12), st.integers(2, 5))
def test_objects_are_those_that_are_read_one_by_one(kinds, order, protocol):
    """Any states, of which each comes often."""
    data = pickle.dumps(
        [(Kind(**{key: pickle.loads(pickle.dumps(each)) for key, each in kinds[k % len(kinds)].items()}), k) for k in order],
        protocol,
    )  # fmt: skip
    assert outcome(data, {KIND}) == outcome(data, ())


CLASS = b"c" + KIND.rpartition(".")[0].encode() + b"\nKind\n\x940"  # number 0
BEGIN = b"h\x00)\x81\x94}\x94("
OBJECT = BEGIN + b"K\x01K\x02ub"
HEAD = CLASS + b"c" + SIZE.rpartition(".")[0].encode() + b"\nSize\n\x940]\x94("  # numbers 1 and 2, and an open list
OBJECT_OF_PARTS = BEGIN + b"K\x01h\x01K\x02K\x03\x86\x94\x85\x94R\x94K\x02]\x94h\x00)\x81\x94}\x94(K\x01Nubaub"


def many(count=6):
    return pickle.dumps([Kind(size=Size((2, 300)), parts=[Kind(at=0), Kind(at=1)]) for _ in range(count)], 4)


def test_those_with_the_same_bytes_are_one():
    found = read_pickle(many(), NAMES, "x", alike={KIND})
    assert len({id(each.state["parts"][0]) for each in found}) < 6
    assert len({id(each) for each in read_pickle(many(), NAMES, "x")}) == 6


def test_other_bytes_are_read_as_without_or_refused():
    """U02: fuzzed. What is added to an object that is complete would be added to all of its kind, so it is refused; everything else is the same."""
    random = Random(SystemRandom().getrandbits(32) if IS_DEEP else 7)
    opcodes = b"h)\x81}(ub\x94\x85\x86Ra]esN0201tjK"
    refused = other = shared = 0
    for _ in range(CASES):
        text = bytearray(OBJECT_OF_PARTS)
        for _ in range(random.choice([1, 1, 2, 3])):
            at = random.randrange(len(text))
            how = random.random()
            if how < 0.3:
                text[at] = random.choice(opcodes)
            elif how < 0.6:
                text[at:at] = bytes([random.choice(opcodes)])
            elif how < 0.7:
                del text[at]
            elif how < 0.9:
                text[at:at] = random.choice([b"h\x00", b"h\x01", b"h\x02", b"h\x06", b"h\x0c", b"N0", b"h\x02K\x01a"])
            else:
                start = random.randrange(len(text))
                text[at:at] = text[start : start + random.randrange(1, 20)]
        data = HEAD + bytes(text) * 3 + b"e."
        mine, theirs = outcome(data, {KIND}), outcome(data, ())
        if mine[0] is CheckpointHostile and "when they are complete" in mine[1]:
            refused += 1
            continue
        assert mine == theirs, data
        if type(mine[0]) is str:
            other += 1
            found = read_pickle(data, NAMES, "x", alike={KIND})
            shared += len({id(each) for each in found}) < len(found)
    assert min(other, shared) > CASES / 20
    assert refused


ELSEWHERE = {
    "another value under a number": CLASS + b"K\x07\x940(" + BEGIN + b"K\x01h\x01ubK\x08q\x010" + BEGIN + b"K\x01h\x01ubt.",
    "adds to an earlier list": CLASS + b"]\x940(" + (BEGIN + b"K\x01h\x01K\x05aub") * 2 + b"h\x01t.",
    "takes from below": CLASS + b"(K\x09" + BEGIN + b"K\x01K\x02ub\x86K\x08" + BEGIN + b"K\x01K\x02ub\x86t.",
    "a mark from below": CLASS + b"(K\x09(" + BEGIN + b"K\x01K\x02ubtt.",
}  # fmt: skip


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_bytes_that_mean_something_else_elsewhere_are_read_there(kind):
    """U02: a pickle can be like that, and no pickler writes it."""
    found = outcome(ELSEWHERE[kind], {KIND})
    assert found == outcome(ELSEWHERE[kind], ())
    assert found[0] == "tuple"


def test_nothing_is_added_to_an_object_that_several_places_have():
    """U02: by any opcode that adds."""
    twice = CLASS + OBJECT + OBJECT + b"0"
    for added in (b"h\x02K\x03K\x04s", b"h\x02(K\x03K\x04u", b"K\x03K\x04s", b"(K\x03K\x04u"):
        with pytest.raises(CheckpointHostile, match="nothing is added to when they are complete"):
            read_pickle(twice + added + b".", NAMES, "x", alike={KIND})
    in_list = CLASS + (BEGIN + b"K\x01]\x94K\x02aub") * 2 + b"0h\x03"
    for added in (b"K\x03a", b"(K\x03e"):
        with pytest.raises(CheckpointHostile, match="nothing is added to when they are complete"):
            read_pickle(in_list + added + b"0.", NAMES, "x", alike={KIND})


def test_what_is_alone():
    """U02: each way to reach out of the bytes."""
    assert is_alone(b"\x81\x94}\x94(h\x01h\x02K\x01K\x02\x86\x94\x85\x94R\x94h\x03]\x94h\x00)\x81\x94}\x94(h\x05Nubaub")
    for text in (b"", b"\x81", b"\x81}b"):
        assert is_alone(text) == bool(text)
    for text in (
        b")\x81", b"\x81h\x01", b"\x81\x86", b"\x81K\x01\x87", b"\x81h\x01K\x01a", b"\x81h\x01K\x01K\x02s", b"\x81h\x01(K\x01K\x02u", b"\x81h\x01}b",
        b"\x81(", b"\x81e", b"\x81}(K\x01u0", b"\x81K\x01R", b"\x81h", b"\x812", b"\x81q\x05", b"\x81\x8c\x01a0",
    ):  # fmt: skip
        assert not is_alone(text), text


class Counted(bytes):
    """Counts the bytes that are copied out of it."""

    copied = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        Counted.copied += len(found) if isinstance(where, slice) else 0
        return found


def test_time_is_linear_where_each_object_has_another_length():
    """U02: bytes are compared in vain at most a fixed number of times for each byte of the pickle."""
    Counted.copied = 0
    begin, data = (
        BEGIN[3:],
        Counted(b"".join(BEGIN[3:] + b"K\x01(" + b"N" * size + b"tub" for size in range(200)) + b"\x81}b" * 9000),
    )
    seen = SeenTexts(data, [], {KIND})
    at = 0
    for size in range(200):
        seen.begin(Made(KIND, ()), at)
        at += len(begin) + size + 6
        seen.end(at)
    assert sum(seen.at(start, KIND) is not None for start in range(at, len(data), 3)) == 0
    assert len(data) * 10 < Counted.copied < len(data) * 40
    assert len(data) > at + 9000
