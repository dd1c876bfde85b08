"""The demo: its kill logic with a run that starts quickly, and the real demo once, with a tiny model."""

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema
from kit.depth import IS_DEEP

from trainfold.adapters.cli import main
from trainfold.adapters.cli.demo import train
from trainfold.adapters.cli.demo.command import KILLED, REPORT, run_demo
from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.kill import UNINTERRUPTED, Attempt, DemoFailed, Kill, plan_kills, train_command
from trainfold.adapters.cli.demo.losses import Losses, losses_of
from trainfold.adapters.cli.demo.report import EvaluationDiffers, KillsMissing, NotIdentical, RunRecord, compare, tables
from trainfold.adapters.cli.demo.settings import make_settings
from trainfold.adapters.cli.demo.timeline import window_of
from trainfold.adapters.cli.rehearse.moments import arms
from trainfold.adapters.cli.terminal import plot
from trainfold.backends.flight.record_file import RecordFile, read_entries
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.data.cursor import make_cursor
from trainfold.core.errors import CheckpointForeign, InvalidArgument, NotWritable, RunLocked
from trainfold.core.rehearsal.entry import RecordedLine

# A run that starts in 30 ms: its state is a number, its checkpoint a file, and its save slow enough for a kill to hit it.
QUICK_RUN = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
settings = json.loads((run.parent / "demo.json").read_text())
log = open(run.with_suffix(".jsonl"), "ab", buffering=0)
def emit(kind, step, **data):
    line = json.dumps({"kind": kind, "step": step, "pid": os.getpid(), "secs": time.monotonic(), "data": data})
    log.write(line.encode() + b"\\n")
    os.write(1, line.encode() + b"\\n")
saved = sorted(path for path in run.glob("step-*") if (path / "manifest.json").exists())
state = json.loads((saved[-1] / "manifest.json").read_text()) if saved else {"step": 0, "value": 0.5}
if saved and "SABOTAGE" in os.environ:
    state["value"] *= 1 + 2.0**-52
emit("start", state["step"], resumed_from=saved[-1].name if saved else None, pids=[os.getpid(), *map(int, os.environ.get("OTHERS", "").split())])
while state["step"] < settings["steps"]:
    time.sleep(0.004)
    state = {"step": state["step"] + 1, "value": 3.7 * state["value"] * (1 - state["value"])}
    step = state["step"]
    emit("step", step, loss=state["value"])
    if step == int(os.environ.get("FAILS_AT", -1)):
        raise RuntimeError("the disk is on fire")
    if step % settings["save_every"] == 0 or step == settings["steps"]:
        emit("save", step)
        directory = run / f"step-{step:08d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.bin").write_bytes(b"12345678")
        time.sleep(0.03)
        (directory / "half").write_text(json.dumps(state))
        os.replace(directory / "half", directory / "manifest.json")
        emit("saved", step)
emit("done", state["step"], fingerprints={"model": state["value"].hex()}, evaluation=state["value"])
"""


@pytest.fixture
def quick_run(tmp_path, monkeypatch):
    """Its command. The pictures, which take longer than the run, are those of the real thing."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    script = tmp_path / "quick_run.py"
    script.write_text(QUICK_RUN)
    return lambda run: [sys.executable, "-S", str(script), str(run)]


@pytest.mark.parametrize("seed", [0, 1, 2] if IS_DEEP else [0])
def test_a_run_is_killed_three_times_and_once_in_a_save_and_the_record_says_so(tmp_path, quick_run, seed):
    """C02: every kill leaves the earlier checkpoints in place, and no process resumes from the torn one."""
    answer = run_demo(tmp_path / "demo", make_settings(steps=60, seed=seed, tiny=True), command=quick_run)
    attempts = answer.data["attempts"]
    kills = [attempt["kill"] for attempt in attempts if attempt["kill"]]
    in_save = [kill for kill in kills if kill["during"] == "save"]
    assert answer.error is None
    assert answer.data["identical"]
    assert len(kills) >= 3
    assert in_save
    assert [attempt["resumed_from"] is None for attempt in attempts] == [True] + [False] * (len(attempts) - 1)
    for before, after in itertools.pairwise(attempts):
        torn = before["kill"]["during"] == "save" and not before["kill"]["committed"]
        assert after["first_step"] <= before["kill"]["step"] - torn
        assert after["first_step"] % 10 == 0
    assert any(kill["committed"] or kill["leftovers"] for kill in in_save)


