"""The global random streams: captured as plain values, restored bit for bit."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.adapters.live.attach import attach
from trainfold.adapters.streams.rng_streams import (
    RngPart,
    capture_streams,
    preserved_rng,
    restore_streams,
    stream_problems,
)
from trainfold.adapters.streams.stream_states import check_numpy_state
from trainfold.backends.derived_streams import derive_streams
from trainfold.core.errors import RestoreRefused
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.state.state import Opaque


def draw(n=5):
    return (
        [random.random() for _ in range(n)],
        [random.gauss(0, 1) for _ in range(n)],
        np.random.random(n).tolist(),  # noqa: NPY002 (the global stream is the subject)
        np.random.standard_normal(n).tolist(),  # noqa: NPY002
        torch.rand(n).tolist(),
        torch.randn(n).tolist(),
    )


def stored_and_loaded(value):
    described, tensors = describe(Opaque(value), "rng")
    table = list(tensors.values())
    return rebuild(described.node, "rng", lambda index, as_numpy: table[index]).value


@given(seed=st.integers(0, 2**32 - 1), drawn=st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_streams_come_back_bit_for_bit_through_the_format(seed, drawn):
    """H01, U01: python, numpy and torch; also between the two numbers of a pair of normal ones."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    draw(drawn)
    random.gauss(0, 1)  # python and numpy keep the second number of the pair
    np.random.standard_normal()  # noqa: NPY002
    streams = stored_and_loaded(capture_streams())
    wanted = draw()
    draw(7)
    assert stream_problems(streams) == []
    restore_streams(streams)
    assert draw() == wanted


def test_a_numpy_stream_of_another_generator_comes_back_too():
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        streams = stored_and_loaded(capture_streams())
        wanted = np.random.random(4).tolist()  # noqa: NPY002
        assert stream_problems(streams) == []
        restore_streams(streams)
        assert np.random.random(4).tolist() == wanted  # noqa: NPY002
    finally:
        np.random.set_bit_generator(kept)
    (problem,) = stream_problems(streams)
    assert "PCG64" in str(problem)
    assert "MT19937" in str(problem)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_the_state_of_each_of_numpys_generators_is_taken_and_a_place_outside_of_its_buffer_is_not(kind):
    """W20: a position outside of the generator's buffer is refused."""
    state = np.random.RandomState(getattr(np.random, kind)(0)).get_state(legacy=False)
    check_numpy_state(stored_and_loaded(state), kind)
    places = {"MT19937": (state["state"], "pos"), "Philox": (state, "buffer_pos")}
    if kind in places:
        held, name = places[kind]
        for outside in (-1, 10**6):
            held[name] = outside
            with pytest.raises(ValueError, match="position"):
                check_numpy_state(state, kind)


def test_capturing_moves_no_stream():
    """H05: the next numbers are the same as without the capture."""
    streams = capture_streams()
    first = draw()
    restore_streams(streams)
    capture_streams()
    assert draw() == first


