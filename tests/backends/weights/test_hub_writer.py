"""What is written as a hub directory is what was there, tensor by tensor, whole or not at all, and as its readers expect it."""

import json
import threading

import pytest
import torch
from kit.core.hub_family_cases import FAMILIES, WITH_TIES, Sizes, native
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import trainfold
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointHostile, InvalidArgument, InvalidState, RankFailed, SaveFailed, StateDonated
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.families.hub_rules import dequantise_of, hub_rules, hub_rules_of
from trainfold.core.transform.naming import rename
from trainfold.ranks import run_threads
from trainfold.weights import (
    CheckpointWeights,
    HubDirectory,
    Transformed,
    plan_hub_directory,
    write_adapter_directory,
    write_hub_directory,
)

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "tie_word_embeddings": False}


def bits(tensors):
    return {name: (each.dtype, tuple(each.shape), bytes(tensor_bytes(each))) for name, each in tensors.items()}


def read(path):
    """All tensors of a directory, as its readers find them."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(path / "model.safetensors")
    found = json.loads(index.read_text())
    files = {file: load_file(path / file) for file in set(found["weight_map"].values())}
    assert sum(map(len, files.values())) == len(found["weight_map"])
    assert found["metadata"]["total_size"] == sum(each.nbytes for file in files.values() for each in file.values())
    return {name: files[file][name] for name, file in found["weight_map"].items()}


def state_of(tensors, *, buffers=(), ties=()):
    params = {name: each for name, each in tensors.items() if name not in buffers}
    model = ModelState(Leaves(params), Leaves({name: tensors[name] for name in buffers}), ties=tuple(ties))
    return TrainState(model=model, trainer=Progress(step=3))


def run_of(state):
    store = MemoryStore()
    trainfold.save(state, store)
    return CheckpointWeights(store)


MIXED = {
    "h.weight": torch.arange(24.0).view(6, 4),
    "h.bias": torch.tensor([1.0, float("nan"), -0.0]).bfloat16(),
    "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "rope": torch.arange(3.0),
}


@pytest.mark.parametrize("shard_bytes", [None, 1, 40])
def test_a_state_a_checkpoint_a_directory_and_what_is_made_of_one_are_written_alike(tmp_path, shard_bytes):
    """K05, K07: each tensor once, with its bits, and readable by the library of the format."""
    state = state_of(MIXED, buffers=["step", "mask", "rope"])
    sources = {
        "state": state,
        "run": run_of(state),
        "listed": Transformed(run_of(state), trainfold.transforms.compose()),
    }
    for name, source in sources.items():
        plan = write_hub_directory(source, tmp_path / name, shard_bytes=shard_bytes)
        assert bits(read(tmp_path / name)) == bits(MIXED)
        files = {each.name: each.size_bytes for each in plan.files} | {
            key: len(data) for key, data in plan.beside.items()
        }
        assert files == {each.name: each.stat().st_size for each in (tmp_path / name).iterdir()}
        with safe_open(tmp_path / name / plan.files[0].name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    write_hub_directory(HubDirectory(tmp_path / "run"), tmp_path / "again", shard_bytes=shard_bytes)
    assert bits(read(tmp_path / "again")) == bits(MIXED)


def test_a_plan_says_what_is_written_and_reads_no_tensor(tmp_path):
    class Unreadable:
        def specs(self):
            return CheckpointWeights(store).specs()

        def supply(self, wanted):
            raise AssertionError

    store = MemoryStore()
    trainfold.save(state_of(MIXED), store)
    plan = plan_hub_directory(Unreadable(), shard_bytes=40)
    written = write_hub_directory(CheckpointWeights(store), tmp_path / "a", shard_bytes=40)
    assert str(plan) == str(written)
    assert "model-00001-of-" in str(plan)
    assert plan.largest_bytes == 96


def test_floating_parameters_are_cast_and_nothing_else_is(tmp_path):
    """K04: not buffers, integers, booleans and quantised numbers, nor what has the dtype."""
    state = state_of(MIXED, buffers=["step", "mask", "rope"])
    for number, (source, dtype) in enumerate(((state, torch.bfloat16), (run_of(state), "bfloat16"))):
        config = {"model_type": "x", "torch_dtype": "float32"}
        write_hub_directory(source, tmp_path / str(number), dtype=dtype, config=config)
        cast = {"h.weight", "empty", "turned"}
        assert bits(read(tmp_path / str(number))) == bits(
            {name: each.bfloat16() if name in cast else each for name, each in MIXED.items()}
        )
        assert json.loads((tmp_path / str(number) / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(InvalidArgument, match=r"cast\.dtype"):
        plan_hub_directory(state, dtype=torch.int8)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_to_the_hub_and_comes_back_bit_by_bit(family, tmp_path):
    """K02, T64: through files, in one piece or many."""
    sizes = Sizes(tied=family in WITH_TIES)
    rng = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in native(family, sizes).items()}
    rules = hub_rules(family, **sizes.numbers)
    head, embeddings = (
        ("lm_head.weight", "transformer.wte.weight") if family == "gpt2" else ("output.weight", "tok_embeddings.weight")
    )
    ties = ((head, embeddings),) if sizes.tied and head in tensors else ()
    once = {name: each for name, each in tensors.items() if name not in dict(ties)}
    write_hub_directory(run_of(state_of(once, ties=ties)), tmp_path / "hub", rules=rules, shard_bytes=4000)
    source = Transformed(HubDirectory(tmp_path / "hub"), rules.inverse)
    assert source.specs().keys() == tensors.keys()
    write_hub_directory(source, tmp_path / "back")
    assert bits({name: each for name, each in read(tmp_path / "back").items() if name in once}) == bits(once)


# --- tied weights --------------------------------------------------------------------------------------------------


def tied_state(first="tok_embeddings.weight"):
    weight = torch.arange(32.0).view(4, 8)
    alias = {"tok_embeddings.weight": "output.weight", "output.weight": "tok_embeddings.weight"}[first]
    return state_of({first: weight, "norm.weight": torch.ones(8)}, ties=[(alias, first)])


@pytest.mark.parametrize("first", ["tok_embeddings.weight", "output.weight"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_written_once_or_twice_as_the_configuration_of_the_target_says(tmp_path, first, tied):
    """K05: whatever name the checkpoint has for them."""
    config = {**LLAMA, "tie_word_embeddings": tied}
    for number, source in enumerate((tied_state(first), run_of(tied_state(first)))):
        write_hub_directory(source, tmp_path / str(number), rules=hub_rules_of(config), config=config)
        found = read(tmp_path / str(number))
        assert sorted(found) == ["lm_head.weight"] * (not tied) + ["model.embed_tokens.weight", "model.norm.weight"]
        assert torch.equal(found["model.embed_tokens.weight"], torch.arange(32.0).view(4, 8))


@pytest.mark.parametrize(
    ("config", "names"), [({"tie_word_embeddings": True}, 1), ({"tie_word_embeddings": False}, 2), (None, 1)]
)
def test_without_rules_tied_weights_follow_the_configuration_too(tmp_path, config, names):
    state = state_of(
        {"model.embed_tokens.weight": torch.ones(2, 2)}, ties=[("lm_head.weight", "model.embed_tokens.weight")]
    )
    plan = write_hub_directory(run_of(state), tmp_path / "a", config=config)
    assert len(read(tmp_path / "a")) == names
    assert (plan.left_out == {}) == (names == 2)


def test_a_head_of_its_own_is_not_lost_to_a_configuration_that_ties_it(tmp_path):
    """`from_pretrained` would leave it out, and compute other logits."""
    state = state_of({"model.embed_tokens.weight": torch.ones(2, 2), "lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(InvalidState, match=r"the values of model\.embed_tokens\.weight"):
        write_hub_directory(state, tmp_path / "a", config={"tie_word_embeddings": True})
    assert not (tmp_path / "a").exists()


# --- as another directory ------------------------------------------------------------------------------------------


@pytest.fixture
def original(tmp_path):
    """A directory of two files, with its configuration and tokenizer, and a head that is stored although it is tied."""
    path = tmp_path / "original"
    path.mkdir()
    parts = {"model-1.safetensors": {"model.norm.weight": torch.zeros(8)},
             "model-2.safetensors": {"model.embed_tokens.weight": torch.zeros(4, 8)},
             "model-3.safetensors": {"lm_head.weight": torch.zeros(4, 8)}}  # fmt: skip
    for file, tensors in parts.items():
        save_file(tensors, path / file)
    where = {name: file for file, tensors in parts.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    (path / "tokenizer.json").write_text('{"ü": 1}')
    (path / "README.md").write_text("the original")
    return path


def test_a_directory_like_another_one_has_its_map_and_its_tokenizer(tmp_path, original):
    """K05: a tensor in the map that is left out, because it is tied, is in no file and not in the index."""
    rules = hub_rules_of(json.loads((original / "config.json").read_text()))
    plan = write_hub_directory(run_of(tied_state()), tmp_path / "new", rules=rules, like=original)
    where = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())["weight_map"]
    assert where == {"model.norm.weight": "model-1.safetensors", "model.embed_tokens.weight": "model-2.safetensors"}
    assert "lm_head.weight: left out, tied to the embeddings" in str(plan)
    names = {each.name for each in (tmp_path / "new").iterdir()}
    assert names == {*where.values(), "config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert (tmp_path / "new/tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    plan = plan_hub_directory(run_of(tied_state()), rules=rules, like=original, shard_bytes="1GB")
    assert [each.name for each in plan.files] == ["model.safetensors"]
    with pytest.raises(InvalidState, match=r"found none for model\.norm\.weight, model\.embed_tokens\.weight"):
        plan_hub_directory(run_of(tied_state()), like=original)


def test_a_quantised_original_is_published_plain_and_says_so(tmp_path):
    """K06: `from_pretrained` would look for scales that are not there."""
    path = tmp_path / "original"
    path.mkdir()
    save_file(
        {"a.weight": torch.ones(3, 5).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.full((2, 3), 2.0)},
        path / "model.safetensors",
    )
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    (path / "config.json").write_text(json.dumps(config))
    base = HubDirectory(path)
    plan = write_hub_directory(base, tmp_path / "plain", rules=dequantise_of(base.config()), like=base)
    assert list(plan.left_out) == ["a.weight_scale_inv"]
    assert bits(read(tmp_path / "plain")) == bits({"a.weight": torch.full((3, 5), 2.0).bfloat16()})
    assert HubDirectory(tmp_path / "plain").config() == {"torch_dtype": "bfloat16"}
    write_hub_directory(base, tmp_path / "same", like=base)
    assert HubDirectory(tmp_path / "same").config() == config


def test_what_a_link_leads_to_outside_the_original_is_not_published(tmp_path, original):
    """U02: but the files of a hub's own cache are links."""
    (tmp_path / "secret").write_text("x")
    (original / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointHostile, match="a link to"):
        plan_hub_directory(run_of(tied_state()), like=original, shard_bytes=1)
    cache = tmp_path / "models--a"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/0").mkdir(parents=True)
    (cache / "blobs/1").write_bytes((original / "model-2.safetensors").read_bytes())
    (cache / "snapshots/0/model.safetensors").symlink_to("../../blobs/1")
    assert list(HubDirectory(cache / "snapshots/0").specs()) == ["model.embed_tokens.weight"]
    (cache / "snapshots/0/model.safetensors").unlink()
    (cache / "snapshots/0/model.safetensors").symlink_to(original / "model-2.safetensors")
    with pytest.raises(CheckpointHostile, match="a file of its directory"):
        HubDirectory(cache / "snapshots/0").specs()