def test_a_resume_that_is_off_by_one_bit_makes_the_demo_fail(tmp_path, quick_run, monkeypatch):
    monkeypatch.setenv("SABOTAGE", "1")
    answer = run_demo(tmp_path / "demo", make_settings(steps=60, tiny=True), command=quick_run)
    assert isinstance(answer.error, NotIdentical)
    assert answer.error.exit_code == 40
    assert "model" in answer.error.found
    assert "evaluation loss" in answer.error.found
    report = json.loads((tmp_path / "demo" / REPORT).read_text())
    fits_its_schema("demo", report)
    assert not report["identical"]


def test_a_run_that_fails_by_itself_is_not_mistaken_for_one_that_was_killed(tmp_path, quick_run, monkeypatch):
    monkeypatch.setenv("FAILS_AT", "7")
    with pytest.raises(DemoFailed, match="the disk is on fire"):
        run_demo(tmp_path / "demo", make_settings(steps=60, tiny=True), command=quick_run)


def test_a_run_that_outruns_its_killer_is_reported(tmp_path, quick_run, monkeypatch):
    monkeypatch.setattr("trainfold.adapters.cli.demo.command.plan_kills", lambda _: [])
    answer = run_demo(tmp_path / "demo", make_settings(steps=20, tiny=True), command=quick_run)
    assert isinstance(answer.error, KillsMissing)
    assert answer.error.exit_code == 41


def test_the_moments_depend_on_the_seed_and_lie_in_different_parts_of_the_run():
    plans = {seed: plan_kills(make_settings(steps=90, seed=seed)) for seed in range(20)}
    assert len({tuple(plan) for plan in plans.values()}) == 20
    assert plan_kills(make_settings(steps=90, seed=3)) == plans[3]
    for first, second, third in plans.values():
        assert 15 <= first.after_step < 40 <= second.after_step < 65 <= third.after_step < 90
        assert second.in_save


def events_from(settings, first):
    """The events of a process that is not killed."""
    yield RecordedLine("start", first, 1, 0.0, {"resumed_from": f"step-{first:08d}" if first else None})
    for step in range(first + 1, settings.steps + 1):
        yield RecordedLine("step", step, 1, 0.0)
        if step % settings.save_every == 0 or step == settings.steps:
            yield RecordedLine("save", step, 1, 0.0)
            yield RecordedLine("saved", step, 1, 0.0)
    yield RecordedLine("done", settings.steps, 1, 0.0)


def imagine_attempt(settings, trigger, first, late):
    """The step at which the next process starts, and the events of this one before it died, some of them after the trigger."""
    seen = []
    events = events_from(settings, first)
    for event in events:
        seen.append(event)
        if arms(seen, trigger):
            seen.extend(itertools.islice(events, late))
            return max([first, *(event.step for event in seen if event.kind == "saved")]), seen
    return None, seen


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("steps", [*range(6, 40), 60, 80, 81, 200])
def test_every_kill_is_followed_by_a_resume_from_a_checkpoint(steps, late):
    """C02: this includes the first kill, for any seed: a run that starts from scratch would show nothing about checkpoints."""
    for seed in range(60):
        settings = make_settings(steps=steps, seed=seed)
        first = 0
        for trigger in plan_kills(settings):
            first, seen = imagine_attempt(settings, trigger, first, late)
            assert first is not None, f"seed {seed}: {trigger} was never pulled"
            assert first > 0, f"seed {seed}: {trigger} left no checkpoint"
            assert seen[-1].kind != "done"
            assert late or not trigger.in_save or seen[-1].kind == "save"


