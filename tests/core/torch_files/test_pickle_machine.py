"""A pickle is read as values: as Python reads plain ones, without running anything of a hostile one, in time and memory that its length bounds."""

import pickle
import pickletools
import re
import struct
import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, TrainfoldError
from trainfold.core.torch_files.pickle_machine import Made, read_pickle

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers(-(2**60), 2**60)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


@given(values, st.integers(2, 5))
def test_plain_values_are_those_that_python_reads(value, protocol):
    """U02: what is not an object is read as it is."""
    data = pickle.dumps(value, protocol)
    assert read_pickle(data, (), "x") == value
    assert read_pickle(pickletools.optimize(data), (), "x") == value


@given(st.dictionaries(st.binary(), st.binary() | st.sets(st.integers(-(2**60), 2**60))), st.integers(4, 5))
def test_bytes_and_sets_are_those_that_python_reads(value, protocol):
    """U02: protocols before 4 write them as calls."""
    assert read_pickle(pickle.dumps(value, protocol), (), "x") == value


def test_an_object_is_what_would_be_called_and_with_what():
    """Nothing is looked up: the names need not exist."""
    data = pickle.dumps(OrderedDict([("a", 1)]), 2)
    found = read_pickle(data, {"collections.OrderedDict"}, "x")
    assert (type(found), found.name, found.args, found.items) == (Made, "collections.OrderedDict", (), [("a", 1)])
    missing = data.replace(b"collections\nOrderedDict", b"not_there\nNothing")
    assert read_pickle(missing, {"not_there.Nothing"}, "x").name == "not_there.Nothing"


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


