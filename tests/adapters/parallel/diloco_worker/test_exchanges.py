"""A worker of DiLoCo in a loop: what its checkpoints have, what is exchanged, and what is refused."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import trainfold
import trainfold.errors
from trainfold.backends.diloco.outer_client import OuterClient
from trainfold.construct import materialize, on_meta
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.slices import whole_box
from trainfold.core.weights.source import Wanted
from trainfold.diloco import DilocoServer, DilocoWorker, outer_state
from trainfold.properties.contracts import check_weight_source

TOKEN = "a token that both sides know"
PLAIN = trainfold.optimizer(torch.optim.SGD, lr=1.0)


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


@contextlib.contextmanager
def serving(model, **options):
    given = {"unit_samples": 4, "total_samples": 24, "optimizer": PLAIN, "grace_secs": 20.0}
    state = outer_state(model, optimizer=PLAIN)
    states = [state]
    with DilocoServer(state, token=TOKEN, **{**given, **options}) as server:
        thread = threading.Thread(target=lambda: states.extend(server.rounds()), daemon=True)
        thread.start()
        server.states = states
        yield server


def worker_of(server):
    return DilocoWorker("127.0.0.1", server.port, token=TOKEN, retry_secs=0.0)


def train(model, optimizer, position):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(position)).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_one_worker_with_one_step_a_round_is_the_inner_optimizer(inner):
    """Through the server and the wire: bit for bit."""
    alone = net()
    optimizer = inner(alone.parameters(), lr=0.1)
    for position in range(24):
        train(alone, optimizer, position)
    model = on_meta(net)
    optimizer = inner(model.parameters(), lr=0.1)
    materialize(model, "cpu")
    with serving(net(), unit_samples=1) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, weights=worker)
        live.take_weights()
        for unit in worker.units(live):
            train(model, optimizer, unit.start)
            live.advance(samples=1)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def test_a_checkpoint_of_a_worker_has_neither_weights_nor_data(tmp_path):
    """G09, J01, J05, B03: weights and position are the server's; the manifest says that the model was left out."""
    model = on_meta(net)
    optimizer = torch.optim.AdamW(model.parameters())
    plateau = trainfold.schedules.wsd(warmup_steps=2, decay_steps=0, decay="none")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plateau)
    materialize(model, "cpu")
    with serving(net()) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, scheduler=scheduler, weights=worker)
        with trainfold.CheckpointManager(tmp_path, every=1) as manager:
            manager.restore(live)
            assert all(torch.equal(a, b) for a, b in zip(net().parameters(), model.parameters(), strict=True))
            for unit in worker.units(live):
                train(model, optimizer, unit.start)
                scheduler.step()
                live.advance(samples=len(unit))
                manager.step(live)
    manifest = trainfold.plan(tmp_path, like=trainfold.select(live.capture(), ["trainer"])).manifest
    assert {each.name for each in manifest.components} == {"optimizer", "scheduler", "trainer", "rng"}
    assert "model" in manifest.omitted
    assert live.progress.samples == 24


def test_a_source_that_is_a_worker_keeps_the_contract():
    """J03."""
    model = net()
    with serving(model) as server:
        check_weight_source(lambda: worker_of(server), {name: each.detach() for name, each in model.named_parameters()})


