"""Another dtype is refused by name at every door that loads, and kept at every door that writes: values are rounded only where the caller asks for it."""

import json

import pytest
import torch
from safetensors.torch import save_file

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.ranks.in_process import ALONE
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.retention import decide_best, make_best_record, save_best
from trainfold.stores import MemoryStore
from trainfold.transforms import rename
from trainfold.weights import (
    Cast,
    CheckpointWeights,
    DcpDirectory,
    FirstRank,
    Frozen,
    HubDirectory,
    Renamed,
    ServedWeights,
    SeveralSources,
    TorchFile,
    Transformed,
    WeightServer,
    take_training,
    take_weights,
    torch_training,
    write_dcp_directory,
    write_hub_directory,
)


def network(dtype, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(dtype)


def run(dtype, seed, **more):
    model = network(dtype, seed)
    model[0].requires_grad_("weights" not in more)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trainfold.attach(model, sgd, **more), model, sgd


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same weights in float16, in every format that is read."""
    top = tmp_path_factory.mktemp("half")
    live, model, sgd = run(torch.float16, 7)
    live.advance(samples=1)
    store = trainfold.LocalStore(top / "run")
    with trainfold.CheckpointManager(store, every=1) as manager:
        manager.save(live)
        record, _ = decide_best(make_best_record(metric="loss", direction="min"), {"loss": 1.0}, step=1)
        save_best(store, record)
    state = live.capture()
    write_dcp_directory(top / "dcp", state)
    torch.save({"model": model.state_dict(), "optimizer": sgd.state_dict(), "step": 1}, top / "torch.pt")
    (top / "hub").mkdir()
    save_file(model.state_dict(), top / "hub" / "model.safetensors")
    return top


SOURCES = {
    "checkpoint": lambda top: CheckpointWeights(top / "run"),
    "hub": lambda top: HubDirectory(top / "hub"),
    "file": lambda top: HubDirectory(top / "hub" / "model.safetensors"),
    "dcp": lambda top: DcpDirectory(top / "dcp", prefix="model"),
    "torch": lambda top: TorchFile(top / "torch.pt", prefix="model"),
    "first rank": lambda top: FirstRank(CheckpointWeights(top / "run"), ALONE),
    "renamed": lambda top: Renamed(HubDirectory(top / "hub"), lambda name: name),
    "transformed": lambda top: Transformed(HubDirectory(top / "hub"), rename("{p*}", "{p*}")),
    "several": lambda top: SeveralSources([HubDirectory(top / "hub")]),
}


def restored(top, **options):
    live, model, _ = run(torch.float32, 1)
    with trainfold.CheckpointManager(options.pop("store", top / "run")) as manager:
        manager.restore(live, **options)
    return model


def taken(source, *, frozen=False):
    live, model, _ = run(torch.float32, 1, weights=Frozen(source) if frozen else source)
    live.take_weights()
    return model


def best(top):
    live, model, _ = run(torch.float32, 1)
    with trainfold.CheckpointManager(top / "run") as manager:
        manager.load_best(live)
    return model


def served(top):
    with WeightServer(HubDirectory(top / "hub"), token="a token of the test") as server:
        return taken(ServedWeights("127.0.0.1", server.port, token="a token of the test"))


DOORS = {
    "load": lambda top: trainfold.load(top / "run", like=run(torch.float32, 1)[0].capture()),
    "load of weights": lambda top: trainfold.load(top / "run", like=run(torch.float32, 1)[0].capture(), components=["model"]),
    "load with other names": lambda top: trainfold.load(top / "run", like=run(torch.float32, 1)[0].capture(), transform=rename("x", "y")),
    "restore": restored,
    "restore in place": lambda top: restored(top, in_place=True),
    "restore of a state": lambda top: run(torch.float32, 1)[0].restore(trainfold.load(top / "run", like=run(torch.float16, 2)[0].capture())),
    "best": best,
    "training": lambda top: take_training(run(torch.float32, 1)[0].capture(), torch_training(top / "torch.pt")),
    "server": served,
} | {
    f"{how}: {name}": (lambda top, source=source, door=door: door(source(top), top))
    for name, source in SOURCES.items()
    for how, door in {
        "take_weights": lambda source, _: take_weights(run(torch.float32, 1)[0].capture(), source),
        "attach": lambda source, _: taken(source),
        "frozen": lambda source, _: taken(source, frozen=True),
        "initial": lambda source, _: restored(_, store=MemoryStore(), initial=source),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_another_dtype_is_refused_by_name_at_every_door(half, door):
    """P20: the leaf, both dtypes and the next move are in the message."""
    with pytest.raises(TrainfoldError) as refused:
        DOORS[door](half)
    said = str(refused.value)
    assert "float16" in said
    assert "float32" in said
    assert "weight" in said
    assert "Cast(" in said or "policy=" in said or "build the state as it was" in said


def test_it_is_rounded_where_that_was_asked_for(half):
    """P20: by a policy, or by the source; and the plan says what is."""
    wanted = {name: each.to(torch.float32) if each.is_floating_point() else each for name, each in network(torch.float16, 7).state_dict().items()}  # fmt: skip
    live, model, _ = run(torch.float32, 1)
    with trainfold.CheckpointManager(half / "run", policy={"dtype": "adapt"}) as manager:
        manager.restore(live)
    assert all(torch.equal(each, wanted[name]) for name, each in model.state_dict().items())
    plan = trainfold.plan(half / "run", like=live.capture(), policy={"dtype": "adapt"})
    assert "cast" in str(plan)
    for source in (CheckpointWeights(half / "run"), HubDirectory(half / "hub")):
        found = taken(Cast(source))
        assert all(torch.equal(each, wanted[name]) for name, each in found.state_dict().items())


def test_a_resume_in_a_dtype_that_does_not_have_the_numbers_changes_nothing(tmp_path):
    """P20: they were infinite after it, without a word."""
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(70000.0)
    trainfold.save(trainfold.attach(model).capture(), tmp_path / "run")
    for in_place in (False, True):
        half = torch.nn.Linear(2, 2, bias=False, dtype=torch.float16)
        before = half.weight.detach().clone()
        with (
            trainfold.CheckpointManager(tmp_path / "run", policy={"dtype": "adapt"}) as manager,
            pytest.raises(
                InvalidState,
                match=r"weight.*up to 65504, found 4 of 4 beyond.*build the state in a dtype that has them",
            ),
        ):
            manager.restore(trainfold.attach(half), in_place=in_place)
        assert torch.equal(half.weight, before)


def test_every_door_that_writes_keeps_the_dtype_and_the_live_values(tmp_path):
    """P20: an export changes neither the model nor an integer; what the configuration says does not round."""
    live, model, _ = run(torch.float32, 1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = live.capture()
    trainfold.save(state, tmp_path / "run")
    write_hub_directory(state, tmp_path / "hub", config={"model_type": "x", "torch_dtype": "bfloat16"})
    write_dcp_directory(tmp_path / "dcp", state)
    for to in ("native", "hf", "dcp"):
        assert main(["convert", str(tmp_path / "run"), str(tmp_path / f"to_{to}"), "--to", to]) == 0
    sources = [CheckpointWeights(tmp_path / "run"), HubDirectory(tmp_path / "hub"), DcpDirectory(tmp_path / "dcp", prefix="model"),
               CheckpointWeights(tmp_path / "to_native"), HubDirectory(tmp_path / "to_hf"), DcpDirectory(tmp_path / "to_dcp", prefix="model")]  # fmt: skip
    for source in sources:
        assert {name: spec.dtype for name, spec in source.specs().items()} == {
            name: str(each.dtype).removeprefix("torch.") for name, each in before.items()
        }
        found = taken(source)
        assert all(torch.equal(each, before[name]) for name, each in found.state_dict().items())
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["torch_dtype"] == "float32"
    write_hub_directory(state, tmp_path / "rounded", dtype="bfloat16", config={"model_type": "x"})
    assert {spec.dtype for spec in HubDirectory(tmp_path / "rounded").specs().values()} == {
        "bfloat16",
        "float32",
        "int64",
    }
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_slots_of_an_optimizer_keep_the_dtype_that_they_were_saved_with():
    """K04, P20: moments of more precision than their parameters, which torch's own load rounds to these."""
    store = MemoryStore()
    live, model, sgd = run(torch.bfloat16, 1)
    value = 1 + 2**-20  # no number of bfloat16
    for parameter in model.parameters():
        sgd.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value, dtype=torch.float32)
    live.advance(samples=1)
    trainfold.save(live.capture(), store)
    again, _, sgd = run(torch.bfloat16, 2)
    with trainfold.CheckpointManager(store) as manager:
        manager.restore(again)
    found = [slots["momentum_buffer"] for slots in sgd.state.values()]
    assert len(found) == 4
    assert all(each.dtype == torch.float32 and (each == value).all() for each in found)