# --- what changes, fails or is killed ------------------------------------------------------------------------------


def test_weights_that_are_written_to_meanwhile_are_not_published(tmp_path):
    """D11: an export that reads live weights sees a step between two tensors, and refuses."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    state = trainfold.attach(model).capture()

    def step(each):
        with torch.no_grad():
            model[1].weight.add_(1)
        return each

    with pytest.raises(InvalidState, match=r"1\.weight.*a write to it while it was read"):
        write_hub_directory(Interrupting(state, step), tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Interrupting:
    """A source that lists a state, between whose tensors something happens."""

    def __init__(self, state, then):
        self.state, self.then = state, then

    def specs(self):
        raise AssertionError

    supply = specs

    def opened(self):
        from contextlib import contextmanager

        import attrs

        from trainfold.backends.weights.opened import opened_weights

        @contextmanager
        def given():
            with opened_weights(self.state) as found:
                yield attrs.evolve(found, read=lambda name, box: self.then(found.read(name, box)))

        return given()


def test_a_state_that_a_step_has_consumed_meanwhile_is_named(tmp_path):
    """D11: a donating step takes the memory."""
    state = state_of({"w": torch.ones(2)})

    def consume(each):
        state.model.params._lease.consumed_by = 7
        return each

    with pytest.raises(StateDonated):
        write_hub_directory(Interrupting(state, consume), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_is_exported_while_training_goes_on_in_place(tmp_path):
    """D11: the export has the values of its step, although the loop writes to the weights before, while and after it reads."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    live = trainfold.attach(model, optimizer=optimizer)
    with trainfold.CheckpointManager(tmp_path / "run", mode="async") as manager:
        held = {name: each.clone() for name, each in model.state_dict().items()}
        manager.save(live)
        for _ in range(3):
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            optimizer.step()
    ended, exported = threading.Event(), []

    def export():
        exported.append(write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "hub", shard_bytes=4096))
        ended.set()

    thread = threading.Thread(target=export)
    thread.start()
    while not ended.is_set() and thread.is_alive():
        optimizer.step()
    thread.join()
    assert exported
    assert bits(read(tmp_path / "hub")) == bits(held)
    assert not torch.equal(model.weight, held["weight"])


