"""Commands read through references, say what refers to what, and write checkpoints again so that they stand alone."""

import os
import re
import shutil
from unittest import mock

import pytest
import torch
from kit.adapters import cli_cases
from kit.adapters.cli_cases import flip
from kit.backends.reuse_cases import SHAPES, Chain, whole_state

import trainfold
from trainfold.backends.runs.reuse import stand_alone
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CheckpointDamaged, CheckpointTorn, RunEmpty, SaveFailed
from trainfold.core.state.state import Progress, TrainState

call = cli_cases.call
answered = cli_cases.answered
ALL = dict.fromkeys(SHAPES, 0)
NAMES = [f"step-{step:08d}" for step in (1, 2, 3)]


def made(path, ranks=1, *, cut=False):
    chain = Chain(ranks, cut=cut, store=LocalStore(path))
    for step in (1, 2, 3):
        chain.save(step, {name: int(name == "half") * step for name in SHAPES})
    return chain


@pytest.fixture
def chain(tmp_path):
    return made(tmp_path / "a")


@pytest.fixture
def run(chain, tmp_path):
    return tmp_path / "a"


def test_ls_and_inspect_say_what_a_checkpoint_refers_to(run, call, answered):
    out, _ = call("ls", run)
    assert "refers to step-00000001" in out
    found, _ = answered("ls", run)
    assert [each["refers"] for each in found["checkpoints"]] == [[], NAMES[:1], NAMES[:1]]
    out, _ = call("inspect", run / NAMES[1])
    assert f"{NAMES[0]}/model-00000-of-00001.safetensors" in out
    found, _ = answered("inspect", run / NAMES[1])
    assert found["refers"] == NAMES[:1]


def test_verify_reads_the_files_of_others(run, call, answered):
    found, _ = answered("verify", run / NAMES[2], "--contents")
    assert {each["name"] for each in found["files"]} >= {f"{NAMES[0]}/model-00000-of-00001.safetensors"}
    flip(run / NAMES[0] / "model-00000-of-00001.safetensors", 100_000)
    found, _ = answered("verify", run / NAMES[2], code=CheckpointDamaged.exit_code)
    assert all(NAMES[0] in problem["where"] for problem in found["problems"])


def test_diff_compares_a_checkpoint_with_the_one_that_it_refers_to(run, answered):
    found, _ = answered("diff", run / NAMES[1], run / NAMES[2], code=3)
    assert {leaf["name"] for leaf in found["leaves"]} == {
        "model.params['half']",
        "ema['w']",
        "trainer.step",
        "trainer.samples",
    }


def test_prune_keeps_what_is_referred_to_and_says_why(run, chain, answered):
    found, _ = answered("prune", run, "--keep-last", "1")
    kept = {each["name"]: each["why"] for each in found["kept"]}
    assert kept[NAMES[0]] == [f"{NAMES[2]} refers to its files"]
    assert [each["name"] for each in found["deleted"]] == NAMES[1:2]
    chain.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_flatten_makes_the_newest_stand_alone_so_that_the_others_may_go(ranks, tmp_path, answered):
    run = tmp_path / "a"
    chain = made(run, ranks, cut=ranks > 1)
    before = read_manifest(chain.store, NAMES[2])
    announced, _ = answered("prune", run, "--keep-last", "1", "--flatten", "--dry-run")
    assert read_manifest(chain.store, NAMES[2]) == before
    found, _ = answered("prune", run, "--keep-last", "1", "--flatten")
    assert found["flattened"] == announced["flattened"] == NAMES[2:]
    assert found["deleted"] == announced["deleted"]
    assert chain.names() == NAMES[2:]
    chain.check()
    after = read_manifest(chain.store, NAMES[2])
    assert (after.head.revision, after.head.schema_version, after.references) == (1, 3, ())
    assert after.summary.fingerprints == before.summary.fingerprints
    assert answered("verify", run / NAMES[2])[0]["verified"]
    assert sorted(chain.store.list(NAMES[2])) == sorted((*after.names, "manifest.json"))
    again, _ = answered("prune", run, "--keep-last", "1", "--flatten")
    assert again["flattened"] == again["deleted"] == []
    chain.restart(3)
    chain.save(4, ALL)
    chain.check()


