"""Model, optimizer and step of other programs' checkpoints: a run goes on as the program would have, and what does not fit is refused with nothing taken."""

from contextlib import nullcontext

import pytest
import torch
from kit.backends import dcp_cases as cases
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import trainfold
from trainfold.core.errors import CheckpointForeign, CheckpointMissing, InvalidArgument, InvalidState
from trainfold.weights import accelerate_training, dcp_training, lightning_training, take_training, torch_training

BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(number)) for number in range(6)]
STEPS = 3


def build(kind=torch.optim.AdamW, *, lr=0.01):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    params = [
        {"params": list(model[0].parameters()), "weight_decay": 0.1},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    optimizer = kind(params, lr=lr, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(model, optimizer, scheduler, batches):
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


class Position:
    """Of another program. It is not read."""


def write_dcp(path, model, optimizer, scheduler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    cases.save(path, {"model": model_state, "optim": optimizer_state, "step": STEPS, "data": {"at": Position()}})
    return dcp_training(path)


def write_titan(path, model, optimizer, scheduler):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    train_state = {"step": torch.tensor(STEPS, dtype=torch.int32), "seen": torch.tensor(12)}
    cases.save(
        path,
        {
            **model_state,
            "optimizer": optimizer_state,
            "train_state": train_state,
            "lr_scheduler": scheduler.state_dict(),
        },
    )
    return dcp_training(path, model="", optimizer="optimizer", step="train_state.step")


def write_torch(path, model, optimizer, scheduler):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": STEPS,
            "args": {"lr": 1},
        },
        path,
    )
    return torch_training(path)


def write_lightning(path, model, optimizer, scheduler):
    """As `Trainer.save_checkpoint` of Lightning 2 lays it out."""
    names = {f"net.{name}": each for name, each in model.state_dict().items()} | {"loss.weight": torch.ones(2)}
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}
    torch.save({
        "epoch": 0, "global_step": STEPS, "pytorch-lightning_version": "2.5.5", "state_dict": names, "loops": loops,
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "kth_value": None}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()], "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.01},
    }, path)  # fmt: skip
    return lightning_training(path, module="net")


def write_accelerate(path, model, optimizer, scheduler):
    """As `Accelerator.save_state(safe_serialization=False)` lays it out."""
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save(scheduler.state_dict(), path / "scheduler.bin")
    (path / "random_states_0.pkl").write_bytes(b"cos\nsystem\n")  # is not opened
    return accelerate_training(path)


WRITERS = [write_dcp, write_titan, write_torch, write_lightning, write_accelerate]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("write", WRITERS)
def test_a_run_goes_on_as_the_other_program_would_have(write, kind, tmp_path):
    """M24: bit for bit, with an optimizer that was fresh, or had stepped elsewhere; hyperparameters are those that were saved."""
    saved = train(*build(kind), BATCHES[:STEPS])
    if kind is torch.optim.SGD and write is write_accelerate:
        training = write(tmp_path / "saved", *saved)
        assert training.step is None  # nothing in it counts
    else:
        training = write(tmp_path / "saved", *saved)
        assert training.step == STEPS
    other = build(kind, lr=0.7)
    if kind is torch.optim.AdamW:
        train(*other, BATCHES[4:])
    model, optimizer, scheduler = other
    live = trainfold.attach(model, optimizer, scheduler=scheduler)
    live.restore(take_training(live.capture(), training))
    if training.scheduler is None:
        scheduler.load_state_dict(saved[2].state_dict())
    assert live.progress.step == (training.step or 0)
    assert cases.all_bits(model.state_dict()) == cases.all_bits(saved[0].state_dict())
    for batch in BATCHES[STEPS:]:
        train(*saved, [batch])
        train(*other, [batch])
    assert cases.all_bits(model.state_dict()) == cases.all_bits(saved[0].state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in saved[1].param_groups]


