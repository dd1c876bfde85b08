"""The optimizer of a pipeline in directories of torch's distributed checkpoints: by name, as torchtitan's pipelines save it, and the same whatever the stages were."""

import copy
from functools import cache

import pytest
import torch
from kit.backends import dcp_cases as cases
from kit.pipeline_stage import Stage
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainfold.adapters.live.attach import attach
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core.errors import InvalidState, RankFailed
from trainfold.weights import DcpDirectory, dcp_training, take_training, torch_training, write_dcp_directory

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 3
AS_TITAN = {"model": "", "optimizer": "optimizer"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(3, 4)
        self.h = nn.ModuleDict({str(index): nn.Linear(4, 4) for index in range(4)})
        self.norm = nn.BatchNorm1d(4)


@cache
def model_of(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


def parts_of(count, *, ranks=1, rank=0, seed=0):
    """The stages of a rank, each a part of the model with its names in the whole."""
    found = []
    for index in range(rank, count, ranks):
        model = copy.deepcopy(model_of(seed))
        for name in [name for name in model.h if int(name) * count // 4 != index]:
            del model.h[name]
        model.emb = None if index else model.emb
        model.norm = None if index < count - 1 else model.norm
        found.append(model)
    return found


def groups_of(parts):
    """Two groups, of which the second is empty where there is no norm."""
    named = [pair for part in parts for pair in part.named_parameters()]
    decayed, rest = ([value for name, value in named if ("norm" in name) is is_rest] for is_rest in (False, True))
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]


def trained(parts, optimizers, steps=range(STEPS)):
    """Steps whose gradients depend on the names alone."""
    for step in steps:
        for part in parts:
            for name, value in part.named_parameters():
                value.grad = torch.full_like(value, float(len(name) + step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def theirs(count, *, seed=0, steps=STEPS):
    """The parts of a program in the manner of torchtitan, each with its optimizer, and the state that it saves of all of them."""
    parts = parts_of(count, seed=seed)
    optimizers = [torch.optim.AdamW([each for each in groups_of([part]) if each["params"]], lr=0.1) for part in parts]
    trained(parts, optimizers, range(steps))
    model, optimizer = {}, {}
    for part, each in zip(parts, optimizers, strict=True):
        names, slots = get_state_dict(part, each, options=FLAT)
        model, optimizer = model | names, optimizer | slots
    return parts, optimizers, {**model, "optimizer": optimizer, "train_state": {"step": torch.tensor(steps)}}


def mine(world, count, *, seed=0, steps=STEPS, lr=0.1):
    """A live run of this library with the stages of a rank, and its objects."""
    parts = parts_of(count, ranks=world.world_size, rank=world.rank, seed=seed)
    optimizer = torch.optim.AdamW(groups_of(parts), lr=lr)
    trained(parts, [optimizer], range(steps))
    stages = [Stage(part, world.rank + at * world.world_size, count) for at, part in enumerate(parts)]
    live = attach(parts[0] if count == 1 else stages, optimizer)
    live.advance(samples=0)
    return live, parts, optimizer


def bits(parts, optimizers):
    """Every tensor of the parts, every slot, and the settings of each parameter."""
    found = {}
    for part in parts:
        found |= cases.all_bits(part.state_dict())
        for name, value in part.named_parameters():
            (optimizer,) = (each for each in optimizers if value in each.state)
            group = next(each for each in optimizer.param_groups if any(value is other for other in each["params"]))
            found |= cases.all_bits({f"{name} {slot}": each for slot, each in optimizer.state[value].items()})
            found[f"{name} settings"] = {key: each for key, each in group.items() if key != "params"}
    return found


def union(each_rank):
    return {name: value for found in each_rank for name, value in found.items()}


WANTED = bits(*theirs(1)[:2])


def written(path, ranks, count, **options):
    def write(world):
        live, parts, optimizer = mine(world, count)
        write_dcp_directory(path, live.capture(), collectives=world, **AS_TITAN, flatten_optimizer_state_dict=True, **options)  # fmt: skip
        return bits(parts, [optimizer])

    assert union(run_threads(ranks, write)) == WANTED


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 4), (1, 1)])
def test_what_stages_write_is_what_torchtitan_saves_and_its_load_finds_it_with_any_stages(ranks, count, tmp_path):
    """M24, I05: every key of the flat state, and no other; loaded by torch into the whole model, and into other stages."""
    written(tmp_path / "a", ranks, count, objects={"train_state": {"step": torch.tensor(STEPS)}})
    cases.save(tmp_path / "b", theirs(count)[-1])
    ours, titan = (DcpDirectory(tmp_path / name) for name in "ab")
    assert ours.specs() == titan.specs()
    assert ours.objects() == titan.objects() | {"step": 1}
    assert ours.metadata.paths == titan.metadata.paths | {"step": ("step",)}
    for other in (1, 2, 4):
        parts, optimizers, state = theirs(other, seed=9, steps=1)
        cases.load(tmp_path / "a", state)
        assert state["train_state"]["step"] == STEPS
        for part, optimizer in zip(parts, optimizers, strict=True):
            names = part.state_dict()
            set_state_dict(
                part, optimizer, model_state_dict={name: state[name] for name in names}, options=FLAT,
                optim_state_dict={name: each for name, each in state["optimizer"].items() if name.partition(".")[2].startswith(tuple(names))},
            )  # fmt: skip
        assert bits(parts, optimizers) == WANTED


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_flat", [True, False])
def test_stages_take_what_torch_has_saved_of_a_pipeline_or_of_the_whole_model(ranks, is_flat, tmp_path):
    """M24, I05: and a group without parameters on a stage has the settings that it has on the others, so that the next save finds one optimizer."""
    path = tmp_path / "theirs"
    if is_flat:
        cases.save(path, theirs(2)[-1])
        training = dcp_training(path, **AS_TITAN, step="train_state.step")
    else:
        (part,), (optimizer,), _ = theirs(1)
        model, slots = get_state_dict(part, optimizer)
        cases.save(path, {"model": model, "optim": slots, "step": STEPS})
        training = dcp_training(path)

    def take(world):
        live, parts, optimizer = mine(world, max(1, ranks), seed=9, steps=1, lr=0.7)
        live.restore(take_training(live.capture(), training, collectives=world), collectives=world)
        assert live.progress.step == STEPS
        write_dcp_directory(tmp_path / "again", live.capture(), collectives=world)
        return bits(parts, [optimizer])

    assert union(run_threads(ranks, take)) == WANTED
    assert DcpDirectory(tmp_path / "again").objects()["optim.param_groups.1.lr"] == 0.1 / 2**STEPS


def test_the_optimizer_of_stages_is_written_with_its_groups_too(tmp_path):
    """As `get_state_dict` has it of the whole model: by group, whose parameters are those of all stages."""

    def write(world):
        live, *_ = mine(world, 4)
        write_dcp_directory(tmp_path / "a", live.capture(), collectives=world)

    run_threads(2, write)
    (part,), (optimizer,), _ = theirs(1, seed=9, steps=1)
    model, slots = get_state_dict(part, optimizer)
    state = {"model": model, "optim": slots, "step": -1}
    cases.load(tmp_path / "a", state)
    set_state_dict(part, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert bits([part], [optimizer]) == WANTED


def failed(call):
    errors = [each.error for each in thread_outcomes(2, call, timeout_secs=5)]
    return next(each for each in errors if not isinstance(each, RankFailed))


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    """K09: a parameter that no stage has, one that was not saved, an optimizer by order, and groups that differ."""
    parts, (optimizer,), state = theirs(1)
    cases.save(tmp_path / "more", state | {"optimizer": state["optimizer"] | {"param_groups.other.w.lr": 0.1}})
    fewer = {name: each for name, each in state["optimizer"].items() if "h.3.weight" not in name}
    cases.save(tmp_path / "fewer", state | {"optimizer": fewer})
    torch.save({"model": parts[0].state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "order.pt")

    def take(training):
        def call(world):
            live, *_ = mine(world, 2, steps=1)
            take_training(live.capture(), training, collectives=world)

        return failed(call)

    for name, said in (("more", r"unexpected \['other.w'\]"), ("fewer", r"missing \['h.3.weight'\]")):
        with pytest.raises(InvalidState, match=said):
            raise take(dcp_training(tmp_path / name, **AS_TITAN))
    with pytest.raises(InvalidState, match=r"names of parameters, where each rank has some of them, .*in one process"):
        raise take(torch_training(tmp_path / "order.pt"))

    def write(world):
        live, _, optimizer = mine(world, 2)
        optimizer.param_groups[0]["lr"] += world.rank
        write_dcp_directory(tmp_path / "a", live.capture(), collectives=world)

    errors = [each.error for each in thread_outcomes(2, write, timeout_secs=5)]
    assert all("lr" in str(each) and "make the settings equal on all stages" in str(each) for each in errors)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_tensor_that_the_optimizer_has_in_several_places_is_there_for_each_of_them(is_flat, tmp_path):
    """Torch gives one learning rate to all groups, and asks for it under the key of each group, or of each parameter."""
    (part,) = parts_of(1)
    optimizer = torch.optim.AdamW(groups_of([part]), lr=torch.tensor(0.25))
    trained([part], [optimizer], range(1))
    optimizer.state[part.norm.weight]["step"] = optimizer.state[part.norm.bias]["step"]
    optimizer.state[part.norm.weight]["exp_avg"] = optimizer.state[part.norm.bias]["exp_avg"]
    write_dcp_directory(tmp_path / "a", attach(part, optimizer).capture(), flatten_optimizer_state_dict=is_flat)
    model, slots = get_state_dict(part, optimizer, options=FLAT if is_flat else None)
    cases.save(tmp_path / "b", {"model": model, "optim": slots, "step": 0})
    found, wanted = (cases.all_bits(cases.everything(DcpDirectory(tmp_path / name))) for name in "ab")
    assert found == wanted