def test_a_block_can_draw_without_a_trace():
    """H05: for an evaluation, or to build a dataset; also if the block raises."""
    streams = capture_streams()
    wanted = draw()
    restore_streams(streams)

    def block():
        with preserved_rng():
            draw(3)
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        block()
    assert draw() == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("numpy"), "numpy"),
        (lambda s: s.pop("torch"), "torch"),
        (lambda s: s.update(torch=torch.zeros(3, dtype=torch.uint8)), "torch"),
        (lambda s: s.update(python={"version": 3, "words": np.zeros(4, np.uint32), "gauss": None}), "python"),
        (lambda s: s.update(numpy={"bit_generator": "MT19937"}), "numpy"),
        (lambda s: s.update(cuda=torch.zeros(16, dtype=torch.uint8)), "cuda"),
        (lambda s: s.update(version=9), "version"),
        (lambda s: s.update(version=torch.ones(2)), "version"),
        (lambda s: s.update(seed="0"), "seed"),
        (lambda s: s["numpy"]["state"].update(pos=625), "numpy"),
        (lambda s: s["numpy"]["state"].update(pos=-1), "numpy"),
        (lambda s: s["numpy"]["state"].update(pos=10**8), "numpy"),  # the next draw would crash the process
        (lambda s: s["numpy"]["state"].update(pos=1.0), "numpy"),
        (lambda s: s["numpy"]["state"].update(key=np.zeros(3, np.uint32)), "numpy"),
        (lambda s: s["numpy"]["state"].update(key=np.zeros(624, np.int64)), "numpy"),
        (lambda s: s["numpy"].update(has_gauss=2), "numpy"),
        (lambda s: s["numpy"].update(gauss=None), "numpy"),
        (lambda s: s["numpy"].update(state=None), "numpy"),
        (lambda s: s["python"].update(gauss="0.5"), "python"),
        (lambda s: s["python"].update(version=2), "python"),
        (lambda s: s["python"].update(words=np.full(625, 700, np.uint32)), "python"),
        (lambda s: s["python"].update(words=torch.zeros(625)), "python"),
        (lambda s: s.update(torch=torch.zeros(5056)), "torch"),
        (lambda s: s.update(torch=None), "torch"),
        (lambda s: s["torch"][8:12].fill_(9), "torch"),
        (lambda s: s["torch"][16:18].copy_(torch.tensor([100, 2])), "torch"),  # 612 used, 624 left
    ],
)
def test_a_stream_that_is_missing_or_damaged_is_refused_by_name(change, words):
    """H04, W20: never silently; type, size and range are checked before anything is written."""
    torch.manual_seed(0)
    torch.rand(1)  # 623 words are left; a stream with less than 14 left may be at word 612
    streams = capture_streams()
    change(streams)
    assert [words in str(problem) for problem in stream_problems(streams)] == [True]
    describe(Opaque(streams), "rng")  # a checkpoint can contain it
    live = attach(torch.nn.Linear(1, 1))
    state = live.capture().evolve(rng=Opaque(streams))
    before = torch.get_rng_state()
    with pytest.raises(RestoreRefused, match=words):
        live.restore(state)
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_that_refuses_its_state_leaves_all_streams_as_they_were():
    """V12: the streams that were written before it are put back."""
    streams = capture_streams()
    saved = Opaque({**streams, "python": derive_streams(9, step=1)["python"], "numpy": {"bit_generator": "MT19937"}})
    with pytest.raises((ValueError, KeyError)):
        RngPart().write(saved)
    assert draw() == (restore_streams(streams), draw())[1]


def test_streams_for_another_layout_are_a_function_of_seed_step_and_rank():
    """H03: derived, not sliced; different for each rank and step."""
    torch.manual_seed(11)
    seed = capture_streams()["seed"]
    assert seed == 11
    seen = set()
    for step in (5, 6):
        for rank in (0, 1, 2):
            streams = derive_streams(seed, step=step, rank=rank)
            assert stream_problems(streams) == []
            restore_streams(streams)
            first = draw()
            restore_streams(derive_streams(seed, step=step, rank=rank))
            assert draw() == first
            seen.add(repr(first))
    assert len(seen) == 6


def test_the_derived_streams_do_not_depend_on_the_machine():
    streams = derive_streams(3, step=7)
    assert streams["python"]["words"][:2].tolist() == [2147483648, 3040306499]
    assert streams["numpy"]["state"]["key"][:2].tolist() == [2147483648, 3230567860]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_stream_of_the_bound_device_is_part_of_a_state():
    """H01: the stream of the device that the model is on, and no other."""
    model = torch.nn.Linear(1, 1).cuda()
    live = attach(model)
    state = live.capture()
    wanted = torch.rand(4, device="cuda")
    live.restore(state)
    assert torch.equal(torch.rand(4, device="cuda"), wanted)
    with pytest.raises(RestoreRefused, match="cuda"):
        attach(torch.nn.Linear(1, 1)).restore(state)
