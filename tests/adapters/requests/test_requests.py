"""Signals and control files: nothing that was asked for is lost, and everything is put back as it was."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.adapters.requests.signal_handlers import disposition_of
from trainfold.adapters.requests.sources import FILES, Asked, Combined, RequestSource, SignalRequests, StopFile
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CheckpointForeign, InvalidArgument
from trainfold.core.state.state import Progress, TrainState

TWO = {"SIGUSR1": "save", "SIGUSR2": "save_and_stop"}
STATE = TrainState(trainer=Progress(step=3))


@pytest.fixture(autouse=True)
def signals_are_as_before():
    """What a test leaves behind would be another test's riddle."""
    watched = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    before = [disposition_of(number) for number in watched]
    yield
    assert [disposition_of(number) for number in watched] == before


@pytest.fixture
def child():
    """Starts programs in processes of their own, and ends those that a test leaves."""
    started = []

    def start(program):
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", PREAMBLE + textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


PREAMBLE = """
import os, signal, sys, threading, time
from trainfold.adapters.requests.sources import SignalRequests
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background without
def say(*words): print(*words, flush=True)
def until(happens):
    for _ in range(6000):
        if happens(): return
        time.sleep(0.01)
    raise SystemExit("it never happened")
"""


def heard(process, line):
    """Wait for a line of a program."""
    said = process.stdout.readline().strip()
    assert said == line, f"{said!r}: {process.communicate()}"


def ended(process):
    """The lines that a program says from here on, and its exit code."""
    said = (
        process.stdout.read()
    )  # not communicate(), which knows nothing of lines that were read ahead with those heard
    complaints = process.stderr.read()
    return said.splitlines(), process.wait(timeout=120), complaints


# --- signals, in real processes --------------------------------------------------------------------------------------


def test_a_signal_during_one_long_call_of_c_is_a_request_after_it(child):
    """R01, P29: the interpreter does not run in the meantime, as in a compile or a kernel that is waited for."""
    done = child("""
        import hashlib
        source = SignalRequests()
        sent = []
        def send():
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append("in the call")
        threading.Thread(target=send).start()
        rounds = 100_000
        while not sent:  # however fast the machine is
            rounds *= 4
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
        say(sent, source.take(), source.take())
    """)
    assert ended(done)[:2] == (["['in the call'] ('save_and_stop',) ()"], 0)


def test_a_signal_during_an_evaluation_ends_the_run_at_the_next_boundary(child):
    """R01, P29: the evaluation is not disturbed, and nothing is polled in it."""
    process = child("""
        source = SignalRequests()
        came = []
        signal.signal(signal.SIGUSR2, lambda *_: came.append(1))
        for step in range(1, 4):
            if "save_and_stop" in source.take():
                break
            if step == 2:
                say("evaluating")
                until(lambda: came)  # the signal after the one that counts
                total = sum(range(100_000))
                say("evaluated", total)
        say("stopped before step", step)
    """)
    heard(process, "evaluating")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[:2] == (["evaluated 4999950000", "stopped before step 3"], 0)


def test_a_second_signal_to_stop_ends_the_process(child):
    """R01: it dies of SIGTERM as without us, so that whoever waits for it sees that."""
    process = child("""
        source = SignalRequests(settle_secs=0)
        say("ready")
        until(source._waiting.__len__)
        say("asked")
        time.sleep(60)
    """)
    heard(process, "ready")
    process.send_signal(signal.SIGTERM)
    heard(process, "asked")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[1] == -signal.SIGTERM


def test_a_second_signal_of_another_kind_is_one_too(child):
    """R01: Ctrl-C after SIGTERM is the KeyboardInterrupt that it would be; the first one alone is a request."""
    process = child("""
        source = SignalRequests({"SIGTERM": "save_and_stop", "SIGINT": "stop"}, settle_secs=0)
        say("ready")
        try:
            until(source._waiting.__len__)
            say("asked")
            time.sleep(60)
        except KeyboardInterrupt:
            say("interrupted", source.take())
    """)
    heard(process, "ready")
    process.send_signal(signal.SIGTERM)
    heard(process, "asked")
    process.send_signal(signal.SIGINT)
    assert ended(process)[:2] == (["interrupted ('save_and_stop',)"], 0)