def test_flatten_refuses_what_is_damaged_and_deletes_nothing_that_it_needs(run, chain, answered):
    flip(run / NAMES[0] / "model-00000-of-00001.safetensors", 100_000)
    found, _ = answered("prune", run, "--keep-last", "1", "--flatten", code=CheckpointDamaged.exit_code)
    assert found["flattened"] == found["deleted"] == []
    assert chain.names() == NAMES
    assert not [name for name in chain.store.list(NAMES[2]) if ".r1." in name]


def test_flatten_that_fails_leaves_the_old_checkpoint(run, chain, answered):
    with mock.patch.object(
        LocalStore, "commit_as_old", side_effect=SaveFailed("x", expected="a commit", found="a fault", fix="try again")
    ):
        answered("prune", run, "--keep-last", "1", "--flatten", code=SaveFailed.exit_code)
    assert not [name for name in chain.store.list(NAMES[2]) if ".r1." in name]
    chain.check()
    assert chain.names() == NAMES
    answered("prune", run, "--keep-last", "1", "--flatten")
    chain.check()


def test_a_step_is_written_again_without_other_data_than_it_had(chain):
    """The contents of the new revision are those of the old one, tensor by tensor."""
    stand_alone.write_alone(chain.store, NAMES[1])
    chain.check()
    state = trainfold.load(chain.store, like=TrainState(trainer=Progress()), step=2)
    assert torch.equal(state.model.params["half"], whole_state(2, {**ALL, "half": 2}).model.params["half"])


def sizes_of(run):
    return sum(file.stat().st_size for step in run.glob("step-*") for file in step.iterdir() if file.is_file())


class Killed(BaseException):
    """Ends a program in the middle."""


def killed_flattening(moment, chain):
    names = set(chain.store.list(NAMES[2]))
    if moment == "before the commit":
        patched = mock.patch.multiple(LocalStore, commit_as_old=mock.Mock(side_effect=Killed), delete=mock.Mock())
    else:
        patched = mock.patch.object(stand_alone, "delete_stale", side_effect=Killed)
    with patched, pytest.raises(Killed):
        stand_alone.write_alone(chain.store, NAMES[2])
    assert len(chain.store.list(NAMES[2])) > len(names)


@pytest.mark.parametrize("moment", ["before the commit", "before the old files go"])
def test_what_a_killed_flattening_leaves_goes_with_the_first_save_of_a_manager(moment, chain):
    """C05: it stayed until the run was pruned by hand."""
    killed_flattening(moment, chain)
    with trainfold.CheckpointManager(chain.store, every=1) as manager:
        manager.step(manager.load(whole_state(0, ALL)).evolve(trainer=Progress(step=4)))
    assert sorted(chain.store.list(NAMES[2])) == sorted((*read_manifest(chain.store, NAMES[2]).names, "manifest.json"))
    assert trainfold.load(chain.store, like=whole_state(0, ALL), step=3).trainer.step == 3


@pytest.mark.parametrize("moment", ["before the commit", "before the old files go"])
def test_what_a_killed_flattening_leaves_goes_with_the_next_prune(moment, run, chain, answered):
    """C05: a dead copy, or the old files beside the new ones, stayed until the step was saved again."""
    killed_flattening(moment, chain)
    before = sizes_of(run)
    announced, _ = answered("prune", run, "--keep-last", "3", "--dry-run")
    assert sizes_of(run) == before
    found, _ = answered("prune", run, "--keep-last", "3")
    assert found["leftovers"] == announced["leftovers"]
    assert {file for each in found["leftovers"] for file in each["files"]}
    assert found["freed_bytes"] == announced["freed_bytes"] == before - sizes_of(run) > 0
    assert sorted(chain.store.list(NAMES[2])) == sorted((*read_manifest(chain.store, NAMES[2]).names, "manifest.json"))
    chain.check()
    again, _ = answered("prune", run, "--keep-last", "3")
    assert again["leftovers"] == []


