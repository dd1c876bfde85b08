"""`trainfold bisect`: ten planted causes, each of which is named; and what is said where there is little to go by."""

import shlex
import shutil

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema, flip
from kit.adapters.manager import replay_cases
from kit.adapters.manager.parting_cases import BACKWARDS, flip_a_bit, reset_mean, sum_backwards, train

from trainfold import CheckpointManager, Loss, attach, init_state, make_step, optimizer
from trainfold.adapters.cli import main
from trainfold.adapters.cli.flights.bisect_runs import bisect_runs
from trainfold.core.flight.log_lines import decode_line
from trainfold.ranks import run_threads
from trainfold.states import FlightLog

ran = replay_cases.ran
replayed = replay_cases.replayed


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "a"
    train(run)
    return run


def named(plain, other, **options):
    answer = bisect_runs(plain, other, (), directory=other / "replay", patience_secs=60)
    fits_its_schema("bisect", {**answer.data, **options})
    return answer.data


PLANTED = {
    "another seed": ({"seed": 1}, 1, "seed", "0"),
    "one swapped batch": ({"swaps": True}, 3, "batch", ""),
    "a changed learning rate": ({"lr": 0.2}, 1, "setting", "lr"),
    "a forgotten scheduler": ({"schedules": False}, 1, "component", "scheduler"),
    "a flipped bit": ({"at_four": flip_a_bit, "record": 0}, 5, "arithmetic", ""),
    "a stale buffer": ({"at_four": reset_mean, "record": 0}, 6, "buffer", "norm.running_mean"),
    "dropout in eval": ({"drops": False}, 1, "streams", ""),
    "a different kernel": ({"at_four": sum_backwards}, 5, "arithmetic", ""),
    "a lost window": ({"loses_window": True}, 5, "position", ""),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_planted_cause_is_named(plain, tmp_path, planted):
    options, step, cause, name = PLANTED[planted]
    train(tmp_path / "b", **options)
    BACKWARDS.clear()
    found = named(plain, tmp_path / "b")
    assert (found["step"], found["cause"]) == (step, cause), found["text"]
    assert any(name in each for each in found["names"]) or not name, found["names"]


@pytest.mark.parametrize("noise", ["numpy", pytest.param("python", marks=pytest.mark.long), "generator"])
def test_another_seed_of_a_stream_beside_torch_is_named(tmp_path, noise):
    """Streams that are elsewhere from the first step on, and are drawn from; and a generator that is attached."""
    for name, seed in (("a", 0), ("b", 1)):
        train(tmp_path / name, noise=noise, noise_seed=seed)
    found = named(tmp_path / "a", tmp_path / "b")
    name = "noise" if noise == "generator" else noise
    assert (found["step"], found["cause"], found["names"]) == (1, "seed", [name]), found["text"]
    assert "streams" in found["may_be"]


def test_another_seed_is_named_on_ranks(tmp_path):
    """Each rank saves its own streams there, with its own seed."""

    def rank_of(ranks, run):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(model.weight, torch.initial_seed())
        live = attach(model)
        with CheckpointManager(run, every=1, record=1, collectives=ranks) as manager:
            manager.restore(live)
            live.advance(samples=1)
            manager.step(live)

    for seed in (0, 1):
        torch.manual_seed(seed)
        run_threads(2, lambda ranks, run=tmp_path / str(seed): rank_of(ranks, run))
    found = named(tmp_path / "0", tmp_path / "1")
    assert (found["cause"], found["names"], found["rank"]) == ("seed", ["0", "1"], None), found["text"]


def test_another_seed_on_which_nothing_depends_is_no_difference(tmp_path):
    """It was the cause, for certain, of runs with the same losses and states; a batch that was swapped later was hidden behind it."""
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        live = attach(model, loader=torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=1))
        with CheckpointManager(tmp_path / name, every=2, record=2) as manager:
            manager.restore(live)
            for x in live.batches(epochs=1):
                live.record(loss=model(x).sum())
                live.advance(samples=1)
                manager.step(live)
                if seed and live.progress.step == 5:
                    break
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"]) == (None, "nothing"), found["text"]
    assert found["warnings"] == [
        "no state after step 4 is known of both: after it their losses and norms alone were compared",
        "B ends at step 5, and A at step 6: nothing after step 5 was compared",
        "they were seeded otherwise, and nothing that is known depends on it",
    ]


