"""One step in so many of an attached loop runs twice: what differs is found, and nothing else changes."""

import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest
import torch
from kit.adapters.manager.flight_cases import Recorded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainfold import attach, fingerprint
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.errors import IncompleteWindow, InvalidArgument, StepNotRepeated
from trainfold.ranks import run_threads
from trainfold.states import check_live_steps


class Checked(Recorded):
    """A run with AdamW, dropout, a schedule and an average, whose steps draw from three streams; gradients stay, and one parameter is tied."""

    def trained(self, every, steps=7, *, manager=None, spoil=None, keeps=False):
        calls = []

        def step(x, y):
            calls.append(1)
            noise = random.random() + torch.rand(()).item()
            x += noise  # to its batch
            loss = ((self.model(x) - y) ** 2).mean()
            loss.backward()
            if spoil is not None:
                spoil(self, len(calls))
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.optimizer.zero_grad(set_to_none=not keeps)
            return {"loss": loss.detach()}

        checked = step if every is None else check_live_steps(self.live, step, every=every)
        losses = []
        for x, y in self.live.batches(steps=steps):
            losses.append(checked(x, y)["loss"].item())
            self.live.advance(samples=len(x))
            if manager is not None:
                manager.step(self.live)
        return losses, fingerprint(self.live.capture()), len(calls)


@pytest.mark.parametrize(("every", "keeps"), [(1, False), (1, True), (3, False)])
def test_checked_steps_leave_the_bits_of_unchecked_ones(every, keeps):
    """Slots of the first step, streams, schedule, average, gradients that stay, the batch, the position: all as if it had run once."""
    plain, checked = Checked(0).trained(None, keeps=keeps), Checked(0).trained(every, keeps=keeps)
    assert checked[:2] == plain[:2]
    assert checked[2] == 7 + 7 // every


def test_a_check_beside_a_save_in_the_background_changes_no_checkpoint(tmp_path):
    """The second run begins by writing to memory that a save may still read."""
    found = []
    for every in (None, 1):
        with CheckpointManager(tmp_path / str(every), every=1, mode="async") as manager:
            job = Checked(0)
            manager.restore(job.live)
            job.trained(every, manager=manager)
            manager.drain()
            again = Checked(1)
            manager.load(again.live)
            found.append(fingerprint(again.live.capture()))
    assert found[0] == found[1]


def test_a_fault_of_one_run_is_named_with_its_leaf():
    """One bit of one gradient, in one of two runs."""

    @torch.no_grad()
    def spoil(job, call):
        if call == 6:
            job.model[2].weight.grad.view(torch.int32)[0, 1] ^= 1 << 20

    with pytest.raises(StepNotRepeated, match=r"step 4: .*model.params\['2.weight'\]"):
        Checked(0).trained(2, spoil=spoil)


def test_a_step_that_depends_on_what_is_not_attached_is_named():
    """It cannot be put back, so it runs on; that must not pass in silence."""
    kept = torch.zeros(1)

    @torch.no_grad()
    def spoil(job, _):
        kept.add_(1)
        job.model[0].bias.grad.add_(kept)

    with pytest.raises(StepNotRepeated, match="bias"):
        Checked(0).trained(2, spoil=spoil)


def test_a_step_that_changes_the_order_of_sums_runs_once(monkeypatch, caplog):
    """As the first one of a process under DDP on three ranks does (test_check_live_ddp.py); the second run would have other bits."""
    job = Checked(0)
    monkeypatch.setattr(type(job.live), "sums_change", property(lambda live: live.progress.step == 0))
    assert job.trained(1)[1:] == (Checked(0).trained(None)[1], 7 + 6)
    assert next(text for text in caplog.messages if "not checked" in text).startswith("step 1 is not checked")


def test_a_step_that_counts_itself_is_refused():
    model = torch.nn.Linear(1, 1)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="out of the step"):
        check_live_steps(live, lambda: live.advance(samples=1), every=1)()
    with pytest.raises(InvalidArgument, match="checks every step"):
        check_live_steps(live, lambda: None, every=0)


def test_a_check_counts_one_step_and_waits_for_what_a_save_still_reads():
    """Also where the step itself does not: a scaler that skips an update announces none."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live, waits = attach(model, optimizer), []
    live.before_writes = lambda: lambda: waits.append(1)
    check_live_steps(live, lambda: None, every=1)()
    assert waits == [1]
    check_live_steps(live, optimizer.step, every=1)()
    with pytest.raises(IncompleteWindow, match="1 of optimizer"):
        live.capture()


def test_a_window_of_several_batches_is_checked_batch_by_batch():
    """Gradients that a window has gathered are put back too."""
    found = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer, loader=torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))

        def step(x, *, is_last, model=model, optimizer=optimizer):
            model(x).square().sum().backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

        checked = step if every is None else check_live_steps(live, step, every=every)
        for number, x in enumerate(live.batches(epochs=1)):
            checked(x, is_last=number % 2 == 1)
            live.advance(steps=number % 2)
        found.append(fingerprint(live.capture()))
    assert found[0] == found[1]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_fault_in_the_gradients_of_an_open_window_is_found(sparse):
    """No state shows it before the optimizer steps, which is in another call."""
    model = torch.nn.Embedding(3, 1, sparse=sparse)
    live, calls = attach(model, torch.optim.SGD(model.parameters(), lr=0.1)), []

    def step(x):
        calls.append(1)
        model(x).sum().backward()
        if len(calls) == 2:
            model.weight.grad = model.weight.grad * 1.5

    with pytest.raises(StepNotRepeated, match=r"gradients\['weight'\]"):
        check_live_steps(live, step, every=1)(torch.tensor([0, 1]))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("every", "open_at"), [(1000, 1), (2, 2), (1, 1)])
def test_gradients_that_fsdp2_holds_back_are_refused(every, open_at):
    """They are in no `grad`, so they were neither put back nor compared: a healthy run ended with the advice to take a machine out. The first call finds it, too."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)

    def step(x, *, is_last=True):
        model.set_requires_gradient_sync(is_last)
        model(x).square().sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    checked = check_live_steps(live, step, every=every)
    for _ in range(open_at - 1):
        checked(torch.ones(1, 2))
        live.advance(samples=1)
    with pytest.raises(InvalidArgument, match=r"FSDP2 holds back.*all micro-batches of one optimizer step"):
        checked(torch.ones(1, 2), is_last=False)
    with pytest.raises(InvalidArgument, match="FSDP2 holds back"):  # the window is open
        check_live_steps(live, step, every=1)(torch.ones(1, 2))


