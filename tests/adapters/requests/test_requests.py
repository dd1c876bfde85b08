"""Signals and control files: no request is lost, and every handler is put back as it was."""

import logging
import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.adapters.manager import requests_cases
from kit.adapters.manager.requests_cases import ended, heard

from trainfold.adapters.requests.signal_handlers import disposition_of
from trainfold.adapters.requests.sources import SignalRequests

child = requests_cases.child


TWO = {"SIGUSR1": "save", "SIGUSR2": "save_and_stop"}


@pytest.fixture(autouse=True)
def signals_are_as_before():
    """A handler left behind by one test would break another."""
    watched = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    before = [disposition_of(number) for number in watched]
    yield
    assert [disposition_of(number) for number in watched] == before


def test_a_signal_during_one_long_call_of_c_is_a_request_after_it(child):
    """R01, P29: the interpreter does not run meanwhile, as in a compile or a wait for a kernel."""
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
    """R01: it dies of SIGTERM as it does without us, so that the waiting process sees that."""
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
    """R01: Ctrl-C after SIGTERM raises KeyboardInterrupt as usual; only the first signal is a request."""
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
    """R01: a source made in the main thread works in any thread; made elsewhere, it logs that it has no effect."""
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
    """Also if several sources are stacked on a handler of the program."""
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
    """A worker that is asked to end does so, and the loader reports it; the parent gets no request."""
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
    """R01, P29: against a model, the set of pending requests."""
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
    """O03: the program's own handler too, which is installed again at the end."""
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
    """The living source calls the closed one as its previous handler; the handler before both was the default, which kills."""
    first, second = SignalRequests(), SignalRequests()
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert second.take() == ("save_and_stop",)
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_raises_is_heard_and_the_request_is_noted_before():
    """As in `submitit` and others: the program's own action at a signal still happens."""

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
    """D07: pending requests are dropped, so that the next attempt in this process starts clean."""
    source = SignalRequests()
    signal.raise_signal(signal.SIGUSR1)
    source.close()
    source.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "requested and not done, because the run has ended: save"
    ]
    assert source.take() == ()
    assert not source.is_installed