@pytest.mark.parametrize("steps", [12, 60] if IS_DEEP else [12])
def test_a_kill_that_is_due_with_the_first_save_waits_until_it_is_acknowledged(tmp_path, quick_run, steps):
    settings = next(
        settings
        for settings in (make_settings(steps=steps, seed=seed, tiny=True) for seed in itertools.count())
        if plan_kills(settings)[0].after_step == settings.save_every
    )
    answer = run_demo(tmp_path / "demo", settings, command=quick_run)
    first, *others = answer.data["attempts"]
    assert first["kill"]["step"] >= settings.save_every
    assert others
    assert all(attempt["resumed_from"] for attempt in others)


def a_record():
    return RunRecord(steps=9, fingerprints={"model": "a"}, evaluation=0.5, losses=Losses({1: 0.5}, 0, ()))


def attempts_of(*kinds, fresh=()):
    """One process for each kill, and the one that finishes."""
    kills = [Kill(step=3, during=kind, committed=None, leftovers={}) for kind in kinds]
    return [
        Attempt(resumed_from=None if number == 0 or number in fresh else "step-00000002", first_step=0, kill=kill)
        for number, kill in enumerate([*kills, None])
    ]


@pytest.mark.parametrize(
    ("attempts", "found"),
    [
        (attempts_of("step", "step", "step"), "3 kills, 0 during a save, 3 resumes"),
        (attempts_of("step", "save"), "2 kills, 1 during a save, 2 resumes"),
        (attempts_of("step", "save", "step", fresh={1}), "3 kills, 1 during a save, 2 resumes"),
        (attempts_of("step", "save", "step", fresh={1, 2, 3}), "3 kills, 1 during a save, 0 resumes"),
        (attempts_of(), "0 kills, 0 during a save, 0 resumes"),
    ],
)
def test_kills_that_show_less_than_was_promised_are_an_error(attempts, found):
    """C02: the demo promises three kills, one of them during a save, and a checkpoint to resume from after each."""
    error = compare(a_record(), a_record(), attempts, wanted_kills=3).error
    assert isinstance(error, KillsMissing)
    assert found in error.found
    for enough in (attempts_of("step", "save", "step"), attempts_of("save", "step", "step", "save", fresh={2})):
        assert compare(a_record(), a_record(), enough, wanted_kills=3).error is None


def test_a_second_demo_replaces_the_first_and_leaves_other_directories_alone(tmp_path, quick_run):
    demo = tmp_path / "demo"
    for steps in (18, 20):
        run_demo(demo, make_settings(steps=steps, tiny=True), command=quick_run)
    assert losses_of(read_entries(demo / f"{KILLED}.jsonl")).by_step.keys() == set(range(1, 21))
    (demo / "notes.txt").write_text("mine")
    before = sorted(path.name for path in demo.rglob("*"))
    with pytest.raises(CheckpointForeign, match=r"notes\.txt.*nothing was touched"):
        run_demo(demo, make_settings(steps=20, tiny=True), command=quick_run)
    assert sorted(path.name for path in demo.rglob("*")) == before


@pytest.mark.parametrize("kind", ["unmarked", "file", "link"])
def test_what_only_looks_like_a_demo_is_not_touched(tmp_path, quick_run, kind):
    demo = tmp_path / "demo"
    if kind == "file":
        demo.write_text("mine")
    else:
        demo.mkdir()
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("mine")
        if kind == "link":
            (demo / "demo.json").write_text('{"made_by": "trainfold demo"}')
            (demo / KILLED).symlink_to(tmp_path / "mine")
        else:
            (demo / KILLED).mkdir()
    with pytest.raises(CheckpointForeign):
        run_demo(demo, make_settings(steps=20, tiny=True), command=quick_run)
    assert kind == "file" or (tmp_path / "mine" / "thesis.tex").exists()