def test_a_source_that_fails_leaves_finished_files_to_the_next_call(tmp_path):
    """The same checkpoint and rules: what was written is kept, and only the rest is read."""
    store, reads = MemoryStore(), []
    trainfold.save(state_of({f"w{number}": torch.full((100,), float(number)) for number in range(4)}), store)

    class Failing:
        limit = 2

        def specs(self):
            raise AssertionError

        supply = specs

        def opened(self):
            from contextlib import contextmanager

            import attrs

            @contextmanager
            def given():
                with CheckpointWeights(store).opened() as found:
                    yield attrs.evolve(found, read=lambda name, box: self.read(found, name, box), read_into=None)

            return given()

        def read(self, found, name, box):
            reads.append(name)
            if len(reads) > self.limit:
                raise OSError("gone")
            return found.read(name, box)

    source = Failing()
    with pytest.raises(trainfold.errors.SaveFailed, match="gone"):
        write_hub_directory(source, tmp_path / "a", shard_bytes=400)
    assert not (tmp_path / "a").exists()
    source.limit = 9
    write_hub_directory(source, tmp_path / "a", shard_bytes=400)
    assert reads == ["w0", "w1", "w2", "w2", "w3"]
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert float(read(tmp_path / "a")["w3"][5]) == 3.0