def test_streams_that_no_program_draws_from_are_no_cause(plain, tmp_path):
    """Programs that do not use numpy seldom seed it."""
    train(tmp_path / "b", unused_seed=1, at_four=sum_backwards)
    BACKWARDS.clear()
    found = named(plain, tmp_path / "b")
    assert (found["cause"], found["may_be"]) == ("arithmetic", ["setting", "buffer", "bit"]), found["text"]


@pytest.mark.parametrize(("planted", "names", "step"), [
    ({"forgets": True}, ["scheduler.value['_step_count']"], 1),
    ({"forgets": True, "every": 4, "record": 0}, ["optimizer.groups[0].hyper['lr']"], 4),
    pytest.param({"doubles_lr": True}, ["optimizer.groups[0].hyper['lr']"], 4, marks=pytest.mark.long),
    ({"doubles_lr": True, "every": 4, "record": 0}, ["optimizer.groups[0].hyper['lr']"], 4),
])  # fmt: skip
def test_a_schedule_that_one_of_them_did_otherwise_is_a_setting(tmp_path, planted, names, step):
    cadence = {"every": 1, **{name: planted[name] for name in ("every", "record") if name in planted}}
    train(tmp_path / "a", **cadence)
    train(tmp_path / "b", **{**cadence, **planted})
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"], found["names"]) == (step, "setting", names), found["text"]


@pytest.mark.parametrize("logged", [(False, False), (True, False)])
def test_without_a_log_nothing_is_claimed_about_steps(tmp_path, logged):
    """The steps between the states that are the same and those that are not are unrecorded; what it may be is listed."""
    for name, swaps, is_logged in zip("ab", (False, True), logged, strict=True):
        train(tmp_path / name, swaps=swaps, is_logged=is_logged)
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"], found["names"]) == (3, "unrecorded", ["steps 1 to 3"]), found["text"]
    assert "batch" in found["may_be"]
    assert [str(tmp_path / name) in text for name, text in zip("ab"[sum(logged) :], found["warnings"], strict=True)]


def test_a_lost_window_is_named_without_a_log(tmp_path):
    for name, loses in (("a", False), ("b", True)):
        train(tmp_path / name, loses_window=loses, is_logged=False)
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"]) == (6, "position"), found["text"]


@pytest.mark.slow(30)
@pytest.mark.parametrize("planted", [pytest.param({}, marks=pytest.mark.long), {"at_four": flip_a_bit, "record": 0}])
def test_workers_of_a_loader_hide_nothing_and_are_no_difference(plain, tmp_path, planted):
    train(tmp_path / "b", workers=1, **planted)
    found = named(plain, tmp_path / "b")
    assert (found["step"], found["cause"]) == ((5, "arithmetic") if planted else (None, "nothing")), found["text"]
    assert ("bit" in found["may_be"]) == bool(planted)
    said = "the loader of A has 0 workers, and that of B has 1"
    assert any(said in each for each in found["warnings"]) == bool(planted)


def test_a_log_that_contradicts_its_checkpoints_is_not_used(plain, tmp_path):
    """That of another run was copied in; from the first state on that a checkpoint has otherwise."""
    train(tmp_path / "a", at_four=flip_a_bit)
    train(tmp_path / "b", at_four=flip_a_bit)
    shutil.copy(plain / "flight-00000.log", tmp_path / "b")
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"]) == (None, "nothing"), found["text"]
    assert len(found["warnings"]) == 1
    assert (
        "is not used after step 3: at step 6 it has another state of model, optimizer than the checkpoint"
        in found["warnings"][0]
    )
    assert "or what the program did between that step and the save changed it" in found["warnings"][0]


