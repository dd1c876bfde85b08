"""Stop files, and the common protocol of all sources of requests."""

import errno
import itertools
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.manager import requests_cases
from kit.adapters.manager.requests_cases import ended, heard

from trainfold.adapters.requests.sources import FILES, Asked, Combined, RequestSource, SignalRequests, StopFile
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CheckpointForeign, InvalidArgument
from trainfold.core.rehearsal.orders import VARIABLE, Orders, ReplayOrders, encode_orders
from trainfold.core.state.state import Progress, TrainState

child = requests_cases.child


STATE = TrainState(trainer=Progress(step=3))


@pytest.mark.parametrize(
    ("signals", "found"),
    [
        ({"SIGUSR1": "save", "SIGKILL": "stop"}, "SIGKILL"),
        ({"SIGUSR1": "save", "SIGNONE": "stop"}, "SIGNONE"),
        ({"SIGUSR1": "save", 15: "stop"}, "15"),
        ({"SIGUSR1": "save", "SIGTERM": "halt"}, "halt"),
    ],
)
def test_signals_that_cannot_be_are_refused_and_nothing_is_installed(signals, found):
    with pytest.raises(InvalidArgument, match=found):
        SignalRequests(signals)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


# --- files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["STOP", "SAVE", "ABORT", "take", "wait"]), max_size=20))
def test_a_file_asks_once_at_the_first_look_after_it_was_made(tmp_path_factory, events):
    """R01, R02: against a model, the set of existing files and a clock."""
    run = tmp_path_factory.mktemp("run")
    now, there, may_look_at = [0.0], set(), 0.0
    source = StopFile(run, every_secs=1.0, clock=lambda: now[0])
    for event in [*events, "wait", "take"]:
        if event == "wait":
            now[0] += 0.6
        elif event == "take":
            wanted = ()
            if now[0] >= may_look_at:
                wanted = tuple(asked for name, asked in FILES.items() if name in there)
                may_look_at = now[0] + 1.0
                there.clear()
            assert source.take() == wanted
        else:
            (run / event).touch()
            there.add(event)
        assert {each.name for each in run.iterdir()} == there


def test_a_file_of_an_earlier_process_does_not_stop_this_one_and_is_reported(tmp_path, caplog):
    """R01: the process that it was meant for died before it saw the file."""
    (tmp_path / "STOP").touch()
    source = StopFile(tmp_path, every_secs=0)
    assert source.take() == ()
    assert not (tmp_path / "STOP").exists()
    assert "STOP left by an earlier process: removed and not done" in caplog.text
    (tmp_path / "STOP").write_text("please")
    assert source.take() == ("save_and_stop",)


def test_a_run_that_is_not_there_yet_and_one_that_vanished_ask_for_nothing(tmp_path, caplog):
    source = StopFile(tmp_path / "later", every_secs=0)
    assert source.take() == ()
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "SAVE").touch()
    assert source.take() == ("save",)
    (tmp_path / "later").rmdir()
    (tmp_path / "later").write_text("a file now")
    assert source.take() == ()
    assert not caplog.records or caplog.records[-1].levelno < logging.WARNING


def test_a_file_that_cannot_be_removed_counts_once(tmp_path, monkeypatch, caplog):
    """Otherwise a SAVE file would save at each step; if touched again, it counts again."""
    source = StopFile(tmp_path, every_secs=0)
    (tmp_path / "SAVE").touch()

    def refused(path, missing_ok=False):
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(Path, "unlink", refused)
    assert [source.take() for _ in range(3)] == [("save",), (), ()]
    assert caplog.text.count("cannot be removed") == 1
    os.utime(tmp_path / "SAVE", (1, 1))
    assert source.take() == ("save",)


def test_a_disk_that_cannot_be_asked_does_not_end_a_training(tmp_path, monkeypatch, caplog):
    """A short failure of a network filesystem is logged once, and the file counts once it is visible again."""
    source = StopFile(tmp_path, every_secs=0)
    (tmp_path / "STOP").touch()

    def fails(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "lstat", fails)
        assert [source.take() for _ in range(3)] == [(), (), ()]
    assert caplog.text.count("cannot look for control files now") == 1
    assert source.take() == ("save_and_stop",)


def test_a_directory_of_that_name_is_no_request_and_a_link_is(tmp_path):
    source = StopFile(tmp_path, every_secs=0)
    (tmp_path / "STOP").mkdir()
    assert source.take() == ()
    (tmp_path / "SAVE").symlink_to("nowhere")
    assert source.take() == ("save",)
    assert [each.name for each in tmp_path.iterdir()] == ["STOP"]


def test_a_chdir_does_not_move_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = StopFile(".", every_secs=0)
    (tmp_path / "STOP").touch()
    monkeypatch.chdir("/")
    assert source.take() == ("save_and_stop",)


