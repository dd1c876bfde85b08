"""Sources of weights keep their contract, read no more than they have to, and refuse what is not sound."""

import json
import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from kit.adapters.fsdp2_cases import sharded, whole
from safetensors.torch import save_file

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointHostile,
    CheckpointMissing,
    InvalidArgument,
    InvalidState,
    TrainfoldError,
)
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.core.weights.source import Wanted
from trainfold.core.weights.wrapped import Cast, Frozen, Renamed
from trainfold.properties.contracts import ContractBroken, check_weight_source
from trainfold.ranks import SingleProcess
from trainfold.weights import (
    ByScript,
    DcpDirectory,
    FirstRank,
    LoadSpec,
    SeveralSources,
    TorchFile,
    accelerate_training,
    dcp_training,
)

TENSORS = {
    "h.weight": torch.arange(24.0).view(6, 4),
    "h.bias": torch.tensor([1.0, float("nan"), -0.0]).bfloat16(),
    "empty": torch.empty(0, 3),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


def hub(folder, *, files=1):
    folder.mkdir(exist_ok=True)
    parts = [dict(list(TENSORS.items())[number::files]) for number in range(files)]
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    if files > 1:
        where = {name: f"model-{number}.safetensors" for number, part in enumerate(parts) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def run(step=3):
    store = MemoryStore()
    floats = {name: each for name, each in TENSORS.items() if each.is_floating_point()}
    others = {name: each for name, each in TENSORS.items() if name not in floats}
    save(TrainState(model=ModelState(Leaves(floats), Leaves(others)), trainer=Progress(step=step)), store)
    return store


def test_each_source_keeps_the_contract(tmp_path):
    """J01: whatever it reads from."""
    check_weight_source(lambda: CheckpointWeights(run()), TENSORS)
    check_weight_source(lambda: HubDirectory(hub(tmp_path / "one")), TENSORS)
    check_weight_source(lambda: HubDirectory(hub(tmp_path / "two", files=2)), TENSORS)
    check_weight_source(lambda: FirstRank(CheckpointWeights(run()), SingleProcess()), TENSORS)
    check_weight_source(lambda: Cast(CheckpointWeights(run())), TENSORS)
    prefixed = {f"module.{name}": each for name, each in TENSORS.items()}
    check_weight_source(lambda: Renamed(CheckpointWeights(run()), lambda name: name.removeprefix("module.")), prefixed)


def test_empty_tensors_of_a_file_have_one_order(tmp_path):
    """The library gives them in an order of chance, and a conversion that was killed is known by its header."""
    save_file({name: torch.empty(0, 2) for name in "fbdaec"} | {"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(HubDirectory(tmp_path).specs()) in (list("abcdefw"), list("wabcdef"))


def test_two_tensors_with_one_name_are_refused():
    """J03: one of them would get the values of the other."""
    source = Renamed(CheckpointWeights(run()), lambda name: name[-6:])
    wanted = {name: Wanted("float32", (1,), ((0, 1),)) for name in ("a.weight", "b.weight")}
    with pytest.raises(InvalidArgument, match=r"'weight' for 'a\.weight' and 'b\.weight'"):
        list(source.supply(wanted))


def test_the_contract_finds_a_source_that_breaks_it():
    """A suite that cannot fail proves nothing."""

    class Twice:
        def supply(self, wanted):
            for name in wanted:
                if name in TENSORS:
                    yield name, TENSORS[name]
                    yield name, TENSORS[name]

    class All:
        def supply(self, wanted):
            yield from TENSORS.items()

    class FirstHalf:
        def supply(self, wanted):
            for name, each in wanted.items():
                if name in TENSORS:
                    sizes = [stop - start for start, stop in each.box]
                    yield name, TENSORS[name][tuple(slice(0, size) for size in sizes)]

    class Once:
        left = 1

        def supply(self, wanted):
            Once.left -= 1
            yield from [(name, TENSORS[name]) for name in wanted if name in TENSORS and Once.left >= 0]

    for broken, said in (
        (Twice, "came twice"),
        (All, "not asked for"),
        (FirstHalf, "other bits"),
        (Once, "asked again"),
    ):
        with pytest.raises(ContractBroken, match=said):
            check_weight_source(broken, TENSORS)


class Counting(MemoryStore):
    """Counts the bytes of tensors that are read."""

    read_bytes = 0

    def read_into(self, name, buffer, *arguments, **keywords):
        self.read_bytes += len(buffer) * name.endswith(".safetensors")
        return super().read_into(name, buffer, *arguments, **keywords)


def test_a_rank_reads_its_part_of_a_checkpoint_and_no_more():
    """I06: no rank reads or holds the whole model. One megabyte is verified at once."""
    store = Counting()
    large = torch.arange(2.0**21).view(-1, 1024)  # 8 MiB
    save(
        TrainState(model=ModelState(Leaves({"w": large, "v": large.clone()}), Leaves()), trainer=Progress(step=1)),
        store,
    )
    store.read_bytes = 0
    rows = (512, 1024)
    ((name, part),) = CheckpointWeights(store).supply({"w": Wanted("float32", (2048, 1024), (rows, (0, 1024)))})
    assert name == "w"
    assert torch.equal(part, large[slice(*rows)])
    assert store.read_bytes <= part.nbytes + (2 << 20)


def test_the_newest_checkpoint_with_the_component_is_taken_or_the_step_that_was_named():
    """B03, C05: one without its model is passed over."""
    store = run(3)
    model = ModelState(Leaves({"w": torch.ones(2)}), Leaves())
    whole_state = TrainState(model=model, trainer=Progress(step=4), extra={"ema": {"w": torch.zeros(2)}})
    save(whole_state, store)
    save(whole_state.evolve(trainer=Progress(step=5)), store, components=["trainer", "ema"])
    wanted = {"w": Wanted("float32", (2,), ((0, 2),))}
    assert dict(CheckpointWeights(store).supply(wanted))["w"].tolist() == [1, 1]
    assert dict(CheckpointWeights(store, component="ema").supply(wanted))["w"].tolist() == [0, 0]
    assert dict(CheckpointWeights(store, step=3).supply(wanted)) == {}
    with pytest.raises(InvalidState, match="one with trainer, ema"):
        list(CheckpointWeights(store, step=5).supply(wanted))
    with pytest.raises(CheckpointMissing, match="a checkpoint of this step"):
        list(CheckpointWeights(store, step=9).supply(wanted))
    with pytest.raises(CheckpointMissing, match="expected a run, found nothing"):
        list(CheckpointWeights(MemoryStore()).supply(wanted))


def test_a_directory_of_a_hub_is_confined_to_its_own_files(tmp_path):
    """U02: nothing outside it is opened, and no pickle."""
    folder = hub(tmp_path / "hub", files=2)
    index = folder / "model.safetensors.index.json"
    wanted = {"h.weight": Wanted("float32", (6, 4), ((0, 6), (0, 4)))}
    for name in ("../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "a\0b", 3):
        index.write_text(json.dumps({"weight_map": {"h.weight": name}}))
        with pytest.raises(CheckpointHostile, match="names of files in its directory"):
            list(HubDirectory(folder).supply(wanted))
    index.write_text(json.dumps({"weight_map": {"h.weight": "model-1.safetensors"}}))
    with pytest.raises(CheckpointDamaged, match=r"the tensor h\.weight"):
        list(HubDirectory(folder).supply(wanted))
    every = dict.fromkeys(HubDirectory(folder / "model-0.safetensors").specs(), "model-0.safetensors")
    left = every.popitem()[0]
    index.write_text(json.dumps({"weight_map": every}))
    with pytest.raises(CheckpointDamaged, match=f"found {left}"):
        HubDirectory(folder).specs()
    index.unlink()
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"h.weight": "model-0.safetensors"}}))
    index.symlink_to("../index.json")
    with pytest.raises(CheckpointHostile, match="found a link to"):
        list(HubDirectory(folder).supply(wanted))
    index.unlink()
    (folder / "model-1.safetensors").unlink()
    os.mkfifo(folder / "model-1.safetensors")
    with pytest.raises(CheckpointHostile, match="a pipe, a socket or a device"):
        list(HubDirectory(folder).supply(wanted))
    empty = tmp_path / "pickles"
    empty.mkdir()
    torch.save(TENSORS, empty / "pytorch_model.bin")
    with pytest.raises(CheckpointMissing, match="save_pretrained"):
        list(HubDirectory(empty).supply(wanted))


INDEX = json.dumps({"weight_map": {"wé": "model.safetensors"}}, ensure_ascii=False)


@pytest.mark.parametrize(
    "text", [b"[]", b'{"weight_map": null}', INDEX[:-4].encode(), INDEX.encode("latin-1"), b"[" * 9999, b""]
)
def test_an_index_that_was_not_copied_whole_is_to_be_downloaded_again(tmp_path, text):
    """K09: there is no older one to fall back to. Names may have letters of all languages."""
    save_file({"wé": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(INDEX, encoding="utf-8")
    assert list(HubDirectory(tmp_path).specs()) == ["wé"]
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(
        CheckpointDamaged, match=r"index\.json: expected an object with a weight_map.*download it again"
    ):
        HubDirectory(tmp_path).specs()


def test_a_second_copy_under_other_names_is_not_read_beside_the_first(tmp_path):
    """K09: some directories have the weights for the code of their authors too; alone these are read."""
    save_file({"x": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert list(HubDirectory(tmp_path).specs()) == ["x"]
    save_file({"model.x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(HubDirectory(tmp_path).specs()) == ["model.x"]


@pytest.mark.parametrize("named", ["embed", "head", "both", "tied", "tied the other way"])
def test_a_tied_tensor_of_a_checkpoint_has_all_of_its_names(named):
    """B19, P23: a stage that has one end of a model alone wants it under a name that no file has; nothing was supplied."""
    model, store = (
        torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)}),
        MemoryStore(),
    )
    model["head"].weight = model["embed"].weight
    save(attach(model).capture(), store)
    whole, half = ((0, 3), (0, 2)), ((1, 3), (0, 2))
    wanted = {
        "embed": {"embed.weight": Wanted("float32", (3, 2), whole)},
        "head": {"head.weight": Wanted("float32", (3, 2), half)},
        "both": {"embed.weight": Wanted("float32", (3, 2), whole), "head.weight": Wanted("float32", (3, 2), half)},
        "tied": {"embed.weight": Wanted("float32", (3, 2), whole), "head.weight": Wanted("float32", (3, 2), whole, "embed.weight")},
        "tied the other way": {"embed.weight": Wanted("float32", (3, 2), whole, "head.weight"), "head.weight": Wanted("float32", (3, 2), whole)},
    }[named]  # fmt: skip
    found = list(CheckpointWeights(store).supply(wanted))
    assert len(found) == (2 if named == "both" else 1)
    for name, part in found:
        assert torch.equal(part, model["embed"].weight.detach()[slice(*wanted[name].box[0])])
    assert {"embed.weight", "head.weight"} == CheckpointWeights(store).specs().keys()


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """J03: the last file won, in the order of names."""
    folder = hub(tmp_path / "hub")
    save_file({"h.weight": torch.zeros(6, 4)}, folder / "model-9.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"h\.weight in model-0\.safetensors and in model-9\.safetensors"):
        list(HubDirectory(folder).supply({"h.weight": Wanted("float32", (6, 4), ((0, 6), (0, 4)))}))


@pytest.mark.parametrize("cut", [4, 9, 100, -1])
def test_a_file_that_was_cut_off_or_lies_about_its_ranges_is_refused(tmp_path, cut):
    """U02: before any tensor is made of it."""
    folder = hub(tmp_path / "hub")
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(TrainfoldError, match="model-0"):
        list(HubDirectory(folder).supply({"h.weight": Wanted("float32", (6, 4), ((0, 6), (0, 4)))}))


def on_ranks(collectives, folder):
    """Each rank takes its part of a checkpoint, and of a run whose frozen weights are outside, with their fingerprint."""
    world = collectives.world_size
    found = {}
    for name, wrap in (("whole", lambda source: source), ("frozen", Frozen)):
        for kind, source in (
            ("own", CheckpointWeights(folder)),
            ("sent", FirstRank(CheckpointWeights(folder), collectives)),
        ):
            model = sharded(world, seed=5)
            if name == "frozen":
                model.first.requires_grad_(False)
                model.second.requires_grad_(False)
            live = attach(model, weights=wrap(source))
            live.take_weights(collectives)
            bits = {key: whole(each.detach()).tolist() for key, each in model.named_parameters()}
            found[name, kind] = bits, live.contract().get("weights.outside")
    model = sharded(world, seed=6)
    before = {key: whole(each.detach()).tolist() for key, each in model.named_parameters()}
    part = LoadSpec(CheckpointWeights(folder), names=["first.{name}", "second.{name}"])
    with CheckpointManager(f"{folder}-tuned", collectives=collectives) as manager:
        manager.restore(attach(model), initial=SeveralSources([part, ByScript()]))
    found["initial"] = before, {key: whole(each.detach()).tolist() for key, each in model.named_parameters()}
    return found


def test_ranks_under_fsdp2_take_their_parts_with_one_fingerprint_on_any_number_of_them(processes, tmp_path):
    """I06, J07: uneven and empty parts; read by each rank, or by rank 0 for all. L01, V07: a run begins with some of them, and its script's for the rest."""
    from kit.adapters.fsdp2_cases import Model

    torch.manual_seed(3)
    base = Model()
    folder = str(tmp_path / "base")
    save(attach(base).capture(), LocalStore(folder))
    own = {key: each.tolist() for key, each in base.named_parameters()}
    for parameter in (*base.first.parameters(), *base.second.parameters()):
        parameter.requires_grad_(False)
    live = attach(base, weights=Frozen(CheckpointWeights(folder)))
    live.take_weights()
    for each in processes.run(2, on_ranks, folder, collectives={}):
        assert each["whole", "own"][0] == each["whole", "sent"][0] == own
        for kind in ("own", "sent"):
            bits, text = each["frozen", kind]
            assert text == live.contract()["weights.outside"]
            assert {key: bits[key] for key in bits if key.startswith(("first", "second"))} == {
                key: own[key] for key in own if key.startswith(("first", "second"))
            }
            assert bits["last.weight"] != own["last.weight"]
        before, begun = each["initial"]
        assert begun == {key: own[key] if key.startswith(("first", "second")) else before[key] for key in own}


def test_a_nested_tree_has_no_names_for_a_model():
    """Nested trees have no flat names."""
    store = MemoryStore()
    nested = {"deep": {"w": torch.ones(1)}}
    save(TrainState(trainer=Progress(step=1), extra={"tree": nested}), store)
    wanted = {"w": Wanted("float32", (1,), ((0, 1),))}
    assert dict(CheckpointWeights(store, component="tree").supply(wanted)) == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_changed_file_of_a_hub_is_refused_by_name_or_has_tensors(tmp_path, flips):
    """U02: nothing but named errors comes of any bytes, and no tensor reaches beyond the file."""
    folder = hub(tmp_path / "hub")
    file = folder / "model-0.safetensors"
    data = bytearray(file.read_bytes())
    for place, change in flips:
        data[place % len(data)] ^= change
    file.write_bytes(data)
    total, said = 0, "hub"
    try:
        specs = HubDirectory(folder).specs()
        wanted = {name: Wanted(each.dtype, each.shape, whole_box(each.shape)) for name, each in specs.items()}
        total = sum(each.nbytes for _, each in HubDirectory(folder).supply(wanted))
    except TrainfoldError as error:
        said = str(error)
    assert total <= len(data)
    assert "hub" in said


def test_the_names_of_a_flat_dict_are_those_of_the_module_inside_or_are_refused():
    """C09: a `state_dict()` has the prefixes of wrappers. Two tensors that would have one name are both named."""
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))

    def saved(held):
        store = MemoryStore()
        save(TrainState(trainer=Progress(step=1), extra={"average": held}), store)
        return CheckpointWeights(store, component="average")

    assert set(saved(dict(average.state_dict())).specs()) == {"n_averaged", "weight", "bias"}
    with pytest.raises(InvalidState, match=r"average\['module\.w'\].*which are w without the prefixes"):
        saved({"w": torch.ones(1), "module.w": torch.zeros(1)}).specs()
    of_two = {"module.enc.module.weight": torch.ones(1), "module.enc.bias": torch.ones(1)}
    assert set(saved(of_two).specs()) == {"enc.module.weight", "enc.bias"}  # the inner one may be the user's
    assert set(saved({"module._orig_mod.module.a._checkpoint_wrapped_module.w": torch.ones(1)}).specs()) == {"a.w"}


def test_a_flat_dict_has_the_names_of_the_model_that_was_saved_with_it():
    """C09: a module of the user's that is called `module` is not taken for a wrapper in an average of its weights, as it is not in the model (ADR-0056)."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

    model = torch.nn.Sequential(Encoder())
    average = torch.optim.swa_utils.AveragedModel(torch.compile(model, backend="eager"))

    def names(model, held):
        store = MemoryStore()
        save(attach(model).capture().evolve(extra={"average": dict(held)}), store)
        return set(CheckpointWeights(store, component="average").specs())

    assert names(model, average.state_dict()) == {"n_averaged", "0.module.weight", "0.module.bias"}
    assert names(model, model.state_dict()) == {"0.module.weight", "0.module.bias"}
    assert names(torch.nn.Linear(1, 1), {"module.w": torch.ones(1), "weight": torch.ones(1)}) == {"w", "weight"}
    both = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(1, 1), "b": torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})}
    )
    both["b"].weight = torch.nn.Parameter(torch.ones(1))
    assert "b.module.weight" in names(both, both.state_dict())
    with pytest.raises(
        InvalidState,
        match=r"average\['module\.b\.weight'\], of which the model has b\.(module\.)?weight and b\.(module\.)?weight, which are b\.weight without",
    ):
        names(both, {"module.b.weight": torch.ones(1)})


@pytest.mark.parametrize("read", [HubDirectory, DcpDirectory, TorchFile, accelerate_training, dcp_training])
@pytest.mark.parametrize("place", ["s3://bucket/weights", Path("s3://bucket/weights"), "hdfs://host/weights", 3])
def test_a_url_of_another_kind_is_refused_and_named(read, place):
    """K09: it was looked for as a local path, and the message had no file there."""
    with pytest.raises(InvalidArgument, match=r"\.path: expected a path or a file:// URL, found ('s3:/|'hdfs://|3;)"):
        read(place)


def test_a_file_url_is_a_path(tmp_path):
    assert HubDirectory(f"file://{hub(tmp_path / 'hub')}").specs() == HubDirectory(tmp_path / "hub").specs()
