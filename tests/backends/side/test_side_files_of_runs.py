"""Files that belong to the checkpoints of a run: saved with them, referred to, compared at a resume, and rank 0's on several ranks."""

import logging
import warnings

import pytest
from kit.adapters import cli_cases
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.side import side_files
from trainfold.backends.side.checkpoint_files import read_side_files
from trainfold.backends.side.side_files import SideFiles
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers.copy_run import copy_run
from trainfold.core.errors import CaptureRefused, InvalidArgument, InvalidState, OptionalLeftOut, ResumeRefused

call = cli_cases.call
answered = cli_cases.answered


def run(store, *, steps=1, policy=None, world=None, optional=(), **extra):
    model = nn.Linear(2, 1)
    for each in model.parameters():  # threads share torch's stream
        nn.init.zeros_(each)
    live = attach(model, extra=extra, optional=optional)
    with CheckpointManager(store, every=1, policy=policy, collectives=world) as manager:
        manager.restore(live)
        for _ in range(steps):
            live.advance(samples=1)
            manager.step(live)
    return live


@pytest.fixture
def words(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    return tmp_path / "words"


def test_a_tokenizer_that_has_changed_between_start_and_resume_is_refused_by_name(words):
    """C13: the classic silent error: the same ids mean other words. Nothing on the disk is overwritten."""
    store = MemoryStore()
    run(store, words=SideFiles(words))
    run(store, words=SideFiles(words))
    (words / "tokenizer.json").write_text("[]")
    with pytest.raises(
        ResumeRefused, match=r"files\s+attached\.words\.files\['tokenizer.json'\]: saved 2 bytes, xxh3:"
    ):
        run(store, words=SideFiles(words))
    with pytest.warns(ResumeDrift, match="files"):
        run(store, words=SideFiles(words), policy={"files": "warn"})
    run(store, words=SideFiles(words), policy={"contract:attached.words.files['tokenizer.json']": "adapt"})
    assert [read_side_files(store, step=step)["words/tokenizer.json"] for step in range(1, 5)] == [b"{}", b"{}", b"[]", b"[]"]  # fmt: skip
    run(store, words=SideFiles(words))  # what was accepted is what the run has now
    (words / "more.json").write_text("1")
    with pytest.raises(ResumeRefused, match=r"more.json'\]: saved nothing"):
        run(store, words=SideFiles(words))
    assert (words / "tokenizer.json").read_text() == "[]"


def test_a_file_that_is_edited_while_the_run_goes_on_is_warned_of_once_and_saved_as_it_was(words):
    store, files = MemoryStore(), SideFiles(words)
    live = attach(nn.Linear(2, 1), extra={"words": files})
    (words / "tokenizer.json").write_text("[1]")
    with CheckpointManager(store, every=1) as manager:
        with pytest.warns(UserWarning, match=r"tokenizer.json is not as it was when the run began.*changes=True"):
            manager.restore(live)
        for _ in range(2):
            live.advance(samples=1)
            manager.step(live)
    assert read_side_files(store) == {"words/tokenizer.json": b"{}"}


def test_a_required_file_that_is_missing_fails_the_save_and_the_next_one_has_it(tmp_path, caplog, answered):
    """C13: required, or best effort with a warning; the core of the checkpoint does not suffer."""
    samples, store = tmp_path / "samples.txt", MemoryStore()
    live = attach(nn.Linear(2, 1), extra={"eval": SideFiles({"samples.txt": samples}, changes=True)})
    with CheckpointManager(store) as manager:
        with pytest.raises(InvalidState, match=r"samples\.txt.*found nothing"):
            manager.restore(live)
        with pytest.raises(CaptureRefused, match=r"samples\.txt"):
            live.advance(samples=1)
        with pytest.raises(InvalidState, match=r"samples\.txt"):
            manager.save(live)
        samples.write_text("one")
        manager.save(live)
    assert read_side_files(store) == {"eval/samples.txt": b"one"}
    samples.write_text("one two")  # written after the checkpoint, by a process that was killed then
    with caplog.at_level(logging.WARNING, "trainfold"):
        run(store, eval=SideFiles({"samples.txt": samples}, changes=True))
    assert "samples.txt: not as in the checkpoint" in caplog.text
    assert read_side_files(store) == {"eval/samples.txt": b"one two"}
    other, samples = tmp_path / "other", tmp_path / "later.txt"
    files = SideFiles({"later.txt": samples}, changes=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        run(other, steps=3, eval=files, optional=["eval"])
    said = {str(each.message) for each in told if each.category is OptionalLeftOut}
    assert all("later.txt" in text and "eval is left out" in text for text in said)
    assert len(said) <= 2, "one of the restore and one of the saves"
    assert said
    (left_out,) = answered("files", other)[0]["left_out"]
    assert left_out == "eval"


def test_an_unchanged_file_is_referred_to_and_copied_with_what_refers_to_it(words, tmp_path):
    """C13: as any leaf that has not changed."""
    (words / "big.bin").write_bytes(bytes(1 << 16))
    store, files = LocalStore(tmp_path / "run"), SideFiles(words, changes=True)
    live, sizes = attach(nn.Linear(2, 1), extra={"words": files}), []
    with CheckpointManager(store, every=1, reuse_unchanged=True) as manager:
        for text in ("{}", "{}", "[]"):
            (words / "tokenizer.json").write_text(text)
            live.advance(samples=1)
            sizes.append(manager.step(live).result.size_bytes)
    assert sizes[0] > 1 << 16 > sizes[1] > sizes[2] - 1000
    copy = MemoryStore()
    copy_run(store, copy, steps=[3])
    for each in (store, copy):
        assert read_side_files(each, step=3) == {"words/big.bin": bytes(1 << 16), "words/tokenizer.json": b"[]"}


@pytest.mark.parametrize("there", [True, False])
def test_on_several_ranks_the_files_of_rank_0_count(words, tmp_path, monkeypatch, there):
    """C13: other nodes need not have them, and may have others; a file that rank 0 lacks fails the save on every rank."""
    other = tmp_path / "other"
    other.mkdir()
    if there:
        (other / "tokenizer.json").write_text("[7]")
    store = LocalStore(tmp_path / "run")

    def train(world, places):
        return run(store, world=world, words=SideFiles(places[world.rank]))

    monkeypatch.setattr(side_files, "is_first_rank", _thread_of_rank_zero)
    for _ in range(2):  # and a resume, at which rank 0 compares
        run_threads(2, lambda world: _as(world.rank, lambda: train(world, (words, other))))
    assert read_side_files(store) == {"words/tokenizer.json": b"{}"}
    (words / "tokenizer.json").write_text("{1}")
    found = run_threads(2, lambda world: _as(world.rank, lambda: _error(lambda: train(world, (words, other)))))
    assert "tokenizer.json" in found[0]
    assert all(found)
    (words / "tokenizer.json").unlink()
    found = run_threads(2, lambda world: _as(world.rank, lambda: _error(lambda: train(world, (words, other)))))
    assert "an empty one" in found[0]
    assert all(found)


def test_files_are_never_declared_to_be_shared_otherwise(words):
    with pytest.raises(InvalidArgument, match="files"):
        attach(nn.Linear(2, 1), extra={"words": SideFiles(words)}, sharing={"words": "each_rank"})


def _error(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - compared above
        return str(error)
    return ""


_RANK: dict[int, int] = {}


def _as(rank, call):
    import threading

    _RANK[threading.get_ident()] = rank
    return call()


def _thread_of_rank_zero(_):
    import threading

    return _RANK.get(threading.get_ident(), 0) == 0