def test_only_the_due_fragment_is_replaced():
    """The others go on from where the worker has trained them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = trainfold.optimizer(torch.optim.SGD, lr=0.5)
    state = outer_state(model, optimizer=half)
    with DilocoServer(state, token=TOKEN, unit_samples=4, total_samples=12, fragments=2, optimizer=half) as server:
        threading.Thread(target=lambda: list(server.rounds()), daemon=True).start()
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, weights=worker)
        live.take_weights()
        after = {}
        for unit in worker.units(live):
            for name, each in after.items():
                due = server.plan.due(worker.round - 1)
                assert torch.equal(each, dict(model.named_parameters())[name]) == (name not in due)
            train(model, optimizer, unit.start)
            live.advance(samples=4)
            after = {name: each.detach().clone() for name, each in model.named_parameters()}


def test_weights_in_bfloat16_are_those_of_the_server_rounded_once():
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serving(net()) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, weights=worker)
        for unit in worker.units(live):
            expected = server._state.model.params
            assert all(torch.equal(each, expected[name].bfloat16()) for name, each in model.named_parameters())
            train(model, optimizer, unit.start)
            live.advance(samples=4)
    assert server.states[-1].trainer.samples == 24


def test_a_buffer_that_training_changes_is_refused():
    """Each worker would have its own statistics, in silence; a constant buffer is served as it is."""

    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serving(build()) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, weights=worker)
        with pytest.raises(InvalidState, match=r"model\.buffers\['1\.running_mean'\]"):  # noqa: PT012
            for unit in worker.units(live):
                train(model, optimizer, unit.start)
                live.advance(samples=4)


def test_work_that_did_not_count_is_a_warning_once_and_a_count():
    """It was dropped in silence, and the worker took the weights of a later round."""
    model = net()
    with serving(net(), total_samples=12, grace_secs=0.1) as server:
        worker, quick = worker_of(server), OuterClient("127.0.0.1", server.port, token=TOKEN, secs=10.0, retry_secs=0.0)
        live = trainfold.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=worker)
        live.take_weights()
        wanted = {
            name: Wanted("float32", tuple(each.shape), whole_box(tuple(each.shape)))
            for name, each in model.named_parameters()
        }
        local = {name: each.detach().clone() for name, each in model.named_parameters()}

        def be_late():
            """Another worker sends in time, and the round ends without this one."""
            dict(quick.take(wanted))
            assert quick.send(quick.work(), local) is not None

        with pytest.warns(trainfold.errors.LateWork, match="samples 0 to 4, and.*grace_secs") as warned:  # noqa: PT031
            for turn, _ in enumerate(worker.units(live)):
                if turn < 2:
                    be_late()
        quick.close()
    assert len(warned) == 1
    assert worker.late_units == 2
    assert server.states[-1].trainer.samples == 12


def test_what_is_trained_here_and_not_there_is_refused():
    model = net()
    served = net()
    served[0].requires_grad_(False)
    with serving(served) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, torch.optim.SGD(model.parameters()), weights=worker)
        with pytest.raises(InvalidState, match=r"found 4; trained 0\.bias, 0\.weight only here"):
            next(worker.units(live))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_parameter_that_is_frozen_or_unfrozen_in_the_loop_is_refused(is_frozen):
    """Frozen, it was a KeyError; unfrozen, each worker trained it for itself in silence."""
    model, served = net(), net()
    for each in (model, served):
        each[0].requires_grad_(is_frozen)
    with serving(served) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, torch.optim.SGD(model.parameters()), weights=worker)
        live.take_weights()
        units = worker.units(live)
        next(units)
        model[0].requires_grad_(not is_frozen)
        with pytest.raises(
            InvalidState,
            match=rf"trained 0\.bias, 0\.weight only {'there' if is_frozen else 'here'}; .* leave requires_grad",
        ):
            next(units)


def test_a_run_that_takes_its_weights_from_elsewhere_is_refused():
    with serving(net()) as server, pytest.raises(InvalidArgument, match="weights=worker"):
        next(worker_of(server).units(trainfold.attach(net())))


def test_a_loop_that_is_left_in_a_unit_and_entered_again_trains_on_no_sample_twice():
    """G09: the second loop went on from weights that had half of the unit already, and the server counted the whole unit."""
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for position in range(4):
        train(alone, optimizer, position)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serving(net(), total_samples=4) as server:
        worker = worker_of(server)
        live = trainfold.attach(model, optimizer, weights=worker)
        live.take_weights()
        for unit in worker.units(live):
            train(model, optimizer, unit.start)
            live.advance(samples=1)
            break
        for unit in worker.units(live):
            for position in unit.positions:
                train(model, optimizer, position)
                live.advance(samples=1)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