def test_two_demos_do_not_share_a_directory(tmp_path, quick_run):
    failed = []

    def second():
        try:
            run_demo(tmp_path / "demo", make_settings(steps=20, tiny=True), command=quick_run)
        except RunLocked as error:
            failed.append(error)

    def command(run):
        if not failed:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        return quick_run(run)

    run_demo(tmp_path / "demo", make_settings(steps=20, tiny=True), command=command)
    assert len(failed) == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path, quick_run):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match=r"--run"):
        run_demo(tmp_path / "file" / "demo", make_settings(steps=20, tiny=True), command=quick_run)


@pytest.mark.parametrize("bad", [{"steps": 5}, {"seed": -1}, {"nproc": 0}, {"nproc": 3}, {"nproc": 16}])
def test_arguments_that_cannot_work_are_refused_before_anything_is_made(bad):
    with pytest.raises(InvalidArgument):
        make_settings(**bad)


def test_torn_lines_of_a_log_cost_nothing_but_themselves(tmp_path):
    path = tmp_path / "run.jsonl"

    def log(step, loss):
        log = RecordFile(path, watcher=None, clock=lambda: 0.0)
        log.write("step", step, loss=loss)
        log.close()

    log(1, 0.1)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        log(2, 0.2)
        assert [event.step for event in read_entries(path)] == ([1, 2] if cut == len(whole) - 1 else [2])
        path.unlink()
    assert read_entries(path) == []


@pytest.mark.parametrize(
    ("leftovers", "said"),
    [({}, "nothing: it had not written a file yet"), ({"step-00000004/model": 7}, "torn: 7 B in 1 file, no manifest")],
)
def test_what_a_kill_during_a_save_left_is_said_in_words(leftovers, said):
    """Ranks compare what they have before they write, so a kill may come before the first file."""
    kill = Kill(step=4, during="save", committed=False, leftovers=leftovers)
    attempt = Attempt(resumed_from=None, first_step=0, kill=kill)
    made = tables(compare(a_record(), a_record(), [attempt], wanted_kills=1), [])
    assert ("left 1", "", said, "") in made[0].rows


def test_losses_that_contradict_each_other_are_found(tmp_path):
    log = RecordFile(tmp_path / "run.jsonl", watcher=None, clock=lambda: 0.0)
    for step, loss in ((1, 1.0), (2, float("nan")), (3, 0.5), (2, float("nan")), (3, 0.5000000000000001)):
        log.write("step", step, loss=loss)
    log.close()
    losses = losses_of(read_entries(tmp_path / "run.jsonl"))
    assert losses.replayed == 2
    assert losses.contradictions == (3,)


def test_no_byte_of_the_held_out_text_is_trained_on():
    text = help_text()
    assert len(text) > 300_000
    corpus = make_corpus(text, context=64, heldout_bytes=8192)
    trained = bytes(corpus.train[:, :-1].flatten().tolist()) + bytes([int(corpus.train[-1, -1])])
    assert text.startswith(trained)
    assert len(trained) <= len(text) - 8192
    assert bytes(corpus.heldout[0].tolist()) == text[len(text) - 8192 :][:65]
    assert corpus.train.dtype == torch.uint8


def test_without_matplotlib_the_demo_says_so_and_is_otherwise_the_same(tmp_path, quick_run):
    assert sys.modules["matplotlib.figure"] is None
    answer = run_demo(tmp_path / "demo", make_settings(steps=20, tiny=True), command=quick_run)
    assert answer.data["loss_curves"] == "not plotted: no such package matplotlib; pip install 'trainfold[plot]'"
    assert answer.data["timelines"] == answer.data["loss_curves"]
    assert not list((tmp_path / "demo").glob("*.png"))
    assert answer.data["identical"]


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    losses = {step: 5.0 / step for step in range(1, 9)}
    plot.draw_losses(
        tmp_path / "l.png",
        uninterrupted=losses,
        killed=[losses],
        kills=[(3, "step"), (5, "save")],
        verdict="the same bits",
        label="loss",
    )
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "l.png").stat().st_size > 5_000


