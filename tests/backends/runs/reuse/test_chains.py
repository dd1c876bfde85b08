"""Law: a chain of saves of which each writes only what has changed loads the same bits as full saves do."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.backends.reuse_cases import SHAPES, Chain, parts_equal, state_of
from kit.backends.runs_cases import RankFiles

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.save.retention import keep_last

ALL = dict.fromkeys(SHAPES, 0)
NAMES = st.sets(st.sampled_from(sorted(SHAPES)))
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("save"), NAMES),
        st.tuples(st.just("again"), NAMES),
        st.tuples(st.just("rewind"), st.integers(0, 9)),
        st.tuples(st.just("prune"), st.integers(1, 3)),
    ),
    max_size=7,
)


def changed(versions, names):
    return {name: version + (name in names) for name, version in versions.items()}


def follow(chain, moves):
    """Carry out moves, and check every checkpoint that is left."""
    step, versions = 1, ALL
    chain.save(step, versions)
    for what, how in moves:
        if what == "save":
            step, versions = step + 1, changed(versions, how)
            chain.save(step, versions)
        elif what == "again":
            versions = changed(versions, how)
            chain.save(step, versions)
        elif what == "rewind":
            name = (names := chain.names())[how % len(names)]
            step, versions = int(name.removeprefix("step-")), chain.expected[name]
            chain.restart(step)
        else:
            chain.prune(how, left_behind=keep_last(1))
            chain.check()
    chain.check()


@settings(max_examples=10, deadline=None)
@given(moves=MOVES, held=st.booleans())
@example(moves=[("save", set()), ("save", set(SHAPES)), ("prune", 1), ("save", {"rows"})], held=True)
@example(
    moves=[("save", {"rows"}), ("save", {"rows"}), ("rewind", 0), ("again", {"large"}), ("save", set()), ("prune", 1)],
    held=False,
)
def test_a_chain_of_saves_loads_the_bits_that_full_saves_load(moves, held):
    """Any leaves change, none or all; steps are saved again, the run is rewound, and old checkpoints are deleted in between."""
    follow(Chain(held=held), moves)


@settings(max_examples=4, deadline=None)
@given(moves=MOVES, cut=st.booleans(), held=st.booleans(), kind=st.sampled_from([MemoryStore, RankFiles]))
@example([("save", {"half"}), ("save", {"large"}), ("prune", 1), ("rewind", 0), ("save", set())], True, True, RankFiles)
@example([("save", {"large"}), ("save", set()), ("again", {"rows"})], False, False, MemoryStore)
def test_a_chain_of_saves_of_several_ranks_loads_the_bits_that_full_saves_load(moves, cut, held, kind):
    """X04: leaves that ranks hold whole and share the writing of, and leaves that they hold in parts; in files of components, or of ranks."""
    follow(Chain(2, cut=cut, held=held, store=kind()), moves)


def test_what_has_not_changed_is_not_written_and_what_has_is():
    chain = Chain()
    chain.save(1, ALL)
    chain.save(2, changed(ALL, {"rows"}))
    (first, _), (second, full) = chain.written_bytes
    assert first == full > 2**20 > 10 * 4096 > second
    manifest = read_manifest(chain.store, "step-00000002")
    assert manifest.head.schema_version == 4
    assert manifest.summary.refers == ("step-00000001",)
    chain.save(3, changed(ALL, {"rows"}))
    # what really has the bytes, and not what refers to them
    assert read_manifest(chain.store, "step-00000003").summary.refers == ("step-00000001", "step-00000002")
    chain.save(4, changed(ALL, SHAPES))
    # of what did change, the EMA is equal to none, and an empty tensor can change nothing
    assert {file.components for file in read_manifest(chain.store, "step-00000004").references} == {("model",)}


def test_a_checkpoint_without_references_is_of_version_3():
    """So older releases read the runs that do not use this."""
    chain = Chain()
    chain.save(1, ALL)
    assert b'"schema_version":3' in chain.store.read("step-00000001/manifest.json")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_numbers_of_ranks_load_through_references(world_size):
    chain = Chain(2, cut=True)
    chain.save(1, ALL)
    chain.save(2, wanted := changed(ALL, {"half"}))

    def loaded(ranks):
        like = state_of(2, ALL, ranks, cut=True)
        parts_equal(trainfold.load(chain.store, like=like, collectives=ranks), wanted)

    run_threads(world_size, loaded)


def test_a_file_that_is_gone_is_not_referred_to():
    chain = Chain()
    chain.save(1, ALL)
    chain.store.delete("step-00000001/")
    del chain.expected["step-00000001"]
    chain.save(2, ALL)
    assert not read_manifest(chain.store, "step-00000002").references
    chain.check()


@pytest.mark.parametrize("cut", [False, True])
def test_ranks_that_read_for_each_other_read_through_references(cut, tmp_path):
    """Files of two checkpoints may have one name: each is read by its own place."""
    chain = Chain(2, cut=cut, store=LocalStore(tmp_path / "run", is_shared=True))
    chain.save(1, ALL)
    chain.save(2, wanted := changed(ALL, {"half", "flags"}))

    def loaded(ranks):
        parts_equal(trainfold.load(chain.store, like=state_of(2, ALL, ranks, cut=False), collectives=ranks), wanted)

    run_threads(3, loaded)


def test_a_step_saved_again_without_its_manifest_spares_the_revision_that_others_refer_to(tmp_path):
    """E02: only the manifest of the step was missing, so its next files had the names of those that a later checkpoint needs."""
    store = LocalStore(tmp_path / "run")

    def at(step, changes, same=1.0):
        leaves = {"same": torch.full((10_000,), same), "other": torch.full((10_000,), float(changes))}
        return trainfold.TrainState(trainer=trainfold.Progress(step=step), extra={"x": leaves})

    trainfold.save(at(6, 0), store)
    trainfold.save(at(6, 6), store)  # revision 1
    with trainfold.CheckpointManager(store, mode="sync", reuse_unchanged=True) as manager:
        manager.load(at(0, 0), manager.should_load(at(0, 0)))
        manager.save(at(7, 7))
    named = [name for name in store.list("step-00000006") if name.endswith(".r1.safetensors")]
    assert named
    store.delete("step-00000006/manifest.json")
    trainfold.save(at(6, 9, same=2.0), store)
    assert set(named) < set(store.list("step-00000006"))
    assert torch.equal(trainfold.load(store, like=at(0, 0), step=7).extra["x"]["same"], torch.ones(10_000))