def test_old_files_of_a_flattened_step_stay_while_others_refer_to_them(run, chain, answered):
    """C05: what a prune clears away is needed by no checkpoint."""
    chain.save(1, ALL)  # a rewind: the files of the first timeline are still referred to
    answered("prune", run, "--keep-last", "3")
    chain.check()


def test_a_flattened_checkpoint_is_as_old_as_it_was(run, chain, answered):
    """A rule for new checkpoints kept what was written again, and `ls` listed it as new."""
    manifest = run / NAMES[2] / "manifest.json"
    os.utime(manifest, (1_000_000_000, 1_000_000_000))
    answered("prune", run, "--keep-last", "1", "--flatten")
    assert read_manifest(chain.store, NAMES[2]).references == ()
    assert manifest.stat().st_mtime == 1_000_000_000
    found, _ = answered("ls", run)
    assert found["checkpoints"][0]["committed_at"].startswith("2001-09-09")


def test_one_that_was_flattened_by_a_killed_command_is_as_old_as_it_was(run, chain, monkeypatch):
    """The time was set after the commit, so a kill between the two left a checkpoint that looked new."""
    manifest = run / NAMES[2] / "manifest.json"
    os.utime(manifest, (1_000_000_000, 1_000_000_000))
    rename = os.rename

    def killed(source, target, **options):
        rename(source, target, **options)
        if target == "manifest.json":
            raise KeyboardInterrupt

    with chain.store.lock(), monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            stand_alone.write_alone(chain.store, NAMES[2])
    assert read_manifest(chain.store, NAMES[2]).references == ()
    assert manifest.stat().st_mtime == 1_000_000_000


def test_freed_is_what_the_run_is_smaller(run, answered):
    """The size of what was written was not subtracted."""
    before = sizes_of(run)
    announced, _ = answered("prune", run, "--keep-last", "1", "--flatten", "--dry-run")
    found, _ = answered("prune", run, "--keep-last", "1", "--flatten")
    assert found["freed_bytes"] == before - sizes_of(run)
    assert abs(announced["freed_bytes"] - found["freed_bytes"]) < 20_000  # manifests are not written to know their size


def test_a_flattening_that_takes_room_says_so(run, call):
    out, _ = call("prune", run, "--keep-last", "3", "--flatten")
    assert "more than before" in out.splitlines()[0]


def test_a_copy_of_one_checkpoint_says_what_it_refers_to(run, chain, tmp_path, call):
    """C05: it was said to be a save that did not finish."""
    copy = tmp_path / "copy"
    shutil.copytree(run / NAMES[2], copy / NAMES[2])
    shutil.copy(run / "run.json", copy)
    expected = (CheckpointTorn.exit_code, f"{NAMES[0]}/model-00000-of-00001.safetensors", "--flatten", "refers to")
    for command, code in (
        (("inspect", copy / NAMES[2]), CheckpointTorn.exit_code),
        (("ls", copy), RunEmpty.exit_code),
        (("prune", copy, "--keep-last", "1"), RunEmpty.exit_code),
    ):
        out, err = call(*command, code=code)
        said = out + err
        assert "did not finish" not in said
        for text in expected[1:]:
            assert text in said, (command, said)


def test_the_advice_for_files_of_a_checkpoint_without_a_manifest_loses_no_other(run, tmp_path, call, answered):
    """C05: it kept the newest alone, and deleted the whole checkpoints before it."""
    (run / NAMES[0] / "manifest.json").unlink()
    target = tmp_path / "b"
    _, err = call("copy", run, target, code=RunEmpty.exit_code)
    (advice,) = set(re.findall(r"trainfold (prune RUN [^;]*--flatten)", err))
    answered(*(run if word == "RUN" else word for word in advice.split()))
    call("copy", run, target)
    for place in (run, target):
        assert sorted(path.name for path in place.glob("step-*")) == NAMES[1:]
        for name in NAMES[1:]:
            answered("verify", place / name)