def a_timeline(*, in_background, saves=3):
    """Steps of 1 s; each third one is saved, in 0.5 s in the loop or in 1.5 s beside it."""
    log, now = [RecordedLine("start", 0, 7, 0.0)], 0.0
    ends = None
    for step in range(1, 3 * saves + 4):
        now += 1.0
        log.append(RecordedLine("step", step, 7, now))
        if ends is not None and ends[0] <= now:
            log.append(RecordedLine("saved", ends[1], 7, now, {"secs_ago": now - ends[0]}))
            ends = None
        if step % 3 == 0 and step <= 3 * saves:
            log.append(RecordedLine("save", step, 7, now))
            if in_background:
                ends = (now + 1.5, step)
            else:
                now += 0.5
                log.append(RecordedLine("saved", step, 7, now))
    return log


def test_a_save_in_the_loop_stops_the_steps_and_one_in_the_background_does_not():
    """The window is cut from the record alone; a background save is recorded late and says by how much."""
    waits, goes_on = (window_of(a_timeline(in_background=in_background)) for in_background in (False, True))
    assert (waits.save.start, waits.save.stop) == (0.0, 0.5)
    assert [(step.start, step.stop) for step in waits.steps] == [
        (-3.0, -2.0), (-2.0, -1.0), (-1.0, 0.0), (0.5, 1.5), (1.5, 2.5), (2.5, 3.5)
    ]  # fmt: skip
    assert (goes_on.save.start, goes_on.save.stop) == (0.0, 1.5)
    assert [step.start for step in goes_on.steps] == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_save_without_enough_steps_around_it_has_no_window():
    assert window_of(a_timeline(in_background=False, saves=1)[:-1]) is None
    assert window_of([]) is None
    torn = [event for event in a_timeline(in_background=False) if event.kind != "saved"]
    assert window_of(torn) is None


def test_the_timelines_are_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    window = window_of(a_timeline(in_background=True))
    lane = ("title", attrs.astuple(window.save), [attrs.astuple(step) for step in window.steps])
    plot.draw_timelines(tmp_path / "t.png", [lane, lane])
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "t.png").stat().st_size > 5_000


SABOTAGED_RUN = """
import sys
import attrs, torch
from trainfold.adapters.cli.demo import train
whole = train.load
def load(*arguments, **keywords):
    state = whole(*arguments, **keywords)
    params = state.model.params
    name = next(iter(params))
    bent = type(params)({**params, name: torch.nextafter(params[name], torch.tensor(9.0))})
    return state.evolve(model=attrs.evolve(state.model, params=bent))
train.load = load
sys.exit(train.main())
"""