def test_what_is_there_is_not_overwritten(tmp_path):
    """A state that is exported again, as a program does that was killed at its end, is found there by its bytes."""
    state = state_of({"w": torch.ones(1)})
    write_hub_directory(state, tmp_path / "a")
    before = (tmp_path / "a/model.safetensors").stat()
    assert write_hub_directory(state_of({"w": torch.ones(1)}), tmp_path / "a").sizes == {"model.safetensors": before.st_size}  # fmt: skip
    for other in ({"w": torch.zeros(1)}, {"w": torch.ones(2)}, {"w": torch.ones(1), "v": torch.ones(1)}):
        with pytest.raises(InvalidArgument, match=r"a: expected .* the very files .*, found .*model\.safetensors"):
            write_hub_directory(state_of(other), tmp_path / "a")
    assert (tmp_path / "a/model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(InvalidArgument, match="a source that lists what it has"):
        write_hub_directory(object(), tmp_path / "b")
    with pytest.raises(InvalidArgument, match="found one without"):
        write_hub_directory(TrainState(), tmp_path / "b")


def leave(collectives, folder):
    """Export on two ranks twice; then something else, which is refused."""
    for _ in range(2):
        write_hub_directory(CheckpointWeights(f"{folder}/run"), f"{folder}/hub", collectives=collectives)
    try:
        write_hub_directory(CheckpointWeights(f"{folder}/run"), f"{folder}/hub", dtype="bfloat16", collectives=collectives)  # fmt: skip
    except (InvalidArgument, RankFailed) as error:
        return type(error).__name__


def test_rank_0_writes_and_all_ranks_leave_together(tmp_path):
    """J03: with the error of rank 0, and not before it has written."""
    trainfold.save(state_of(MIXED), tmp_path / "run")
    assert run_threads(2, lambda world: leave(world, tmp_path)) == ["InvalidArgument", "RankFailed"]
    assert bits(read(tmp_path / "hub")) == bits(MIXED)


def test_a_file_that_its_readers_would_not_open_is_never_committed(tmp_path):
    """Another program writes into a file that is finished: the library of the format sees it before the rename."""

    def spoil(each):
        files = tmp_path / ".a.partial/files"
        if (files / "model-00001-of-00002.safetensors").exists() and (
            files / "model-00002-of-00002.safetensors"
        ).exists():
            data = (files / "model-00001-of-00002.safetensors").read_bytes()
            (files / "model-00001-of-00002.safetensors").write_bytes(data.replace(b'"F32"', b'"I32"'))
        return each

    state = state_of({"v": torch.ones(2), "w": torch.ones(2)})
    with pytest.raises(SaveFailed, match="the tensors that were written"):
        write_hub_directory(Interrupting(state, spoil), tmp_path / "a", shard_bytes=8)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"rules": "llama"}, InvalidArgument, "rules: expected a transform, found 'llama'"),
        ({"config": "config.json"}, InvalidArgument, "config: expected a mapping from text, as json reads it"),
        ({"config": [1]}, InvalidArgument, r"config: expected a mapping from text, .* found \[1\]"),
        ({"about": {"step": 3}}, InvalidArgument, "about: expected a mapping from text to text, found {'step': 3}"),
        ({"about": {"step": {}}}, InvalidArgument, "about: expected a mapping from text to text"),
        ({"about": {"format": "tf"}}, InvalidArgument, "about: expected format as it is written, 'pt', found 'tf'"),
        (
            {"about": {"trainfold.rules": "none"}, "rules": rename("w", "v")},
            InvalidArgument,
            "about: expected trainfold.rules as it is written",
        ),
        ({"like": 3}, InvalidArgument, "like: expected a path or a file:// URL, found 3"),
        ({"like": b"models"}, InvalidArgument, "like: expected a path"),
        (
            {"about": {"author": "\ud800"}},
            InvalidState,
            "ud800': expected a text of Unicode, found half of a surrogate",
        ),
        ({"rules": rename("w", "__metadata__")}, InvalidState, "__metadata__: expected another name"),
        ({"rules": rename("w", "v\udc80")}, InvalidState, r"'v\\udc80': expected a text of Unicode"),
    ],
)
def test_an_argument_that_files_cannot_have_is_refused_before_anything_is_read_or_written(given, error, said, tmp_path):
    """K09: some were found by the check of the files, when all of them were written, as a mistake to report; others were bare errors of Python."""

    class Unread:
        def specs(self):
            return {"w": LeafSpec("float32", (1,))}

        def supply(self, wanted):
            raise AssertionError("it was read")

    for act in (plan_hub_directory, lambda *each, **more: write_hub_directory(*each, tmp_path / "hub", **more)):
        with pytest.raises(error, match=said):
            act(Unread(), **given)
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_a_model_inside_of_another_module_has_the_names_that_peft_looks_for(tmp_path):
    """K03: those of a module of Lightning began with its attribute, and `peft` loaded nothing of them, with no more than a warning."""
    names = [f"net.base_model.model.{layer}.lora_{part}.default.weight" for layer in "qv" for part in "AB"]
    tensors = {name: torch.ones(2, 2) for name in names} | {
        "net.base_model.model.q.base_layer.weight": torch.ones(2, 2)
    }
    write_adapter_directory(state_of(tensors), tmp_path / "a", config={"peft_type": "LORA"})
    assert list(load_file(tmp_path / "a/adapter_model.safetensors")) == [
        f"base_model.model.{layer}.lora_{part}.weight" for layer in "qv" for part in "AB"
    ]
    two = tensors | {"other.base_model.model.q.lora_A.default.weight": torch.ones(2, 2)}
    with pytest.raises(
        InvalidState, match=r"other\.base_model\..* expected a tensor of the model of peft that has net\.base_model"
    ):
        write_adapter_directory(state_of(two), tmp_path / "b", config={"peft_type": "LORA"})