def test_a_pure_state_takes_it_too(tmp_path):
    """M24: `init_state` has an optimizer by name."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), BATCHES[:STEPS])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    cases.save(tmp_path, {"model": model_state, "optim": optimizer_state, "step": STEPS})
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.5)
    state = take_training(trainfold.init_state(torch.nn.Linear(3, 1), adamw, seed=1), dcp_training(tmp_path))
    step = trainfold.make_step(model, lambda model, x: trainfold.Loss(model(x["x"]).square().sum(), 4), adamw)
    state, _ = step(state, {"x": BATCHES[4]})
    model(BATCHES[4]).square().sum().div(4).backward()
    optimizer.step()
    assert state.trainer.step == STEPS + 1
    assert cases.all_bits(dict(state.model.params)) == cases.all_bits(dict(model.named_parameters()))


def test_what_is_taken_and_what_is_not_is_printed(tmp_path):
    training = write_lightning(tmp_path / "a.ckpt", *train(*build(), BATCHES[:STEPS]))
    assert str(training).replace(str(tmp_path), "") == (
        "/a.ckpt:\n"
        "  model      9 tensors\n"
        "  optimizer  18 values of 6 parameters, by order\n"
        "  step       3\n"
        "  scheduler  its state_dict\n"
        "  not taken  epoch: it is of the other program; what it says cannot be checked here\n"
        "  not taken  pytorch-lightning_version: it is of the other program; what it says cannot be checked here\n"
        "  not taken  loops: it is of the other program; what it says cannot be checked here\n"
        "  not taken  callbacks: it is of the other program; what it says cannot be checked here\n"
        "  not taken  hparams_name: it is of the other program; what it says cannot be checked here\n"
        "  not taken  hyper_parameters: it is of the other program; what it says cannot be checked here"
    )
    titan = write_titan(tmp_path / "titan", *train(*build(), BATCHES[:STEPS]))
    assert "scheduler  its state_dict" in str(titan)
    assert "model      9 tensors" in str(
        titan
    )  # not those of the optimizer and of train_state, which are at the top too
    flat = {**build()[0].state_dict(), "optimizer": train(*build(), BATCHES[:1])[1].state_dict()}
    torch.save(flat, tmp_path / "flat.pt")
    assert "model      9 tensors" in str(torch_training(tmp_path / "flat.pt", model=""))
    assert titan.scheduler.keys() == build()[2].state_dict().keys()
    other = {
        "model": {"w": torch.ones(1)},
        "optim": {"param_groups": [{"params": ["w"]}]},
        "lr_scheduler": {"at": 3, "own": Position()},
    }
    cases.save(tmp_path / "own", other)
    assert "not taken  lr_scheduler: lr_scheduler.own has" in str(dcp_training(tmp_path / "own"))
    accelerate = write_accelerate(tmp_path / "b", *train(*build(), BATCHES[:STEPS]))
    assert "not taken  random_states_0.pkl" in str(accelerate)


def other_order(model):
    return torch.optim.AdamW(
        [{"params": list(model[1].parameters())}, {"params": [*model[0].parameters(), *model[2].parameters()]}]
    )


def fewer(model):
    return torch.optim.AdamW([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}])


def one_group(model):
    return torch.optim.AdamW(model.parameters())


def another_class(model):
    first, *rest = model
    return torch.optim.SGD(
        [{"params": first.parameters()}, {"params": [each for layer in rest for each in layer.parameters()]}],
        lr=0.1,
        momentum=0.9,
    )


def other_shapes(model):
    first = list(model[0].parameters())
    return torch.optim.AdamW([{"params": first[::-1]}, {"params": [*model[1].parameters(), *model[2].parameters()]}])


@pytest.mark.parametrize(
    ("write", "make", "said"),
    [
        (write_torch, other_shapes, r"0\.bias\.exp_avg: expected the shape \[4\] of its parameter, or one number, found \[4, 3\]"),
        (write_torch, one_group, r"expected groups of \[6\] parameters, as here, found groups of \[2, 4\]"),
        (write_torch, fewer, r"expected groups of \[2, 2\] parameters"),
        (write_dcp, fewer, r"expected the 4 parameters .* found 6 .*unexpected \['1\.weight', '1\.bias'\]"),
        (write_dcp, one_group, r"expected the weight_decay of 0\.weight, which is in the same group here, found \[0\.01\]"),
        (write_titan, one_group, r"expected the weight_decay of 0\.weight, which is in the same group here"),
        (write_torch, another_class, r"expected one with the hyperparameters of the optimizer here: .*momentum.*found also amsgrad, betas, eps in"),
        (write_dcp, another_class, r"found also amsgrad, betas, eps in .*make the optimizer of the class that saved"),
        (write_titan, another_class, r"found also amsgrad, betas, eps in"),
        (write_dcp, other_order, r"which is in the same group here"),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_is_refused_and_nothing_is_taken(write, make, said, tmp_path):
    """M24: by the reason."""
    training = write(tmp_path / "saved", *train(*build(), BATCHES[:STEPS]))
    model, _, _ = build()
    live = trainfold.attach(model, make(model))
    state = live.capture()
    with pytest.raises(InvalidState, match=said):
        take_training(state, training)
    assert live.progress.step == 0


def test_the_order_of_groups_does_not_matter_where_parameters_have_names(tmp_path):
    """By name, another order of parameters in a group is the same optimizer."""
    saved = train(*build(), BATCHES[:STEPS])
    training = write_dcp(tmp_path / "saved", *saved)
    model, _, _ = build()
    others = [*model[2].parameters(), *model[1].parameters()]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": list(model[0].parameters()), "weight_decay": 0.5}])
    live = trainfold.attach(model, optimizer)
    live.restore(take_training(live.capture(), training))
    assert optimizer.param_groups[1]["weight_decay"] == 0.1
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"], saved[1].state[saved[0][2].weight]["exp_avg"])


def test_a_checkpoint_without_what_is_named_is_refused(tmp_path):
    saved = train(*build(), BATCHES[:STEPS])
    write_dcp(tmp_path / "a", *saved)
    with pytest.raises(
        InvalidArgument,
        match=r"optimizer: expected keys of .*, found 'optimizer'; at the top there are data, model, optim, step",
    ):
        dcp_training(tmp_path / "a", optimizer="optimizer")
    write_torch(tmp_path / "b", *saved)
    with pytest.raises(InvalidArgument, match="found 'optim'"):
        torch_training(tmp_path / "b", optimizer="optim")
    with pytest.raises(CheckpointForeign, match="optimizer_states of one optimizer, found none"):
        lightning_training(tmp_path / "b")
    with pytest.raises(CheckpointForeign, match=r"accelerate's save_state, found a directory of torch.distributed"):
        accelerate_training(tmp_path / "a")
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointMissing, match=r"a directory with optimizer\.bin"):
        accelerate_training(tmp_path / "c")


def test_what_is_of_a_second_model_or_scheduler_is_named(tmp_path):
    """Programs with two have numbered names for the second: its tensors were read as those of the first, and its schedule dropped without a word."""
    model, optimizer, scheduler = train(*build(), BATCHES[:STEPS])
    specs = write_accelerate(tmp_path / "a", model, optimizer, scheduler).model.specs()
    (tmp_path / "a" / "pytorch_model.bin").unlink()
    save_file(model.state_dict(), tmp_path / "a" / "model.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "a" / "model_1.safetensors")
    for name in ("optimizer_1.bin", "scheduler_1.bin"):
        (tmp_path / "a" / name).write_bytes(b"")
    both = accelerate_training(tmp_path / "a")
    assert both.model.specs() == specs
    assert {name for name, _ in both.left_out} == {"model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin", "random_states_0.pkl"}  # fmt: skip
    write_lightning(tmp_path / "b", model, optimizer, scheduler)
    saved = torch.load(tmp_path / "b", weights_only=False)
    torch.save({**saved, "lr_schedulers": saved["lr_schedulers"] * 2}, tmp_path / "b")
    assert "lr_schedulers.1" in dict(lightning_training(tmp_path / "b").left_out)


def test_a_scheduler_that_is_no_dict_is_named(tmp_path):
    """K09: it was neither taken nor listed."""
    saved = train(*build(), BATCHES[:STEPS])
    write_accelerate(tmp_path / "a", *saved)
    for value in ([saved[2].state_dict()], None, torch.ones(2)):
        torch.save(value, tmp_path / "a" / "scheduler.bin")
        training = accelerate_training(tmp_path / "a")
        assert training.scheduler is None
        assert "scheduler.bin" in dict(training.left_out)
        model, optimizer, scheduler = build()
        state = trainfold.attach(model, optimizer, scheduler=scheduler).capture()
        with pytest.warns(
            UserWarning, match=r"the scheduler here stays as it is: of scheduler.bin, it is not the state_dict\(\)"
        ):
            take_training(state, training)
        take_training(state.evolve(scheduler=None), training)
    torch.save({"model": saved[0].state_dict(), "optimizer": saved[1].state_dict(), "scheduler": [1]}, tmp_path / "b")
    assert "scheduler" in dict(torch_training(tmp_path / "b").left_out)


def test_slots_that_are_no_tensors_are_taken(tmp_path):
    """M24: SGD without momentum kept a None for each parameter, and older optimizers a number of steps."""
    model, optimizer, scheduler = build(torch.optim.SGD)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    saved = optimizer.state_dict() | {"state": {number: {"momentum_buffer": None, "step": 3} for number in range(6)}}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "a")
    names, state = [], {}
    for name, _ in model.named_parameters():
        names.append(name)
        state[name] = {"momentum_buffer": None, "step": 3}
    groups = [
        group | {"params": names[:2] if number == 0 else names[2:]}
        for number, group in enumerate(saved["param_groups"])
    ]
    cases.save(tmp_path / "b", {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}})
    for training in (torch_training(tmp_path / "a"), dcp_training(tmp_path / "b")):
        found = take_training(trainfold.attach(model, optimizer, scheduler=scheduler).capture(), training)
        assert found.optimizer.slots == {name: {"step": 3} for name in state}  # what is None is left out


@pytest.mark.parametrize("write", [write_dcp, write_titan, write_torch])
def test_tensors_that_the_model_has_not_are_named(write, tmp_path):
    """V10: a head that was saved and is not here; nothing is said of the optimizer's tensors."""
    model, optimizer, scheduler = train(*build(), BATCHES[:STEPS])
    model[1].register_buffer("head", torch.ones(2))
    training = write(tmp_path / "saved", model, optimizer, scheduler)
    model, optimizer, scheduler = build()
    state = trainfold.attach(model, optimizer, scheduler=scheduler).capture()
    with pytest.warns(UserWarning, match=r"the model here has no 1.head: 1 tensors that were saved are not taken"):
        take_training(state, training)


