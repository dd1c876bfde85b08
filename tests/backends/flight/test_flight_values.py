"""The losses of a log that grows: read in pieces as read at once, and again from the start where a resume has cut it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.flight.flight_values import FlightValues
from trainfold.backends.stores.local import LocalStore
from trainfold.core.flight.line_scanner import decode_lines
from trainfold.core.flight.log_lines import encode_lines
from trainfold.core.flight.step_record import StateDigest, StepRecord, float_bits_of, float_of_bits


def bytes_of(first, losses, look):
    """A run that differs once differs in each line from there on."""
    lines = []
    for step, loss in enumerate(losses, first):
        lines.append(
            StepRecord(step, loss=None if loss is None else float_bits_of(loss), norm=float_bits_of(step / 2 + look))
        )
        lines += [StateDigest(step, "model", bytes([look] * 16))] * (step % 3 == 0)
    return encode_lines(lines)


def values_of(data):
    """The plain model: what `decode_lines` finds."""
    steps = [line for line in decode_lines(data).lines if isinstance(line, StepRecord)]
    return [(line.step, float_of_bits(line.loss)) for line in steps if line.loss is not None], [
        line.step for line in steps
    ]


LOSSES = st.lists(st.none() | st.floats(allow_nan=False), max_size=12)


@settings(max_examples=40)
@given(
    looks=st.lists(
        st.tuples(st.integers(0, 12), LOSSES, st.integers(0, 63), st.none() | st.integers(0, 900)),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_read_in_pieces_is_what_is_in_the_log(tmp_path_factory, looks):
    """R04: each look finds the log as it is then: longer, cut where a run resumed, with a torn end, or with a damaged line."""
    path = tmp_path_factory.mktemp("flight") / "flight-00000.log"
    store = LocalStore(path.parent)
    values = FlightValues(path.name)
    assert not values.read(store)
    data = b""
    for look, (kept, losses, torn, damaged) in enumerate(looks):
        data = data[: 64 * kept]
        steps = values_of(data)[1]
        more = bytearray(bytes_of(steps[-1] + 1 if steps else 1, losses, look))
        if damaged is not None and damaged < len(more):
            more[damaged] ^= 1
        data += bytes(more)
        path.write_bytes(data + encode_lines([StepRecord(1)])[:torn])
        values.read(store)
        expected, steps = values_of(data)
        assert values.damage == decode_lines(data).damage
        assert list(zip(*values.loss, strict=True)) == expected
        assert list(values.norm[0]) == steps
        assert (values.first, values.last) == ((steps[0], steps[-1]) if steps else (None, None))
    path.unlink()
    assert values.read(store) == bool(decode_lines(data).lines)
    assert values.last is None
