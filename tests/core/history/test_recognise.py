"""What is torn and what is foreign, decided from names, sizes and heads: no store."""

import pytest

from trainfold.core.errors import CheckpointForeign, CheckpointHostile, FutureVersion
from trainfold.core.format.indexes.needed import nothing_needed
from trainfold.core.format.manifest import (
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
)
from trainfold.core.format.run_file import RUN_LIMIT_BYTES, run_document, run_id_of
from trainfold.core.history.inventory import Entry
from trainfold.core.history.recognise import (
    file_checks,
    lost_checkpoint,
    misplaced,
    not_a_place_for_a_run,
    run_file_fix,
)

HERE = "runs/a/step-00000007"


def entry(step, run_id="a1"):
    return Entry(f"step-{step:08d}", Head(run_id, step))


@pytest.mark.parametrize(
    ("head", "run_id", "belongs"),
    [
        (Head("a1", 7), "a1", True),
        (Head("b2", 7), None, True),  # the run file is lost: any run's may be there
        (Head("b2", 7), "a1", False),
        (Head("a1", 8), "a1", False),
        (Head("a1", 8), None, False),
    ],
)
def test_a_checkpoint_belongs_to_its_run_and_to_the_step_of_its_directory(head, run_id, belongs):
    assert (misplaced(head, "step-00000007", run_id, HERE) is None) is belongs


def test_a_file_is_torn_by_its_size_and_damaged_by_the_length_of_its_header():
    """The header starts after 8 bytes, and ends where the first tensor starts, whichever that is."""
    shards = [ShardRecord(0, start, start + 8, ((0, 2),), "xxh3:") for start in (88, 80)]
    table = tuple(TensorRecord(f"ema[{i}]", "float32", (2,), (shard,)) for i, shard in enumerate(shards))
    ema = ComponentRecord("ema", ({"list": [{"t": 0}, {"t": 1}]},), (table,), "xxh3:")
    files = (FileRecord("ema-0", ("ema",), 0, 96, "xxh3:"), FileRecord("empty-0", ("empty",), 0, 8, "xxh3:"))
    ema_file, empty_file = file_checks(Manifest(Head("r", 7), 1, (ema,), (), {}, {}, files))
    assert ema_file.torn(HERE, 96) is None
    assert "no such file" in str(ema_file.torn(HERE, None))
    assert "95 bytes" in str(ema_file.torn(HERE, 95))
    assert ema_file.damaged(HERE, (72).to_bytes(8, "little")) is None
    assert "one of 71" in str(ema_file.damaged(HERE, (71).to_bytes(8, "little")))
    assert empty_file.header_bytes is None
    assert empty_file.damaged(HERE, b"whatever") is None


def test_a_reader_that_shares_files_with_no_rank_looks_at_all_of_few_and_at_rank_0s_of_many():
    """`ls` asks for as many sizes as it can in time."""
    files = tuple(FileRecord(f"model-{rank}", ("model",), rank, 8, "xxh3:") for rank in range(3))
    indexes = (IndexRecord("index-2", 2, 9, "xxh3:"),)
    manifest = Manifest(Head("r", 7), 3, (), (), {}, {}, files, indexes, opened=frozenset({0}))

    def looked_at(most_files):
        return [each.name for each in file_checks(manifest, nothing_needed(most_files=most_files))]

    assert looked_at(4) == ["model-0", "model-1", "model-2", "index-2"]
    assert looked_at(3) == looked_at(0) == looked_at(-5) == ["model-0"]


@pytest.mark.parametrize(
    ("names", "entries", "runs", "said"),
    [
        ([], [], [], None),
        (["events.log", "config.yaml", "src"], [], [], None),
        (["step-00000007"], [Entry("step-00000007", None)], [], None),  # a first save that was killed
        (["step-00000007"], [entry(7)], [], "checkpoints without it"),
        (["manifest.json"], [], [], "one checkpoint"),
        (["a", "b"], [], ["a"], "a folder of 1"),
        (["model.safetensors"], [], [], "another format"),
        (["pytorch_model-00001-of-00002.bin"], [], [], "another format"),
        (["latest", "epoch.ckpt"], [], [], "another format"),
    ],
)
def test_a_directory_may_become_a_run_unless_it_holds_what_may_be_meant_as_one(names, entries, runs, said):
    """Each error names what the directory is, and the next move."""
    error = not_a_place_for_a_run("runs", names, entries, runs)
    assert (error is None) is (said is None)
    if said is not None:
        assert said in str(error)
        assert error.fix


def test_the_fix_of_a_lost_run_file_is_the_file_itself_if_the_manifests_agree_on_the_run():
    assert run_document("a1").decode() in run_file_fix([entry(7), entry(8)])
    assert "write" not in run_file_fix([entry(7), entry(8, "b2")])
    assert "write" not in run_file_fix([Entry("step-00000007", None)])


def test_a_pointer_or_a_record_of_the_best_shows_that_a_checkpoint_was_lost():
    def lost(names, pointers):
        return lost_checkpoint(names, pointers, best_file="best.json")

    assert lost([], {"best": "step-00000001", "latest": "step-00000002"}) == "latest names step-00000002"
    assert lost([], {"latest": "elsewhere", "mine": "step-00000001"}) is None
    assert lost(["best.json"], {}) == "there is a best.json"


def test_a_run_file_is_read_strictly():
    def read(data, size_bytes=None):
        return run_id_of(data, "run.json", size_bytes=len(data) if size_bytes is None else size_bytes)

    assert read(run_document("a1")) == "a1"
    for data, error in (
        (b"{}", CheckpointForeign),
        (b"", CheckpointHostile),
        (run_document("a1").replace(b"1,", b"2,"), FutureVersion),
        (run_document("a1").replace(b"1,", b"true,"), CheckpointHostile),
        (run_document("a1").replace(b'"a1"', b'"../a"'), CheckpointHostile),
    ):
        with pytest.raises(error):
            read(data)
    with pytest.raises(CheckpointHostile):
        read(run_document("a1"), RUN_LIMIT_BYTES + 1)