def test_a_signal_that_is_passed_on_as_well_counts_once(child):
    """R01: a scheduler signals the launcher and its children, and the launcher its children again."""
    process = child("""
        now = [0.0]
        source = SignalRequests(settle_secs=1.0, clock=lambda: now[0])
        for each in (0.0, 0.1, 0.9):
            now[0] = each
            os.kill(os.getpid(), signal.SIGTERM)
        say(source.take(), source.take())
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        say(source.take())
        now[0] = 1.0
        os.kill(os.getpid(), signal.SIGTERM)
    """)
    assert ended(process)[:2] == (["('save_and_stop',) ()", "('save',)"], -signal.SIGTERM)


def test_a_loop_in_a_worker_thread_works_with_and_without_signals(child):
    """R01: what was made in the main thread is taken in any; made elsewhere, it says that it can do nothing."""
    process = child("""
        main = SignalRequests()
        def loop():
            other = SignalRequests()
            say(other.is_installed, main.is_installed)
            until(main._waiting.__len__)
            say(main.take(), other.take())
            other.close()
            main.close()  # cannot put back from here: hands on
            main.close()
            say("closed")
        worker = threading.Thread(target=loop)
        worker.start()
        worker.join()
        main.close()
        say(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """)
    heard(process, "False True")
    process.send_signal(signal.SIGTERM)
    said, code, complaints = ended(process)
    assert (said, code) == (["('save_and_stop',) ()", "closed", "True"], 0)
    assert "signals are handled in the main thread only" in complaints


def test_after_a_close_in_another_thread_a_signal_does_what_it_did(child):
    process = child("""
        source = SignalRequests()
        closing = threading.Thread(target=source.close)
        closing.start()
        closing.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """)
    assert ended(process)[1] == -signal.SIGTERM


def test_handlers_of_c_code_are_there_again_after_a_close(child):
    """`signal.signal` alone forgets them, and SIGUSR1 would then end the process."""
    process = child("""
        import faulthandler
        faulthandler.register(signal.SIGUSR1)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.siginterrupt(signal.SIGUSR2, False)
        from trainfold.adapters.requests.signal_handlers import disposition_of
        flags = disposition_of(signal.SIGUSR2).raw[136:140]
        with SignalRequests({"SIGUSR1": "save", "SIGUSR2": "save"}) as source:
            os.kill(os.getpid(), signal.SIGUSR1)
            say(source.take())
        os.kill(os.getpid(), signal.SIGUSR1)
        say("alive", disposition_of(signal.SIGUSR2).raw[136:140] == flags)
    """)
    said, code, complaints = ended(process)
    assert (said, code) == (["('save',)", "alive True"], 0)
    assert "most recent call first" in complaints


def test_forks_and_what_they_start_die_of_a_signal_as_ever(child):
    """A child is another process: `Process.terminate` ends it, and its signals ask nothing of the parent's run."""
    process = child("""
        import multiprocessing, subprocess
        source = SignalRequests()
        def work(ready):
            ready.set()
            time.sleep(60)
        context = multiprocessing.get_context("fork")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            ready = context.Event()
            worker = context.Process(target=work, args=(ready,))
            worker.start()
            ready.wait()
            os.kill(worker.pid, number)
            worker.join()
            say(-worker.exitcode == number)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        other.terminate()
        say(-other.wait() == signal.SIGTERM)
        say(source.take(), source.is_installed)
        os.kill(os.getpid(), signal.SIGTERM)
        say(source.take())
    """)
    assert ended(process)[:2] == (["True"] * 3 + ["() True", "('save_and_stop',)"], 0)


def test_a_fork_gets_the_handlers_of_its_parents_parent_back(child):
    """Also where several sources are on top of a handler of the program's own."""
    process = child("""
        def own(number, frame): say("own")
        signal.signal(signal.SIGUSR1, own)
        first, second = SignalRequests(), SignalRequests()
        if (pid := os.fork()) == 0:
            say(signal.getsignal(signal.SIGUSR1) is own, first.is_installed, second.is_installed)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(pid, 0)
        say(first.take(), second.take())
    """)
    assert ended(process)[:2] == (["True False False", "own", "() ()"], 0)