@pytest.mark.parametrize(("log", "words"), [
    ("missing", "has no flight log"),
    ("empty", "flight-00000.log is empty, or not a file"),
    ("a folder", "flight-00000.log is empty, or not a file"),
    ("cut", "flight-00000.log ends at step 1, and the run has a checkpoint of step 9"),
])  # fmt: skip
def test_a_log_that_says_nothing_is_named(plain, tmp_path, log, words):
    shutil.copytree(plain, tmp_path / "b", symlinks=True)
    path = tmp_path / "b" / "flight-00000.log"
    kept = {"empty": b"", "cut": path.read_bytes()[:64]}.get(log)
    path.unlink()
    if kept is not None:
        path.write_bytes(kept)
    if log == "a folder":
        path.mkdir()
    found = named(plain, tmp_path / "b")
    assert (found["cause"], len(found["warnings"])) == ("nothing", 2 if log == "cut" else 1)
    assert words in found["warnings"][0]
    assert "step 1 is not used" in found["warnings"][-1] or log != "cut"


def test_a_flipped_bit_is_seen_in_the_state_of_its_step(plain, tmp_path):
    """Digests of the state at each step show it before any loss does."""
    train(tmp_path / "b", at_four=flip_a_bit)
    found = named(plain, tmp_path / "b")
    assert (found["step"], found["cause"], found["difference"]["components"]) == (4, "state", ["model"])


def test_a_flipped_bit_just_before_a_save_is_named_with_its_leaf(tmp_path):
    """One element of one tensor, and nothing that a step shows."""
    for name, flips in (("a", False), ("b", True)):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        torch.manual_seed(0)
        live = attach(model)
        with CheckpointManager(tmp_path / name, every=1, record=1) as manager:
            manager.restore(live)
            for step in (1, 2):
                if flips and step == 2:
                    model.weight.data.view(torch.int32)[1, 2] ^= 1 << 20
                live.advance(samples=1)
                manager.step(live)
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["cause"], found["names"]) == ("bit", ["model.params['weight']"])
    assert found["leaves"][0]["differing"] == 1


def square(seed):
    return torch.rand(300, 300, generator=torch.Generator().manual_seed(seed))


def total(x, threads):
    torch.set_num_threads(threads)
    return (x @ x).sum().item()


def test_a_number_of_threads_is_named_where_only_the_arithmetic_differs(tmp_path):
    before = torch.get_num_threads()
    try:
        x = next(
            (each for each in map(square, range(40)) if len({total(each, threads) for threads in (1, 2)}) == 2), None
        )
        if x is None:
            pytest.skip("this machine adds alike on one thread and on two")
        for name, threads in (("a", 1), ("b", 2)):
            torch.manual_seed(0)
            live = attach(torch.nn.Linear(1, 1))
            with CheckpointManager(tmp_path / name, every=1, record=0) as manager:
                manager.restore(live)
                live.record(loss=total(x, threads))
                live.advance(samples=1)
                manager.step(live)
    finally:
        torch.set_num_threads(before)
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"], found["names"]) == (1, "environment", ["environment.threads"])