def test_after_a_close_nothing_is_looked_for(tmp_path):
    source = StopFile(tmp_path, every_secs=0)
    source.close()
    source.close()
    (tmp_path / "STOP").touch()
    assert source.take() == ()
    assert (tmp_path / "STOP").exists()


@pytest.mark.parametrize("files", [{"a/b": "save"}, {"..": "save"}, {"": "save"}, {"STOP": "halt"}, {7: "save"}])
def test_files_that_cannot_be_are_refused(tmp_path, files):
    with pytest.raises(InvalidArgument):
        StopFile(tmp_path, files)


def test_the_files_are_nothing_to_the_rest_of_trainfold(tmp_path):
    """C12: a run is listed, saved and loaded beside them, and may start in their folder, which does not count as foreign."""
    for name in FILES:
        (tmp_path / name).touch()
    save(STATE, tmp_path)
    inventory = read_inventory(LocalStore(tmp_path))
    assert inventory.problem is None
    assert [entry.name for entry in inventory.entries] == ["step-00000003"]
    assert load(tmp_path, like=TrainState(trainer=Progress())).trainer.step == 3
    (tmp_path / "run.json").unlink()
    with pytest.raises(CheckpointForeign, match="checkpoints without it"):  # the reason is still the right one
        save(STATE, tmp_path)


def test_a_run_that_is_asked_to_end_in_an_evaluation_ends_at_the_next_boundary_and_is_saved_once(child, tmp_path):
    """R01, R02, P29: by a signal or a file; an abort saves nothing; and one run after another in a process."""
    process = child(f"""
        import warnings
        warnings.simplefilter("ignore")
        from trainfold.adapters.manager.manager import CheckpointManager
        from trainfold.adapters.requests.sources import Combined, StopFile
        from trainfold.core.state.state import Progress, TrainState
        for how in ("signal", "STOP", "ABORT"):
            run, step, events = {str(tmp_path)!r} + "/" + how, 0, []
            requests = Combined(SignalRequests(), StopFile(run, every_secs=0))
            with CheckpointManager(run, every=100, requests=requests, on_event=events.append) as manager:
                while not manager.should_stop:
                    step += 1
                    if step == 3:
                        say("evaluating")
                        sys.stdin.readline()
                    outcome = manager.step(TrainState(trainer=Progress(step=step)), is_last=step == 1000)
            say(step, [event.step for event in events if event.kind == "committed"], os.path.exists(run + "/" + how))
        say(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """)
    for how, saved in (("signal", [3]), ("STOP", [3]), ("ABORT", [])):
        heard(process, "evaluating")
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            (tmp_path / how / how).touch()
        process.stdin.write("go on\n")
        process.stdin.flush()
        heard(process, f"3 {saved} False")
    assert ended(process)[:2] == (["True"], 0)


# --- sources ---------------------------------------------------------------------------------------------------------


def test_every_source_has_the_protocol_and_several_are_one(tmp_path):
    """R01: each request of any source arrives once; a close reaches all sources."""
    asked, files = Asked(), StopFile(tmp_path, every_secs=0)
    with SignalRequests() as signals:
        every = Combined(asked, files, signals)
        assert all(isinstance(source, RequestSource) for source in (asked, files, signals, every))
        asked.ask("save")
        (tmp_path / "SAVE").touch()
        signal.raise_signal(signal.SIGTERM)
        assert every.take() == ("save", "save_and_stop")
        every.close()
        every.close()
        assert not signals.is_installed
    with pytest.raises(InvalidArgument):
        asked.ask("halt")


def test_a_source_that_cannot_be_closed_does_not_keep_the_others_open():
    class Broken:
        def take(self):
            return ()

        def close(self):
            raise ArithmeticError

    signals = SignalRequests()
    with pytest.raises(ArithmeticError):
        Combined(signals, Broken()).close()
    assert not signals.is_installed


def test_any_thread_may_ask():
    """No request is lost between threads, and each is taken once."""
    asked, taken, threads = Asked(), [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: [asked.ask("save") for _ in range(200)]))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        taken.append(asked.take())
    taken.append(asked.take())
    assert set(itertools.chain(*taken)) == {"save"}
    assert asked.take() == ()


def test_a_replay_takes_no_request_from_the_run_itself(tmp_path, monkeypatch):
    """A job may train there, and the request is for it; one in the copy ends the replay."""
    run, home = tmp_path / "run", tmp_path / "replay"
    run.mkdir()
    (home / "run").mkdir(parents=True)
    (run / "STOP").touch()
    orders = Orders(str(home), str(home / "notes"), every=9, steps=9, linger_after=9, replay=ReplayOrders(str(run)))
    monkeypatch.setenv(VARIABLE, encode_orders(orders))
    monkeypatch.chdir(tmp_path)
    for spelling in (run, "run", f"file://{run}/"):
        source = StopFile(spelling, every_secs=0)
        assert source.take() == ()
        (home / "run/SAVE").touch()
        assert source.take() == ("save",)
    assert (run / "STOP").exists()