@pytest.mark.slow(3)
def test_the_real_thing_ends_with_the_same_bits(warm_python, tmp_path):
    """The demo with a tiny model and real kills, and then the commands that a user would run.

    In the laws, the run that is not killed is a new Python; a page runs the whole demo so in each run of the tests. Those that are
    killed are forks of one that has imported torch.
    """

    def command(run):
        whole = train_command(run)
        return whole if IS_DEEP and run.name == UNINTERRUPTED else warm_python.command(train.__file__, *whole[3:])

    settings = make_settings(steps=30, seed=14, tiny=True)
    assert plan_kills(settings)[0].after_step == settings.save_every  # the first kill comes with the first save
    answer = run_demo(tmp_path / "demo", settings, command=command)
    assert answer.error is None
    assert {check["name"] for check in answer.data["checks"]} >= {
        "model", "optimizer", "scheduler", "trainer", "dataset", "rng", "evaluation loss"
    }  # fmt: skip
    assert answer.data["kills"] >= 3
    assert answer.data["kills_during_a_save"] >= 1
    assert all(attempt["resumed_from"] for attempt in answer.data["attempts"][1:])
    assert main(["diff", str(tmp_path / "demo" / "uninterrupted"), str(tmp_path / "demo" / KILLED)]) == 0
    assert main(["verify", str(tmp_path / "demo" / KILLED)]) == 0
    assert all((tmp_path / "demo" / name).exists() for name in ("losses.png", "timeline.png"))
    sizes = answer.data["evaluation"]["sizes"]
    assert list(sizes) == ["1", "7", "64"]
    assert len({size["kept"] for size in sizes.values()}) == 1
    assert len({size["means"] for size in sizes.values()}) == 3  # the last batch is smaller
    assert any(len({size["results"]["loss"], size["kept"]}) == 1 for size in sizes.values())
    assert "Its evaluation, at three batch sizes" in [table.title for table in answer.tables]


def test_an_evaluation_that_depends_on_its_batch_size_makes_the_demo_fail():
    """Q01, P16: this has its own exit code."""
    sizes = {
        size: {"results": {"loss": "0x1p-1"}, "kept": kept, "means": "0x1p-1", "float32": "0x1p-1"}
        for size, kept in {"1": "0x1.0p-1", "7": "0x1.1p-1"}.items()
    }
    record = attrs.evolve(a_record(), measured={"sizes": sizes, "moved": 0, "values": 3, "loss": 0.5})
    comparison = compare(record, record, attempts_of("step", "save", "step"), wanted_kills=3)
    assert isinstance(comparison.error, EvaluationDiffers)
    assert comparison.error.exit_code == 43
    rows = {row[0].strip(): row for row in tables(comparison, [])[1].rows}
    assert rows["loss, from stored values"][-1] == "no"
    assert rows["loss, recomputed"][-1] == "yes"


@pytest.mark.slow(2)
def test_a_real_resume_that_bends_one_parameter_by_one_bit_makes_the_demo_fail(warm_python, tmp_path):
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED_RUN)
    settings = attrs.evolve(make_settings(steps=12, seed=2, donate=False, tiny=True), kills=1)
    answer = run_demo(tmp_path / "demo", settings, command=lambda run: warm_python.command(script, run))
    assert isinstance(answer.error, NotIdentical)
    assert "model" in answer.error.found
    assert main(["diff", str(tmp_path / "demo" / "uninterrupted"), str(tmp_path / "demo" / KILLED)]) == 3


# It stands for torchrun: the run is rank 0, and rank 1 waits. Both are in sessions of their own, out of reach of a signal to the launcher.
LAUNCHER = """
import os, subprocess, sys
rank_1 = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(20)"], start_new_session=True)
os.environ["OTHERS"] = str(rank_1.pid)
code = subprocess.Popen(sys.argv[1:], start_new_session=True).wait()
rank_1.kill()
sys.exit(code)
"""


