"""Keys depend only on what is folded in, and blocks leave the generator unchanged."""

import contextlib
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.rng import Key, fold_in, forked_rng, make_key, seed_of

parts = st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5))


@given(st.integers(), st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_folding_in_a_path_is_folding_in_its_parts(seed, first, second):
    """H03: the key of a step is a function of the seed and the coordinates."""
    key = make_key(seed)
    assert fold_in(key, *first, *second) == fold_in(fold_in(key, *first), *second)
    assert 0 <= seed_of(key) < 2**63
    assert 0 <= key.bits < 2**128


@given(st.lists(parts, max_size=3), st.lists(parts, max_size=3))
def test_different_paths_give_different_keys(first, second):
    key = make_key(0)
    assert (fold_in(key, *first) == fold_in(key, *second)) == (first == second)


def test_keys_are_the_same_on_every_machine():
    """H03: fixed numbers; a change would alter every resumed run."""
    assert make_key(0).bits == 0x3D05C1AE31697894E95C4E38FA0BBE7B
    assert fold_in(make_key(0), "step", 3, "rank", 1).bits == 0x160393FE3D5C0092B3A6156B58E5D190


def test_a_key_is_one_leaf():
    assert tree.named_leaves(Key(5), "rng") == [("rng.bits", 5)]


@pytest.mark.parametrize("bad", [1.0, True, None, ("a",)])
def test_only_ints_and_strings_are_folded_in(bad):
    with pytest.raises(InvalidArgument):
        fold_in(make_key(0), bad)
    with pytest.raises(InvalidArgument):
        make_key(bad)


def test_a_block_draws_from_its_key_and_leaves_the_generator_as_it_was_also_when_it_fails():
    """H05: the global stream continues as if the block had not run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.randn(3)  # the cached half of a pair of normal numbers is part of the state
        expected = torch.randn(5)
        torch.manual_seed(0)
        torch.randn(3)
        with contextlib.suppress(RuntimeError), forked_rng(make_key(1)):
            torch.randn(7)
            raise RuntimeError
        assert torch.equal(torch.randn(5), expected)


def test_blocks_nest():
    with forked_rng(make_key(1)):
        torch.rand(1)
        plain = torch.rand(1)
    with forked_rng(make_key(1)):
        torch.rand(1)
        with forked_rng(make_key(2)):
            torch.rand(1)
        assert torch.equal(torch.rand(1), plain)


def test_threads_do_not_draw_from_each_others_keys():
    def draw(seed):
        with forked_rng(make_key(seed)):
            return torch.stack([torch.rand(4) for _ in range(50)])

    expected = [draw(seed) for seed in range(6)]
    found = [None] * 6
    threads = [threading.Thread(target=lambda seed=seed: found.__setitem__(seed, draw(seed))) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