@pytest.mark.parametrize(("planted", "cause", "rank"), [("bit", "arithmetic", None), ("batch", "batch", 1)])
def test_what_one_rank_did_otherwise_is_seen_in_the_step_that_all_ranks_did_otherwise(tmp_path, planted, cause, rank):
    """All have another loss then. A batch is in the log of its rank, which is named; a bit of its memory is in no log before: no rank is named."""

    def run(name, differs):
        def rank_of(ranks):
            model = torch.nn.Linear(2, 1)
            torch.nn.init.ones_(model.weight)
            torch.nn.init.ones_(model.bias)
            sgd = optimizer(torch.optim.SGD, lr=0.1)
            step = make_step(model, lambda model, x: Loss(model(x).square().sum(), len(x)), sgd, collectives=ranks)
            recorded = FlightLog(tmp_path / name, states_every=1, rank=ranks.rank).recorded(step)
            state = init_state(model, sgd, seed=0)
            for number in range(4):
                batch = torch.full((3, 2), float(number + ranks.rank))
                if differs and number == 2 and ranks.rank == 1:
                    changed = batch if planted == "batch" else state.model.params["weight"]
                    changed.view(torch.int32)[0, 1] ^= 1 << 12
                state, _ = recorded(state, batch)

        run_threads(2, rank_of)

    for name, differs in (("a", False), ("b", True)):
        (tmp_path / name).mkdir()
        run(name, differs)
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["cause"], found["rank"]) == (3, cause, rank)
    assert ("bit" in found["may_be"]) == (planted == "bit")


def test_where_a_fault_is_not_excluded_the_next_move_is_to_run_both_again(plain, tmp_path):
    train(tmp_path / "b", at_four=flip_a_bit, record=0)
    answer = bisect_runs(plain, tmp_path / "b", (), directory=tmp_path / "replay", patience_secs=60)
    assert "a fault of the memory" in answer.data["text"]
    assert "-- CMD {run}" in answer.error.fix


def test_two_runs_that_did_the_same_do_not_part(plain, tmp_path, capsys):
    train(tmp_path / "b")
    assert main(["bisect", str(plain), str(tmp_path / "b")]) == 0
    assert "nothing that is known differs" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["a flipped bit", "no record", "no log"])
def test_what_a_log_has_lost_is_named_and_does_not_count(plain, tmp_path, lost):
    """Neither a damaged line nor those that a power cut took say that the run did something else."""
    shutil.copytree(plain, tmp_path / "b", symlinks=True)
    log = tmp_path / "b" / "flight-00000.log"
    lines = log.read_bytes()
    at = 6 * 64  # the record of step 4, after three steps with a line for the state of each component
    while decode_line(lines[at : at + 64]) is None or decode_line(lines[at : at + 64]).step < 4:
        at += 64
    kept = {
        "a flipped bit": lines[:at] + b"\0" + lines[at + 1 :],
        "no record": lines[:at] + lines[at + 64 :],
        "no log": b"x" * 999,
    }
    log.write_bytes(kept[lost])
    found = named(plain, tmp_path / "b")
    assert (found["step"], found["cause"]) == (None, "nothing"), found["text"]
    words = {
        "a flipped bit": ["1 line cannot be read", "step 4 is not recorded in B"],
        "no record": ["step 4 is not recorded in B"],
        "no log": ["is not a flight log"],
    }
    assert len(found["warnings"]) == len(words[lost])
    assert all(word in each for word, each in zip(words[lost], found["warnings"], strict=True)), found["warnings"]


def test_steps_that_neither_log_has_are_said(plain, tmp_path):
    """Both disks lost them: what was done there is known of none, and no warning named them."""
    for name in "ab":
        shutil.copytree(plain, tmp_path / name, symlinks=True)
        log = tmp_path / name / "flight-00000.log"
        lines = log.read_bytes()
        kept = [
            lines[at : at + 64]
            for at in range(0, len(lines), 64)
            if decode_line(lines[at : at + 64]).step not in (4, 5)
        ]
        log.write_bytes(b"".join(kept))
    found = named(tmp_path / "a", tmp_path / "b")
    assert (found["step"], found["warnings"]) == (None, ["steps 4 to 5 are not recorded in A, nor in B"])


def test_a_difference_after_a_damaged_line_is_not_called_arithmetic(plain, tmp_path):
    """Another batch, whose record is lost, gives other losses after it."""
    train(tmp_path / "b", swaps=True, record=0)
    log = tmp_path / "b" / "flight-00000.log"
    flip(log, 2 * 64 + 9)
    found = named(plain, tmp_path / "b")
    assert (found["step"], found["cause"], found["names"]) == (3, "unrecorded", ["step 3"]), found["text"]


