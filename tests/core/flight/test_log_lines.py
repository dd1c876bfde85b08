"""The bytes of a flight log: round trips, torn ends, and where a resumed log is cut."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.damage import Damage
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.line_scanner import decode_lines
from trainfold.core.flight.log_lines import (
    LINE_BYTES,
    decode_line,
    encode_line,
    encode_lines,
    line_numbers,
    lines_before,
    short_name,
)
from trainfold.core.flight.step_record import StateDigest, StepRecord, float_bits_of, float_of_bits

COUNTS = st.integers(0, (1 << 64) - 1)
EIGHT = st.none() | st.binary(min_size=8, max_size=8)
FOUR = st.none() | st.binary(min_size=4, max_size=4)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=24).filter(
    lambda text: len(text.encode()) <= 24
)
RECORDS = st.builds(
    StepRecord,
    COUNTS,
    st.integers(0, (1 << 32) - 1),
    COUNTS,
    loss=EIGHT,
    norm=EIGHT,
    batch=EIGHT,
    streams=EIGHT,
    host_streams=FOUR,
    is_whole=st.booleans(),
)
LINES = RECORDS | st.builds(StateDigest, COUNTS, NAMES, st.binary(min_size=16, max_size=16))


@given(LINES)
def test_a_line_is_what_was_written(line):
    """Unknown is not zero: a loss of 0.0 differs from no loss."""
    assert decode_line(encode_line(line)) == line
    assert len(encode_line(line)) == LINE_BYTES


@given(LINES, st.none() | st.integers(0, LINE_BYTES * 8 - 1))
def test_the_numbers_of_a_line_are_those_of_its_record(line, flipped):
    """Bit for bit; and what is damaged has none."""
    data = bytearray(encode_line(line))
    if flipped is not None:
        data[flipped // 8] ^= 1 << flipped % 8
    record, found = decode_line(bytes(data)), line_numbers(bytes(data))
    if record is None:
        assert found is None
        return
    is_step, step, *values = found
    given = [getattr(record, name, None) for name in ("loss", "norm")]
    assert (is_step, step) == (isinstance(record, StepRecord), record.step)
    assert [None if value is None else float_bits_of(value) for value in values] == given


@given(st.lists(LINES, max_size=6), st.integers(0, 6 * LINE_BYTES))
def test_a_log_cut_anywhere_is_a_prefix(lines, cut):
    """A process can die inside a write: what is read are the first lines, whole ones."""
    data = encode_lines(lines)[:cut]
    found = decode_lines(data)
    assert found.lines == tuple(lines[: len(data) // LINE_BYTES])
    assert not found.damage
    assert decode_lines(data[: len(data) // LINE_BYTES * LINE_BYTES] + bytes(cut)) == found, "zeros after a power cut"


@given(st.lists(LINES, min_size=1, max_size=5), st.sets(st.integers(0, 5 * LINE_BYTES * 8 - 1), max_size=3))
def test_changed_bits_cost_their_lines_alone_and_are_known(lines, bits):
    """Bits that rot are not shown as what a run did, and the lines after them are read."""
    written = bytearray(encode_lines(lines))
    hit = {bit // 8 // LINE_BYTES: bit for bit in bits if bit // 8 < len(written)}
    for bit in hit.values():
        written[bit // 8] ^= 1 << bit % 8
    found = decode_lines(bytes(written))
    assert found.lines == tuple(line for at, line in enumerate(lines) if at not in hit)
    assert found.damage == Damage(len(hit), min(hit, default=0) * LINE_BYTES, is_all=len(hit) == len(lines))


def test_what_is_no_log_is_known():
    assert decode_lines(b"\x93" * 999).damage == Damage(15, 0, is_all=True)
    assert decode_lines(b"notes").damage.is_all
    assert not decode_lines(encode_line(StepRecord(1))[:9]).damage
    assert not decode_lines(bytes(999)).damage
    assert "not a flight log" in Damage(15, 0, is_all=True).text_of("flight-00000.log")


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 10), st.integers(0, 3), st.sets(st.integers(0, 8)))
def test_a_log_keeps_the_lines_before_the_step_that_comes(steps, step, torn, damaged):
    """R04: a resumed run continues its log without a step twice; what a crash left of the end is cut first. A damaged line costs no other."""
    log = [None if at in damaged else StepRecord(each) for at, each in enumerate(sorted(steps))] + [None] * torn
    while log and log[-1] is None and not torn:
        log.pop()
    good = [at for at, line in enumerate(log) if line is not None]
    late = [at for at in good if log[at].step >= step]
    assert lines_before(step, len(log), log.__getitem__) == min(late, default=max(good, default=-1) + 1)


def test_numbers_are_compared_by_their_bits():
    quiet = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    assert float_of_bits(float_bits_of(0.1)) == 0.1
    assert float_bits_of(quiet) == struct.pack("<Q", 0x7FF8000000000001)
    assert float_bits_of(0.0) != float_bits_of(-0.0)
    assert float_bits_of(10**400) == float_bits_of(float("inf"))


def test_long_names_stay_apart():
    """Two components with the same start have different lines."""
    one, other = (short_name(f"a_component_with_a_long_name_{end}") for end in "ab")
    assert one != other
    assert max(len(one.encode()), len(other.encode())) <= 24


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_a_line_of_a_kind_of_later_versions_is_not_guessed(kind):
    import zlib

    body = bytearray(encode_line(StepRecord(1))[:-4])
    body[2] = kind
    assert decode_line(bytes(body) + struct.pack("<I", zlib.crc32(body))) is None


def test_a_flight_says_what_it_covers():
    assert str(flight_of([])) == "no step"
    assert str(flight_of([StepRecord(4)])) == "1 step, 4 to 4"