def test_the_workers_of_a_data_loader_are_not_affected(child):
    """One that is told to end does so, and the loader says it; the parent is asked for nothing."""
    process = child("""
        import warnings
        import torch
        warnings.simplefilter("ignore")
        source = SignalRequests()
        loader = torch.utils.data.DataLoader(torch.arange(64), num_workers=1, multiprocessing_context="fork")
        say(sum(int(each) for each in loader), source.take())
        reading = iter(loader)
        next(reading)
        os.kill(reading._workers[0].pid, signal.SIGTERM)
        reading._workers[0].join()
        try:
            for _ in reading: pass
        except RuntimeError:
            say("the loader says it")
        say(source.take())
        os.kill(os.getpid(), signal.SIGTERM)
        say(source.take())
    """)
    said, code, complaints = ended(process)
    assert (said, code) == (["2016 ()", "the loader says it", "()", "('save_and_stop',)"], 0), complaints


# --- signals, in this process ----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["SIGUSR1", "SIGUSR2", "take"]), max_size=20))
def test_whatever_comes_when_it_is_taken_once_and_never_lost(events):
    """R01, P29: beside a set of what waits."""
    waiting = {}
    with SignalRequests(TWO, clock=lambda: 0.0) as source:
        for event in [*events, "take"]:
            if event == "take":
                assert source.take() == tuple(waiting)
                waiting.clear()
            else:
                signal.raise_signal(signal.Signals[event])
                waiting[TWO[event]] = None


@settings(max_examples=60)
@given(order=st.permutations(range(4)), made=st.integers(1, 4))
@example(order=[0, 1, 2, 3], made=4)
def test_several_sources_hear_all_and_are_closed_in_any_order(order, made):
    """O03: also the handler of the program's own, which is there in the end."""
    own = []
    before = signal.signal(signal.SIGUSR1, lambda *_: own.append(1))
    mine = disposition_of(signal.SIGUSR1)
    try:
        sources = [SignalRequests({"SIGUSR1": "save"}) for _ in range(made)]
        living = set(range(made))
        for index in [None, *(each for each in order if each < made)]:
            if index is not None:
                sources[index].close()
                living.discard(index)
            own.clear()
            signal.raise_signal(signal.SIGUSR1)
            assert own == [1]
            assert {each for each in range(made) if sources[each].take()} == living
        assert disposition_of(signal.SIGUSR1) == mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_closed_source_below_a_living_one_does_not_end_the_process():
    """It is called as the handler that was there before, and what it had found there was to die."""
    first, second = SignalRequests(), SignalRequests()
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert second.take() == ("save_and_stop",)
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_raises_is_heard_and_the_request_is_noted_before():
    """As `submitit` and others do: what the program wants at a signal still happens."""

    def own(number, frame):
        raise ArithmeticError

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with SignalRequests() as source:
            with pytest.raises(ArithmeticError):
                signal.raise_signal(signal.SIGUSR1)
            assert source.take() == ("save",)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_came_later_is_left_alone():
    source = SignalRequests()
    later = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    source.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, later)
    source.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_an_ignored_signal_is_ignored_again_afterwards():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SignalRequests() as source:
            signal.raise_signal(signal.SIGUSR1)
            assert source.take() == ("save",)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_close_is_idempotent_and_says_what_nobody_took(caplog):
    """D07: what was asked for is forgotten, so that the next attempt in this process begins clean."""
    source = SignalRequests()
    signal.raise_signal(signal.SIGUSR1)
    source.close()
    source.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "asked for and not done, since the run has ended: save"
    ]
    assert source.take() == ()
    assert not source.is_installed


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
    """R01, R02: beside a set of the files that are there and a clock."""
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
    """R01: the process that it was meant for died before it looked."""
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
    """Else a SAVE would save at each step; touched again, it counts again."""
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
    """A hiccup of a network filesystem; said once, and the file counts when it can be seen again."""
    source = StopFile(tmp_path, every_secs=0)
    (tmp_path / "STOP").touch()

    def fails(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "lstat", fails)
        assert [source.take() for _ in range(3)] == [(), (), ()]
    assert caplog.text.count("cannot be looked for now") == 1
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
    """C12: a run is listed, saved and loaded beside them, and may begin where they are; they make no foreign folder."""
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
    """R01: what any of them asks for, each once; a close reaches all of them."""
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