FAULT = ("    loss.backward()", "    if live.progress.step == 6 and not os.environ.get('TRAINFOLD_REHEARSAL'): loss = loss * 1.001\n    loss.backward()")  # fmt: skip
OWN = ("    loss.backward()", "    if live.progress.step == 6: loss = loss * 1.001\n    loss.backward()")


def test_a_replay_of_both_shows_which_of_them_does_not_repeat_itself(ran, replayed):
    """The second run had a fault in its seventh step; its program does again what the first one did."""
    command = [*ran("a")[:-1], "{run}"]
    ran("b", FAULT)
    code, found = replayed("bisect", "runs/a", "runs/b", command=command)
    fits_its_schema("bisect", found)
    assert (code, found["step"], found["cause"], found["names"]) == (3, 7, "fault", ["the second"])
    assert (found["repeats"], found["repeats_itself"]) == ([True, False], [True, False])


@pytest.mark.long
def test_a_program_that_ends_before_the_step_in_question_does_not_count_as_one_that_repeats(ran, replayed):
    """It excluded a fault of the memory, which was the cause."""
    ran("a")
    ran("b", FAULT)
    short = ran("short", ("    manager.step(live)", "    manager.step(live)\n    if live.progress.step == 5: break"))
    code, found = replayed("bisect", "runs/a", "runs/b", command=[*short[:-1], "{run}"])
    assert (code, found["repeats"], found["repeats_itself"]) == (3, [None, None], [None, None])
    assert found["reached"] == [5, 5]
    assert "bit" in found["may_be"]


@pytest.mark.long
def test_a_program_that_fails_again_in_the_step_in_question_counts_with_what_it_did(ran, replayed):
    """Where the second run had died of its fault, the answer that the logs give was lost, as its program fails again."""
    command = ran("a")
    other = ran("b", OWN, ("    manager.step(live)", "    if live.progress.step == 7 and os.environ.get('TRAINFOLD_REHEARSAL'): raise SystemExit('it died')\n    manager.step(live)"))  # fmt: skip
    code, found = replayed("bisect", "runs/a", "runs/b", "--program-b", shlex.join(map(str, other)), command=command)
    fits_its_schema("bisect", found)
    assert (code, found["step"], found["cause"]) == (3, 7, "arithmetic")
    assert (found["repeats_itself"], found["reached"]) == ([True, True], [7, 7])
    assert any("B failed after step 7" in each for each in found["warnings"]), found["warnings"]
    code, found = replayed("bisect", "runs/a", "runs/b", "--program-b", "false", command=command)
    assert found["error"]["kind"] == "ProgramFailed"


@pytest.mark.long
def test_a_run_of_another_program_that_repeats_itself_had_no_fault(ran, replayed):
    """The program of A does not do again what B did; B, whose own program does, had no fault."""
    command, other = ran("a"), ran("b", OWN)
    code, found = replayed("bisect", "runs/a", "runs/b", command=command)
    assert (code, found["repeats"], found["repeats_itself"]) == (3, [True, False], [True, None])
    for program in (
        ["--program-b", shlex.join(map(str, other))],
        ["--program-b", shlex.join([*map(str, other[:-1]), "{run}"])],
    ):
        code, found = replayed("bisect", "runs/a", "runs/b", *program, command=command)
        assert (code, found["cause"]) == (3, "arithmetic")
        assert (found["repeats"], found["repeats_itself"]) == ([True, False], [True, True])


def test_a_program_of_b_that_cannot_be_started_is_refused(tmp_path, replayed):
    for given in ("python 'a", "", "no-such-program"):
        code, _ = replayed("bisect", tmp_path, tmp_path, "--program-b", given)
        assert code == 2
