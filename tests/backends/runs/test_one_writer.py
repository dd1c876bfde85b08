"""A run has one writer, also across forks and if its directory is removed, moved or replaced under the writer."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RunLocked, RunReplaced
from trainfold.core.state.state import Progress, TrainState


def at(step):
    return TrainState(trainer=Progress(step=step))


def steps_in(run):
    return sorted(int(path.name.removeprefix("step-")) for path in Path(run).glob("step-*"))


@pytest.fixture
def told(warm_python):
    """The lines printed by a separate process; tests fork there, because it has no threads."""
    head = """
        import os, sys
        from pathlib import Path
        from trainfold.adapters.manager.manager import CheckpointManager
        from trainfold.backends.stores.local import LocalStore
        from trainfold.backends.runs.api import save
        from trainfold.core.errors import TrainfoldError
        from trainfold.core.state.state import Progress, TrainState

        def at(step):
            return TrainState(trainer=Progress(step=step))

        def attempt(who, call):
            try:
                call()
                print(who, "saved", flush=True)
            except TrainfoldError as error:
                print(who, type(error).__name__, error, flush=True)

        def in_child(*calls):
            pid = os.fork()
            if pid == 0:
                for call in calls:
                    attempt("child", call)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    """

    def run(script, *arguments):
        command = warm_python.command("-c", textwrap.dedent(head) + textwrap.dedent(script), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


# --- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_cannot_save_through_its_parents_manager(told, tmp_path):
    """C15, O03: the lock stays with the process that took it; parent and child would write the same steps."""
    run = tmp_path / "run"
    lines = told(
        """
        manager = CheckpointManager(sys.argv[1], keep_last=1)
        manager.save(at(1))
        in_child(lambda: manager.save(at(2)), lambda: save(at(3), sys.argv[1]))
        attempt("parent", lambda: manager.save(at(4)))
        """,
        run,
    )
    assert [line.split()[:2] for line in lines] == [["child", "RunLocked"], ["child", "RunLocked"], ["parent", "saved"]]
    assert "forked" in lines[0]
    assert "make a manager in this process" in lines[0]
    assert steps_in(run) == [4]


def test_a_child_of_a_fork_that_outlives_its_parents_manager_makes_its_own(told, tmp_path):
    """The inherited one stays refused, and closing it takes nothing from the new one."""
    lines = told(
        """
        manager = CheckpointManager(sys.argv[1])

        def again():
            with CheckpointManager(sys.argv[1]) as own:
                manager.close()  # an inherited descriptor of this number may be the new manager's now
                own.save(at(2))
                attempt("second", lambda: CheckpointManager(sys.argv[1]))

        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read, 1)
            attempt("inherited", lambda: manager.save(at(1)))
            attempt("own", again)
            os._exit(0)
        manager.close()
        os.write(write, b"x")
        os.waitpid(pid, 0)
        """,
        tmp_path / "run",
    )
    assert [line.split()[:2] for line in lines] == [
        ["inherited", "RunLocked"], ["second", "RunLocked"], ["own", "saved"]
    ]  # fmt: skip


# --- a directory that is not the one any more ------------------------------------------------------------------------


def test_a_writer_whose_run_was_removed_and_made_anew_leaves_the_new_one_alone(told, tmp_path):
    """C15: the second process holds the lock of the path; the first one holds that of a directory that is gone."""
    run = tmp_path / "run"
    with CheckpointManager(run, keep_last=1) as first:
        first.save(at(1))
        shutil.rmtree(run)
        lines = told('CheckpointManager(sys.argv[1]).save(at(2)); print("done")', run)
        assert lines == ["done"]
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        with pytest.raises(RunReplaced, match="another") as caught:
            first.save(at(3))
        assert str(run) in caught.value.where
        assert "restore" in caught.value.fix
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with CheckpointManager(run) as third:
        third.load(at(0))
        third.save(at(4))
    assert steps_in(run) == [2, 4]


def test_a_run_that_was_removed_is_not_made_anew_behind_its_owners_back(tmp_path):
    """The next save raises, and does not start a run with only the later half of a training."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(at(1))
        shutil.rmtree(run)
        with pytest.raises(RunReplaced, match="removed"):
            manager.save(at(2))
    assert not run.exists()


def test_a_run_that_was_moved_and_put_back_is_saved_into_again(tmp_path):
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        run.rename(tmp_path / "aside")
        with pytest.raises(RunReplaced):
            manager.save(at(1))
        (tmp_path / "aside").rename(run)
        manager.save(at(1))
    assert steps_in(run) == [1]


def test_nothing_is_deleted_in_a_run_that_is_no_longer_ours(tmp_path):
    """E04: retention, and the cleanup after a failed save, check this too."""
    store = LocalStore(tmp_path / "run")
    with store.lock():
        save(at(1), store, lock=False)
        shutil.move(tmp_path / "run", tmp_path / "aside")
        save(at(2), tmp_path / "run")
        for attempt in (
            lambda: store.delete("step-00000002/"),
            lambda: store.write("step-00000003/a", [b"x"], size_bytes=1),
            lambda: store.commit("step-00000003/manifest.json", b"{}"),
            lambda: store.reserve(1),
        ):
            with pytest.raises(RunReplaced):
                attempt()
    assert steps_in(tmp_path / "run") == [2]
    assert (tmp_path / "run" / "step-00000002" / "manifest.json").exists()


def test_the_check_costs_one_stat_and_no_read(tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "run")
    seen = []
    with store.lock(), monkeypatch.context() as patch:
        real = os.lstat
        patch.setattr(os, "lstat", lambda path, **kwargs: seen.append(path) or real(path, **kwargs))
        store.reserve(1)
    assert [path for path in seen if str(path).endswith(".lock")] == [str(tmp_path / "run" / ".lock")]


def test_an_error_of_a_replaced_run_is_a_failed_save_with_a_code_of_its_own():
    assert issubclass(RunReplaced, RunLocked.__base__)
    assert RunReplaced.exit_code not in {kind.exit_code for kind in RunLocked.__base__.__subclasses__()} - {35}


class Asked:
    """A run that notes each time it is asked who else may be writing."""

    def __init__(self, inner):
        self.inner, self.times = inner, 0

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def writers(self, directories):
        self.times += bool(directories)
        return dict.fromkeys(directories, "process 7")


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
def test_only_a_list_for_people_asks_who_else_may_be_writing():
    """R01: beside a torn save, each save and each resume asked a bucket once more."""
    store = Asked(MemoryStore())
    save(at(1), store)
    store.write("step-00000009/model-00000-of-00001.safetensors", [b"1"], size_bytes=1)
    for step in (2, 3):
        with CheckpointManager(store, keep_last=1) as manager:
            manager.save(manager.load(at(0)).evolve(trainer=Progress(step=step)))
    assert load(store, like=at(0)).trainer.step == 3
    assert store.times == 0
    assert read_inventory(store).writers == {"step-00000009": "process 7"}
