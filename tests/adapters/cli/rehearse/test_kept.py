"""The size of a difference is the same for any split into pieces, also from the files of two checkpoints."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold.adapters.cli.rehearse import kept
from trainfold.adapters.cli.rehearse.kept import KeptCheckpoints, difference_size, saved_of
from trainfold.adapters.guards.rehearsal import Rehearsal
from trainfold.adapters.manager.arguments import retention_given
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.kept_checkpoint import keep_checkpoint
from trainfold.backends.stores.local import LocalStore
from trainfold.core.rehearsal.leaf_size import size_of
from trainfold.core.rehearsal.reasons import likely_reasons
from trainfold.core.rehearsal.trajectory import NOTHING, RunDifference, Stretch, differences
from trainfold.core.save.retention import keep_all, keep_every, keep_last
from trainfold.core.state.state import Progress, TrainState

VALUES = {
    torch.float32: [0.0, -0.0, 1.0, 1.5, -2.0, math.nan, math.inf, 1e-40],
    torch.bfloat16: [0.0, -0.0, 1.0, 1.5, math.nan],
    torch.int64: [0, 1, -7, 2**62],
    torch.bool: [True, False],
    torch.complex64: [0j, 1 + 1j, complex(0, -1)],
    torch.float8_e4m3fn: [0.0, 1.0, 2.0],
}


@st.composite
def pairs(draw):
    dtype = draw(st.sampled_from(list(VALUES)))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    elements = st.lists(st.sampled_from(VALUES[dtype]), min_size=rows * columns, max_size=rows * columns)
    return [
        torch.tensor(draw(elements), dtype=torch.complex64 if dtype is torch.complex64 else None)
        .to(dtype)
        .reshape(rows, columns)
        for _ in range(2)
    ]


def bits(element):
    return bytes(element.reshape(1).view(torch.uint8).tolist())


@settings(max_examples=150)
@given(pair=pairs(), cut=st.integers(1, 7), across=st.integers(1, 4))
def test_the_size_of_a_difference_is_that_of_its_elements_however_it_is_cut(pair, cut, across):
    """Compared with a simple model that looks at each element; shards of rows, and pieces of shards, in any order."""
    one, other = pair
    height, width = one.shape
    indices = [(i, j) for i in range(height) for j in range(width) if bits(one[i, j]) != bits(other[i, j])]
    pieces = []
    for low in range(0, height, across):
        high = min(low + across, height)
        a, b = one[low:high].reshape(-1), other[low:high].reshape(-1)
        box = ((low, high), (0, width))
        pieces += [(box, at, a[at : at + cut], b[at : at + cut]) for at in range(0, len(a), cut)]
    found = size_of(reversed(pieces))
    if not indices:
        assert found is None
        return
    apart = [abs(one[at].to(torch.complex128).item() - other[at].to(torch.complex128).item()) for at in indices]
    assert (found.differing, found.elements, found.first) == (len(indices), one.numel(), indices[0])
    assert found.largest == (max(apart) if all(map(math.isfinite, apart)) else None)
    assert found.expected != found.found or one.dtype is torch.bfloat16


def state_of(step, weights):
    return TrainState(trainer=Progress(step=step), extra={"w": weights, "name": "a", "same": torch.ones(3)})


def make_kept(home, steps):
    for step, weights in steps.items():
        trainfold.save(state_of(step, weights), home / "run")
        keep_checkpoint(home / "run" / f"step-{step:08d}", home / "start-1" / "kept" / "run")
    return KeptCheckpoints(home)


def difference_of(one, other):
    saved = [
        {("run", step): saved_of(kept._manifest(path)) for (_, step), path in each.found().items()}
        for each in (one, other)
    ]
    stretches = [Stretch(1, 0, False, True, 0, {}, each) for each in saved]
    return differences(*stretches)


def test_differences_are_measured_in_the_files_and_outlive_the_run(tmp_path, monkeypatch):
    """A deleted checkpoint can still be read under its second name. Pieces are small, so no tensor has to fit into memory."""
    monkeypatch.setattr(kept, "_PIECE_BYTES", 64)
    weights = torch.arange(60.0).reshape(6, 10)
    bent = weights.clone()
    bent[3, 7] += 0.25
    bent[5, 9] -= 2.0
    whole = make_kept(tmp_path / "whole", {1: weights, 2: weights, 3: weights})
    other = make_kept(tmp_path / "killed", {1: weights, 2: bent, 3: bent})
    for name in ("whole", "killed"):
        for step in (1, 2):
            LocalStore(tmp_path / name / "run").delete(f"step-{step:08d}/")
    found = difference_of(whole, other)
    measured = difference_size(whole, other, found)
    assert measured.step == 2
    assert list(measured.sizes) == ["w"]
    size = measured.sizes["w"]
    assert (size.largest, size.differing, size.elements, size.first) == (2.0, 2, 60, (3, 7))
    assert (size.expected, size.found) == ("37", "37.25")
    assert [LocalStore(place.parent).url for place in measured.places] == [
        str(place.parent) for place in measured.places
    ]
    assert read_manifest(LocalStore(measured.places[0].parent), "step-00000002").head.step == 2


def test_what_is_kept_is_thinned_to_the_first_that_differs(tmp_path):
    weights = torch.arange(6.0)
    whole = make_kept(tmp_path / "whole", dict.fromkeys((1, 2, 3, 4), weights))
    other = make_kept(tmp_path / "killed", {1: weights, 2: weights, 3: weights + 1, 4: weights + 1})
    saved = {("run", step): saved_of(kept._manifest(path)) for (_, step), path in whole.found().items()}
    other.thin(saved, NOTHING)
    assert list(other.found()) == [("run", 3)]
    other.thin(saved, NOTHING)
    assert list(other.found()) == [("run", 3)]
    whole.clear(except_step=3)
    assert list(whole.found()) == [("run", 3)]


def test_another_shape_is_not_measured_and_a_filesystem_without_links_keeps_nothing(tmp_path, monkeypatch):
    whole = make_kept(tmp_path / "whole", {1: torch.ones(4)})
    other = make_kept(tmp_path / "killed", {1: torch.ones(5)})
    assert difference_size(whole, other, difference_of(whole, other)) is None

    def refuses(*_, **__):
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuses)
        assert keep_checkpoint(tmp_path / "whole" / "run" / "step-00000001", tmp_path / "none") is None
    assert list((tmp_path / "none").iterdir()) == []
    assert difference_size(whole, KeptCheckpoints(tmp_path / "none"), difference_of(whole, other)) is None


@pytest.mark.parametrize(
    ("given_policy", "used"),
    [
        (keep_all(), keep_last(2)),
        (keep_last(5), keep_last(5)),
        (keep_last(1), keep_last(1)),
        (retention_given(0, keep_every(5)), keep_last(2)),
    ],
)
def test_a_manager_that_keeps_all_keeps_two_in_a_rehearsal_and_any_other_policy_stays(given_policy, used):
    """`keep_last=0` beside `keep=` keeps all too, and filled the disk with a rehearsal that is said to keep two."""
    assert Rehearsal.retention(None, given_policy) == used


def test_a_loop_without_a_loader_is_told_that_nobody_saves_its_position():
    """From a user's word_language_model: the report blamed the state of the step, and said that the data position is the same."""
    leaf = ("model.params['w']", "a", "b")
    found = [
        RunDifference(11, "value", "loss", "0x1p+0", "0x1p-1", 2, 10),
        RunDifference(15, "component", "model", "a", "b", 2, 10, (leaf,)),
    ]
    assert "the data position and the random streams are the same" in likely_reasons(found, {"model", "dataset"})[0]
    first, second, *_ = likely_reasons(found, {"model", "optimizer"})
    assert "no loader is attached" in first
    assert "live.batches()" in first
    assert "extra=" in second
    assert not any("data position and" in reason for reason in (first, second))
    own, *_ = likely_reasons(found, {"model", "optimizer", "place"})  # its place may be what is under extra
    assert "what is under extra= (place)" in own
    assert "loader" not in own
