"""What lies beside the weights of a hub directory, such as a tokenizer, comes from where the weights come from, and goes where they go."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.side.side_files import SideFiles
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointHostile, InvalidArgument, InvalidState
from trainfold.core.state.state import Progress, TrainState
from trainfold.transforms import rename
from trainfold.weights import (
    CheckpointWeights,
    HubDirectory,
    HubFiles,
    LoadSpec,
    SeveralSources,
    Transformed,
    plan_hub_directory,
    write_hub_directory,
)

WORDS = {"tokenizer.json": b'{"a": 1}', "special_tokens_map.json": b"{}", "merges.txt": b""}
CONFIG = {"model_type": "linear", "torch_dtype": "float32"}


def hub(path, words=WORDS, number=1.0):
    path.mkdir()
    save_file({"weight": torch.full((1, 2), number), "bias": torch.zeros(1)}, path / "model.safetensors")
    for name, data in {**words, "config.json": json.dumps(CONFIG).encode(), "README.md": b"other"}.items():
        (path / name).write_bytes(data)
    return path


def run(store, source, *, follow=("tokenizer",), steps=1, files=None):
    files = HubFiles() if files is None else files
    live = attach(nn.Linear(2, 1), extra={"tokenizer": files})
    with CheckpointManager(store, every=1) as manager:
        restored = manager.restore(live, initial=source, follow=follow)
        while live.progress.step < steps:
            live.advance(samples=1)
            manager.step(live)
    return files, restored


def test_the_files_are_those_of_the_source_at_the_start_and_of_the_checkpoint_later(tmp_path):
    """V16, P35: the tokenizer follows the record of the weights, and not the argument of the day. L04."""
    first, other = hub(tmp_path / "first"), hub(tmp_path / "other", {"tokenizer.json": b'{"b": 2}'}, number=5.0)
    store = MemoryStore()
    files, restored = run(store, HubDirectory(first))
    assert restored.is_fresh
    assert files.beside(["*"]) == {**WORDS, "config.json": json.dumps(CONFIG).encode()}
    assert files.source == repr(HubDirectory(first))
    shutil.rmtree(first)
    again, restored = run(store, HubDirectory(other), steps=2)
    assert not restored.is_fresh
    assert again.beside(["*"]) == files.beside(["*"])
    assert again.source == files.source
    # and the weights of a run bring them along
    third, _ = run(MemoryStore(), CheckpointWeights(store))
    assert third.beside(["*"]) == files.beside(["*"])


def test_an_export_has_them_without_the_original(tmp_path):
    """K05, C13: configuration and tokenizer beside the weights, of the run alone; and what a converted checkpoint has."""
    store = LocalStore(tmp_path / "run")
    files, _ = run(store, Transformed(HubDirectory(hub(tmp_path / "first")), rename("{name}", "{name}")))
    shutil.rmtree(tmp_path / "first")
    plan = write_hub_directory(CheckpointWeights(store), tmp_path / "out", like=files)
    assert sorted(plan.beside) == sorted([*WORDS, "config.json"])
    assert HubDirectory(tmp_path / "out").config() == CONFIG == files.config()
    run_conversion(plan_conversion(open_source(tmp_path / "run"), tmp_path / "converted", to="hf"))
    assert HubDirectory(tmp_path / "converted").beside([*WORDS, "config.json"]) == files.beside(["*"])
    assert files.write(tmp_path / "words") == tmp_path / "words"
    side = SideFiles(tmp_path / "words")
    assert plan_hub_directory(CheckpointWeights(store), like=side).beside.keys() == {*WORDS, "config.json"}
    save(load(store, like=TrainState(trainer=Progress())).evolve(extra={"a": side.capture(), "b": side.capture()}), tmp_path / "two")  # fmt: skip
    with pytest.raises(InvalidArgument, match="a and b"):
        plan_conversion(open_source(tmp_path / "two"), tmp_path / "no", to="hf")
    files.write(tmp_path / "words")
    assert {each.name: each.read_bytes() for each in (tmp_path / "words").iterdir()} == files.beside(["*"])
    other = HubFiles()
    other.take(hub(tmp_path / "other", {"tokenizer.json": b"2"}))
    with pytest.raises(InvalidArgument, match="words"):
        other.write(tmp_path / "words")


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.sampled_from(["tokenizer.json", "vocab.txt", "x.model"]), st.binary(max_size=50), min_size=1))
def test_what_is_saved_comes_back_byte_by_byte(tmp_path_factory, words):
    top = tmp_path_factory.mktemp("files")
    for name, data in words.items():
        (top / name).write_bytes(data)
    files, found = HubFiles(), HubFiles()
    files.take(top)
    found.load_state_dict(files.state_dict())
    assert found.beside(["*"]) == words
    assert found.source == files.source


def test_files_that_would_be_missing_or_could_be_those_of_two_are_refused(tmp_path):
    """K09: at each start, before anything is taken; and where two sources have a tokenizer none is guessed."""
    one, two = hub(tmp_path / "one"), hub(tmp_path / "two")
    for store in (MemoryStore(), MemoryStore()):
        with pytest.raises(InvalidArgument, match=r"restore.follow: .*'tokenizer'"):
            run(store, HubDirectory(one), follow=())
    taken = HubFiles()
    taken.take(two)
    assert run(MemoryStore(), HubDirectory(one), follow=(), files=taken)[0].source == repr(HubDirectory(two))
    both = SeveralSources(
        [LoadSpec(HubDirectory(each), names=name, strict="any") for each, name in ((one, "bias"), (two, "weight"))]
    )
    with pytest.raises(InvalidState, match="one directory with such files"):
        run(MemoryStore(), both)
    for each in (*WORDS, "config.json"):
        (two / each).unlink()
    assert run(MemoryStore(), both)[0].source == repr(HubDirectory(one))
    with pytest.raises(InvalidState, match=r"HubFiles of HubDirectory.*found none"):
        run(MemoryStore(), HubDirectory(two))
    live = attach(nn.Linear(2, 1), extra={"words": nn.Linear(1, 1)})
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(InvalidArgument, match=r"HubFiles\(\)"):
        manager.restore(live, initial=HubDirectory(one), follow=["words"])
    empty = HubFiles()
    for use in (empty.config, lambda: empty.write(tmp_path / "x")):
        with pytest.raises(InvalidState, match="follow="):
            use()
    with pytest.raises(CheckpointHostile):
        empty.load_state_dict({"source": "", "files": {"../x": torch.zeros(1, dtype=torch.uint8)}})


def test_each_rank_has_them_and_a_rank_that_cannot_read_them_is_that_of_all(tmp_path):
    one, two = hub(tmp_path / "one"), hub(tmp_path / "two")
    for each in (*WORDS, "config.json"):
        (two / each).unlink()

    def begin(world, places):
        files = HubFiles()
        live = attach(nn.Linear(2, 1), extra={"tokenizer": files})
        with CheckpointManager(MemoryStore(), collectives=world) as manager:
            try:
                manager.restore(live, initial=HubDirectory(places[world.rank]), follow=["tokenizer"])
            except Exception as error:  # noqa: BLE001 - compared below
                return type(error).__name__
        return files.names

    assert set(run_threads(2, lambda world: begin(world, (one, one)))) == {tuple(sorted([*WORDS, "config.json"]))}
    assert run_threads(2, lambda world: begin(world, (one, two))) == ["RankFailed", "InvalidState"]
