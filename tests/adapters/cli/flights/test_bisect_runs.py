"""`trainfold bisect`: ten planted causes, each of which is named; and what is said where there is little to go by."""

import random
import shlex
import shutil

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema, flip
from kit.adapters.manager import replay_cases
from torch.utils.data import DataLoader, TensorDataset

from trainfold import CheckpointManager, Loss, attach, init_state, make_step, optimizer
from trainfold.adapters.cli import main
from trainfold.adapters.cli.flights.bisect_runs import bisect_runs
from trainfold.core.flight.log_lines import decode_line
from trainfold.ranks import run_threads
from trainfold.states import FlightLog

ran = replay_cases.ran
replayed = replay_cases.replayed
STEPS, EVERY = 9, 3
BACKWARDS = []


class Net(torch.nn.Module):
    """Layers with a running mean and dropout, and a sum that can be made in two orders."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        if len(BACKWARDS):
            return sum((h[:, at] * self.last.weight[0, at] for at in reversed(range(8))), self.last.bias[0])
        return self.last(h).squeeze(1)


class Swapped(TensorDataset):
    """Data of which two samples can change places."""

    def __init__(self, *tensors, swaps):
        super().__init__(*tensors)
        self.swaps = swaps

    def __getitem__(self, index):
        return super().__getitem__({17: 18, 18: 17}.get(index, index) if self.swaps else index)


def train(run, *, seed=0, lr=0.1, swaps=False, schedules=True, drops=True, at_four=None, loses_window=False, record=1):
    """Nine steps; ``at_four`` is called with the model after the fourth one."""
    torch.manual_seed(seed)
    random.seed(0)
    model, x = Net(), torch.linspace(-1, 1, 4 * 72).reshape(72, 4)
    model.drop.train(drops)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5) if schedules else None
    loader = DataLoader(Swapped(x, x.sum(1).sin(), swaps=swaps), batch_size=8)
    live = attach(model, sgd, scheduler=scheduler, loader=loader)
    with CheckpointManager(run, every=EVERY, record=record) as manager:
        manager.restore(live)
        for x, y in live.batches(epochs=2):
            loss = (model(x) - y).square().mean()
            if loses_window and live.progress.step == 4 and loss is not None:
                loses_window = False
                live.drop_window()
                continue
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            if scheduler is not None:
                scheduler.step()
            norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
            live.record(loss=loss, grad_norm=norm)
            if at_four is not None and live.progress.step == 3:
                at_four(model)
            live.advance(samples=len(x))
            manager.step(live)
            if live.progress.step == STEPS:
                break


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "a"
    train(run)
    return run


def named(plain, other, **options):
    answer = bisect_runs(plain, other, (), directory=other / "replay", patience_secs=60)
    fits_its_schema("bisect", {**answer.data, **options})
    return answer.data


@torch.no_grad()
def flip_a_bit(model):
    model.last.weight.view(torch.int32)[0, 3] ^= 1 << 12


@torch.no_grad()
def reset_mean(model):
    model.norm.running_mean.zero_()


def sum_backwards(model):
    BACKWARDS.append(model)


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
        with CheckpointManager(tmp_path / name, every=1) as manager:
            manager.restore(live)
            if flips:
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


@pytest.mark.parametrize(("planted", "cause", "rank"), [("bit", "arithmetic", 0), ("batch", "batch", 1)])
def test_what_one_rank_did_otherwise_is_seen_in_the_step_that_all_ranks_did_otherwise(tmp_path, planted, cause, rank):
    """All have another loss then. A batch is in the log of its rank, which is named; a bit of its memory is in no log before."""

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
        "a flipped bit": ["1 line cannot be read", "step 4 has no record in B"],
        "no record": ["step 4 has no record in B"],
        "no log": ["is not a flight log"],
    }
    assert len(found["warnings"]) == len(words[lost])
    assert all(word in each for word, each in zip(words[lost], found["warnings"], strict=True)), found["warnings"]


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