CALL = b"cos\nsystem\n"
HOSTILE = {  # opcode -> a pickle that runs touch when Python reads it, and a name that the message has
    "REDUCE": (CALL + b"(" + text("touch ran") + b"tR.", "os.system"),
    "REDUCE of protocol 0": (b"cos\nsystem\n(S'touch ran'\ntR.", "os.system"),
    "STACK_GLOBAL": (b"\x80\x04" + text("os") + text("system") + b"\x93" + text("touch ran") + b"\x85R.", "os.system"),
    "INST": (b"(S'touch ran'\nios\nsystem\n.", "STRING"),
    "INST alone": (b"(ios\nsystem\n.", "os.system"),
    "OBJ": (b"(" + CALL + text("touch ran") + b"o.", "os.system"),
    "NEWOBJ": (b"\x80\x02csubprocess\nPopen\n" + text("touch ran") + b"\x85\x81.", "subprocess.Popen"),
    "NEWOBJ_EX": (b"\x80\x04csubprocess\nPopen\n" + text("touch ran") + b"\x85}\x92.", "subprocess.Popen"),
    "BUILD": (b"cbuiltins\nobject\n)\x81}" + text("__setstate__") + CALL + b"sb" + text("touch ran") + b"b.", "builtins.object"),
    "getattr": (b"cbuiltins\ngetattr\n" + text("os") + text("system") + b"\x86R" + text("touch ran") + b"\x85R.", "builtins.getattr"),
    "getattr of a known class": (b"cbuiltins\ngetattr\ncollections\nOrderedDict\n" + text("__init__") + b"\x86R.", "builtins.getattr"),
    "a dotted name": (b"\x80\x04" + text("collections") + text("OrderedDict.fromkeys") + b"\x93.", "collections.OrderedDict.fromkeys"),
    "a dotted name of a module": (b"\x80\x04" + text("torch") + text("serialization.os.system") + b"\x93.", "torch.serialization.os.system"),
    "eval": (b"c__builtin__\neval\n" + text("__import__('os').system('touch ran')") + b"\x85R.", "__builtin__.eval"),
    "EXT1": (b"\x80\x02\x82\x01.", "EXT1"),
    "EXT2": (b"\x80\x02\x83\x01\x00.", "EXT2"),
    "EXT4": (b"\x80\x02\x84\x01\x00\x00\x00.", "EXT4"),
    "PERSID": (b"Ptouch ran\n.", "PERSID"),
    "BINPERSID": (text("touch ran") + b"Q.", "BINPERSID"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "a class of torch that runs code": (b"ctorch.storage\n_load_from_bytes\nC\x02xx\x85R.", "torch.storage._load_from_bytes"),
}  # fmt: skip
KNOWN = {"collections.OrderedDict", "torch.Size"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_is_refused_by_name_and_nothing_of_it_is_run(kind, tmp_path, monkeypatch):
    """U02: by whichever opcode it asks to be run."""
    data, named = HOSTILE[kind]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointHostile, match=f", found {re.escape(named)};"):
        read_pickle(data, KNOWN, "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["REDUCE", "STACK_GLOBAL", "eval"])
def test_the_payloads_do_run_where_a_pickle_is_loaded(kind, tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE[kind][0])
    assert (tmp_path / "ran").exists()


def test_a_known_name_is_not_called_whatever_it_gets(tmp_path):
    """U02: the arguments of a known class may be hostile too."""

    class Loud(dict):
        def __reduce__(self):
            return OrderedDict, ([(1, 2), (3, 4)],), {"__class__": "x"}

    found = read_pickle(pickle.dumps(Loud(), 2), KNOWN, "x")
    assert (found.args, found.state) == (([(1, 2), (3, 4)],), {"__class__": "x"})
    with pytest.raises(
        CheckpointHostile, match=r"a state for an object that was just made, found collections\.OrderedDict"
    ):
        read_pickle(b"ccollections\nOrderedDict\n}b.", KNOWN, "x")  # would set attributes of the class itself
    with pytest.raises(CheckpointHostile, match=r"a call of a known name, found an object of collections\.OrderedDict"):
        read_pickle(b"ccollections\nOrderedDict\n)R)R.", KNOWN, "x")


def long_string_pairs():
    """Two long equal keys, again and again: each comparison would take long."""
    key = b"X" + struct.pack("<I", 1 << 20) + b"k" * (1 << 20)
    return b"\x80\x02" + key + b"q\x00" + key + b"q\x01}" + b"h\x00Nsh\x01Ns" * 200_000 + b"."


CUT, MANY, KEYS = "a whole pickle", "at most one object for 4 bytes", "keys that are short plain values"
BOMBS = {  # what a small pickle claims -> its bytes, and what is expected instead
    "a far number for a memo": (b"\x80\x02Nr\xff\xff\xff\x7f.", "at most number 0"),
    "a long text that is not there": (b"\x80\x02X\xff\xff\xff\xff" + b"x" * 100, CUT),
    "long bytes that are not there": (b"\x80\x04\x8e" + b"\xff" * 8 + b"x", CUT),
    "a frame that is not there": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", CUT),
    "a huge integer": (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\xff" * 100, "an opcode that tensors"),
    "a large integer": (b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".", "an integer of at most 16 bytes"),
    "many marks": (b"\x80\x02" + b"(" * 60_000, CUT),
    "many sets": (b"\x80\x04" + b"\x8f" * 60_000, MANY),
    "many dicts": (b"\x80\x04" + b"}" * 60_000, MANY),
    "many remembered": (b"\x80\x04N" + b"\x94" * 60_000, CUT),
    "many doubles": (b"\x80\x04N" + b"2" * 60_000, CUT),
    "doubling": (b"\x80\x04)" + b"2\x86" * 30_000, MANY),
    "deep lists": (b"\x80\x04" + b"]" * 3000 + b"a" * 2999 + b".", MANY),
    "long equal keys": (long_string_pairs(), KEYS),
    "integers of one hash": (b"\x80\x02}" + b"".join(b"\x8a\x10" + (k * (2**61 - 1)).to_bytes(16, "little") + b"Ns" for k in range(20, 60_000)) + b".", KEYS),
    "a tuple of tuples as a name": (b"\x80\x04)" + b"2\x86" * 40 + b"2\x93.", "a name of two texts"),
    "a tuple of tuples as a key": (b"\x80\x04})" + b"2\x86" * 40 + b"Ns.", KEYS),
}  # fmt: skip


class Counted(bytes):
    """A pickle that counts how many of its bytes are read."""

    read = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_pickle_costs_little_whatever_it_claims(kind):
    """U02: neither a length that is not there, nor objects that share parts, take memory or time; keys are refused before they are compared."""
    made, refusal = BOMBS[kind]
    data = Counted(made)
    tracemalloc.start()
    try:
        with pytest.raises(TrainfoldError, match=f"x: expected {refusal}"):
            read_pickle(data, KNOWN, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000 + 40 * len(data)
    assert data.read < 2 * len(data) + 10


HEAD = b"\x80\x04ccollections\nOrderedDict\n\x940)\x940K\x01\x940"  # a class, an empty tuple and a number, remembered as 0, 1 and 2
NODES = {  # what a pickle makes -> its bytes, and for how many objects it counts
    "a list": (b"]", 1),
    "a dict": (b"}", 1),
    "a set": (b"\x8f", 4),
    "a tuple of one": (b"N\x85", 1),
    "a tuple of two": (b"NN\x86", 1),
    "a tuple after a mark": (b"(t", 1),
    "a call": (b"h\x00h\x01R", 1),
    "an object": (b"h\x00h\x01\x81", 1),
    "an object at once": (b"h\x00)\x81", 1),
    "an object with a state": (b"h\x00)\x81\x94}\x94(ub", 2),
    "a call with a tuple": (b"h\x00N\x85\x94\x85\x94R\x94", 3),
    "an object outside": (b"h\x02Q", 1),
}


@pytest.mark.parametrize("kind", NODES)
def test_each_object_counts_towards_the_most_that_a_pickle_may_have(kind):
    """U02: one for 4 bytes, and 64 more; whichever opcode makes it."""
    made, counts = NODES[kind]

    def of(lists):
        return HEAD + b"(" + made * 10 + b"]" * lists + b"t."

    def is_allowed(lists):
        return 10 * counts + lists + 1 <= len(of(lists)) // 4 + 64

    lists = next(lists for lists in range(2000) if not is_allowed(lists + 1))
    assert is_allowed(lists)
    assert len(read_pickle(of(lists), KNOWN, "x", persistent=True)) == 10 + lists
    with pytest.raises(CheckpointHostile, match="at most one object for 4 bytes, found more"):
        read_pickle(of(lists + 1), KNOWN, "x", persistent=True)


def test_what_is_cut_off_or_goes_on_is_damaged():
    whole = pickle.dumps({"a": [1, 2.5, "text", b"bytes"]}, 4)
    for size in range(len(whole)):
        with pytest.raises(CheckpointDamaged):
            read_pickle(whole[:size], (), "x")
    with pytest.raises(CheckpointDamaged, match="1 values, and 1 bytes after them"):
        read_pickle(whole + b"N", (), "x")