def test_a_name_with_a_rare_letter_is_written(tmp_path):
    """Its header has a pair of surrogates."""
    write_hub_directory(state_of({"w\U0001f600": torch.ones(1)}), tmp_path / "hub")
    assert list(load_file(tmp_path / "hub/model.safetensors")) == ["w\U0001f600"]


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_is_refused(path):
    """K09."""
    with pytest.raises(InvalidArgument, match="path: expected a directory, found"):
        write_hub_directory(state_of({"w": torch.ones(1)}), path)
    with pytest.raises(InvalidArgument, match="config: expected a mapping"):
        write_adapter_directory(state_of({"w": torch.ones(1)}), "adapter", config="adapter_config.json")
    with pytest.raises(InvalidArgument, match=r"Transformed\.transform: expected a transform, found 'llama'"):
        Transformed(HubDirectory("hub"), "llama")


def test_a_module_of_the_users_that_has_the_name_of_a_wrapper_is_exported_under_it(tmp_path):
    """B11, L01: `enc.module.weight` was written as `enc.weight`, which no model of that class loads."""
    model = torch.nn.ModuleDict({"enc": torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1)})})
    write_hub_directory(trainfold.attach(model).capture(), tmp_path / "hub")
    found = load_file(tmp_path / "hub" / "model.safetensors")
    assert {*found} == {*model.state_dict()} == {"enc.module.weight", "enc.module.bias"}
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    write_hub_directory(trainfold.attach(wrapped).capture(), tmp_path / "average")
    assert {*load_file(tmp_path / "average" / "model.safetensors")} == {*found, "n_averaged"}