class Encoder(torch.nn.Module):
    """Has a module under the name that DDP gives to what it wraps."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("write", [write_dcp, write_titan, write_torch])
def test_a_module_of_the_users_that_has_the_name_of_a_wrapper_keeps_it(write, tmp_path):
    """B11, L01: model and optimizer are found under `0.module.weight`, and not under `0.weight`."""
    model = torch.nn.Sequential(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, scheduler, BATCHES[:STEPS])
    training = write(tmp_path / "theirs", model, optimizer, scheduler)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    is_left = training.scheduler is not None
    with pytest.warns(UserWarning, match="the scheduler that was saved is not taken") if is_left else nullcontext():
        state = take_training(trainfold.init_state(torch.nn.Sequential(Encoder()), adamw, seed=0), training)
    assert {*state.model.params} == {*state.optimizer.slots} == {"0.module.weight", "0.module.bias"}
    for name, parameter in model.named_parameters():
        assert torch.equal(state.model.params[name], parameter)
        assert torch.equal(state.optimizer.slots[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize(
    ("value", "found", "fix"),
    [
        (None, "NoneType", "take the model alone"),
        ("adam", "str", "take the model alone"),
        ([{"state": {}, "param_groups": []}] * 2, "list", "optimizer='optimizer.0'"),
        ({"state": {}, "param_groups": None}, "param_groups", "take the model alone"),
        ({"state": {}, "param_groups": [None]}, "param_groups", "take the model alone"),
        ({"state": {}, "param_groups": [{"params": 3}]}, "param_groups", "take the model alone"),
    ],
)
def test_what_is_no_state_dict_of_one_optimizer_is_refused_by_name(value, found, fix, tmp_path):
    """K09: None, several optimizers, and groups of another form were errors of Python."""
    torch.save({"model": {"weight": torch.ones(2)}, "optimizer": value, "step": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointForeign, match=found) as refused:
        torch_training(tmp_path / "x.pt")
    assert fix in refused.value.fix