@pytest.mark.usefixtures("process_group")
def test_a_window_of_fsdp2_within_one_step_is_checked():
    found = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        live = attach(model, optimizer)

        def step(*batches, model=model, optimizer=optimizer):
            for number, x in enumerate(batches):
                model.set_requires_gradient_sync(number == len(batches) - 1)
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        checked = step if every is None else check_live_steps(live, step, every=every)
        for _ in range(3):
            checked(torch.randn(2, 2), torch.randn(2, 2))
            live.advance(samples=4)
        found.append(fingerprint(live.capture()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("every", [1, 2])
def test_a_forward_of_ddp_without_a_backward_is_refused_where_a_window_begins_after_it(every):
    """DDP sums the first gradients of that window at once, and in a second run it would not: a healthy run ended."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)

    def step(*, sums, reports):
        with contextlib.nullcontext() if sums else model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        if sums:
            optimizer.step()
            optimizer.zero_grad()
        if reports:
            model(torch.ones(1, 2))

    checked = check_live_steps(live, step, every=every)
    for _ in range(2):
        checked(sums=True, reports=False)
        live.advance(samples=1)
        checked(sums=False, reports=False)
    checked(sums=True, reports=True)
    live.advance(samples=1)
    with pytest.raises(
        InvalidArgument, match=r"that ends with such a forward alone.*call the wrapper in torch\.no_grad"
    ):
        checked(sums=False, reports=False)


def test_ranks_hear_which_of_them_is_always_wrong():
    """A machine that is wrong in the same way each time repeats itself; its state is another one than that of the others."""
    built = [torch.nn.Linear(1, 1) for _ in range(3)]  # ranks that are threads share the streams of torch
    for each in built:
        torch.nn.init.ones_(each.weight)
        torch.nn.init.ones_(each.bias)

    def rank_of(ranks):
        model = built[ranks.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer)

        def step(x):
            model(x).sum().backward()
            if ranks.rank == 1:
                model.weight.grad += 1
            optimizer.step()
            optimizer.zero_grad()

        with pytest.raises(StepNotRepeated, match="another one on rank 1"):
            check_live_steps(live, step, every=1, collectives=ranks)(torch.ones(2, 1))

    run_threads(3, rank_of)


def test_ranks_may_have_statistics_of_their_own():
    """Between two forwards DistributedDataParallel leaves each rank the statistics of its own batch: a healthy run ended at its first check."""
    built = [torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)) for _ in range(2)]
    built[1].load_state_dict(built[0].state_dict())

    def rank_of(ranks):
        model = built[ranks.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer)

        def step(x):
            model(x).sum().backward()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)  # as summed over the ranks
            optimizer.step()

        check_live_steps(live, step, every=1, collectives=ranks)(torch.tensor([[0.0], [1.0 + ranks.rank]]))
        return model[0].running_mean.item()

    assert len({*run_threads(2, rank_of)}) == 2


@dataclasses.dataclass
class Output:
    """As models return it: the loss with its graph, numbers, and what has no bits."""

    loss: torch.Tensor
    numbers: np.ndarray
    other: object


@pytest.mark.parametrize("make", [dict, Output, lambda **named: tuple(named.values()), lambda **named: type("Sub", (dict,), {})(named)])  # fmt: skip
def test_results_of_any_kind_are_compared_by_their_tensors_arrays_and_numbers(make):
    """Graphs, arrays and own classes ended a run in its middle with errors of deepcopy and numpy."""
    model, runs = torch.nn.Linear(1, 1), []
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(spoiled):
        runs.append(1)
        loss = model(torch.ones(1, 1)).square().mean()
        return make(loss=loss, numbers=np.ones(3) * (len(runs) if spoiled else 1), other=object())

    check_live_steps(live, step, every=1)(False)
    with pytest.raises(StepNotRepeated, match="result"):
        check_live_steps(live, step, every=1)(True)


def test_an_argument_without_a_copy_is_named_at_the_first_step():
    """It would be found at the first check, which may come after hours."""
    model = torch.nn.Linear(1, 1)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="found lock as argument guard"):
        check_live_steps(live, lambda x, guard: None, every=1000)(torch.ones(1), guard=threading.Lock())


def test_a_step_of_one_micro_batch_is_not_called_a_fault_of_the_machine():
    """It counts its micro-batches itself, so the second run takes a step where the first took none."""
    model, calls = torch.nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)

    def step(x):
        calls.append(1)
        model(x).square().sum().backward()
        if len(calls) % 2 == 0:
            optimizer.step()

    with pytest.raises(InvalidArgument, match="found none, and then 1 of optimizer"):
        check_live_steps(live, step, every=1)(torch.ones(1, 1))