def outlives_its_kill(pid):
    """A process that is being killed closes its files first, and is a zombie a moment later."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.01)
    return True


def test_each_kill_hits_the_launcher_and_all_its_ranks(tmp_path, quick_run, monkeypatch):
    """C02: a rank that outlived the kill could still write into the run that the next start resumes."""
    asked = []

    def under_launcher(command, nproc):
        asked.append(nproc)
        return [sys.executable, "-S", "-c", LAUNCHER, *command]

    def command(run):
        starts = [entry for entry in read_entries(tmp_path / "demo" / f"{KILLED}.jsonl") if entry.kind == "start"]
        assert not [pid for start in starts for pid in start.data["pids"] if outlives_its_kill(pid)]
        return quick_run(run)

    monkeypatch.setattr("trainfold.adapters.cli.demo.command.under_torchrun", under_launcher)
    answer = run_demo(tmp_path / "demo", make_settings(steps=60, tiny=True, nproc=2), command=command)
    assert answer.error is None
    fits_its_schema("demo", answer.data)
    assert set(asked) == {2}
    assert answer.data["nproc"] == 2
    assert ("processes of each run", "2, under torchrun") in answer.tables[-1].rows
    starts = [entry for entry in read_entries(tmp_path / "demo" / f"{KILLED}.jsonl") if entry.kind == "start"]
    assert len(starts) >= 4
    assert all(len(start.data["pids"]) == 2 for start in starts)


class Death(BaseException):
    """A rank ends here."""


class Memory:
    """A record; the rank dies at a step."""

    def __init__(self, dies_at=None):
        self.entries, self._dies_at = [], dies_at

    def write(self, kind, step, **data):
        self.entries.append((kind, step, data))
        if (kind, step) == ("step", self._dies_at):
            raise Death


def test_two_ranks_share_the_batches_and_resume_with_the_same_bits(tmp_path, monkeypatch):
    """The training of the demo itself, on ranks that are threads; one run saves in the background and the other in the loop."""
    settings = make_settings(steps=12, seed=3, tiny=True, nproc=2)
    assert (settings.batch_size, settings.accumulate) == (8, 2)
    one_by_one, make_model = threading.Lock(), train.make_model  # it seeds the generator, which threads share

    def make(settings):
        with one_by_one:
            return make_model(settings)

    monkeypatch.setattr(train, "make_model", make)
    read = []
    monkeypatch.setattr(train, "as_batch", lambda windows: read.extend(windows) or as_batch(windows))

    def start(run, *, dies_at=None, in_background=False):
        logs = [Memory(dies_at) for _ in range(2)]

        def rank(ranks):
            train.train(tmp_path / run, settings, logs[ranks.rank], ranks=ranks, in_background=in_background)

        run_threads(2, rank)
        return logs

    whole, other = start("whole", in_background=True)
    windows = make_corpus(help_text(), context=settings.context, heldout_bytes=settings.heldout_bytes).train
    meant = windows[torch.from_numpy(make_cursor(len(windows), seed=3).batch_across(12 * 8))]
    assert sorted(window.tolist() for window in read) == sorted(meant.tolist())
    with pytest.raises(Death):
        start("killed", dies_at=7)
    resumed, _ = start("killed")
    assert resumed.entries[0][1:] == (6, {"resumed_from": "step-00000006", "pids": [os.getpid()] * 2})
    assert [entry[0] for entry in (whole.entries[-1], resumed.entries[-1], other.entries[-1])] == [
        "done",
        "done",
        "saved",
    ]
    assert resumed.entries[-1] == whole.entries[-1]
    assert [entry for entry in whole.entries if entry[0] == "step"] == [
        entry for entry in other.entries if entry[0] == "step"
    ]


@pytest.mark.skipif(not IS_DEEP, reason="five starts of torchrun, 8 s each: part of the laws")
def test_the_real_thing_on_two_processes(warm_python, tmp_path):
    """The demo under torchrun: all its processes are really killed, and the run ends with the same bits."""

    def command(run):
        return warm_python.command(train.__file__, *train_command(run)[3:])

    answer = run_demo(tmp_path / "demo", make_settings(steps=60, seed=1, tiny=True, nproc=2), command=command)
    assert answer.error is None, answer.data
    assert answer.data["kills"] >= 3
    assert answer.data["kills_during_a_save"] >= 1
    assert all(attempt["resumed_from"] for attempt in answer.data["attempts"][1:])
    assert main(["diff", str(tmp_path / "demo" / "uninterrupted"), str(tmp_path / "demo" / KILLED)]) == 0
    starts = [entry for entry in read_entries(tmp_path / "demo" / f"{KILLED}.jsonl") if entry.kind == "start"]
    assert not [pid for start in starts for pid in start.data["pids"] if outlives_its_kill(pid)]
