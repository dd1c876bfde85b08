"""Models of `transformers` that are built on meta: the values of an ordinary build, ties kept, the same on ranks and stages, and a resume that computes the same."""

import copy
import warnings

import pytest
import torch
from kit.adapters.construct_cases import all_bits, bits
from kit.adapters.construct_hf_cases import layers_of, logits, model_of, stage_of
from kit.system.rank_refusals_cases import PATIENT

from trainfold.adapters.construct.recipes import slots_of
from trainfold.adapters.construct.replay import value_of
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.construct import initialize, materialize, on_meta
from trainfold.weights import CheckpointWeights

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow(20),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NAMES = ("llama", "gpt2", "qwen2", "bert", "mixtral", "qwen3moe")
TIED = {
    "gpt2": "transformer.wte.weight",
    "qwen2": "model.embed_tokens.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
}


def built(name):
    model = on_meta(lambda: model_of(name))
    materialize(model, "cpu")
    initialize(model, seed=0)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_values_of_an_ordinary_build_and_its_ties(name):
    """I02, I03, B19: every parameter and buffer, tables of rotary embeddings too, bit for bit where one generator draws in the same order."""
    torch.manual_seed(5)
    ordinary = model_of(name)
    model = on_meta(lambda: model_of(name))
    for slot in slots_of([model]):
        assert slot.tensor.is_meta, slot.name
        torch.manual_seed(5)
        wanted = getattr(ordinary.get_submodule(slot.name.rpartition(".")[0]), slot.key)
        assert bits(value_of(slot.recipe.tape, slot.recipe.place, None, slot.recipe.tape.calls)) == bits(wanted), (
            slot.name
        )
    materialize(model, "cpu")
    assert {*initialize(model, seed=0)} == {key for key, _ in model.named_parameters()}
    tied = [
        key for key, value in model.state_dict(keep_vars=True).items() if value is model.get_output_embeddings().weight
    ]
    assert (TIED.get(name) in tied) == (len(tied) > 1) == (name in TIED)
    for key, value in model.named_parameters():
        if value.numel() > 1000:
            expected = ordinary.get_parameter(key).detach()
            mean, spread = float(expected.mean()), float(expected.std())
            assert float(value.detach().std()) == pytest.approx(spread, rel=0.15), key
            assert float(value.detach().mean()) == pytest.approx(mean, abs=7 * spread / value.numel() ** 0.5), key


def saved(folder, names=NAMES):
    """A run of one process for each model, with other values than those of seed 0, in its whole and with its first layer alone."""
    for name in names:
        for layers in (1, 2):
            torch.manual_seed(5)
            live = attach(model_of(name, layers))
            live.advance(samples=1)
            with CheckpointManager(f"{folder}/{name}{layers}", components=["model"]) as manager:
                manager.save(live)


def restored(run, live, **options):
    policy = {"missing": "adapt"}  # a layer
    with CheckpointManager(run, components=["model"], policy=policy, **options) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimizer and position are left out on purpose
        manager.restore(live)


def resumed(run, model, **options):
    """Load into a model that was built on meta, and initialise the rest: the names of that, and all bits."""
    materialize(model, "cpu")
    restored(run, attach(model), **options)
    return initialize(model, seed=0, **options), all_bits(model)


def wanted_bits(name):
    """What a resume from one layer has: that layer and the ends from the checkpoint, and the second layer as a fresh run has it; and its names."""
    torch.manual_seed(5)
    old, new = all_bits(model_of(name, 1)), built(name)
    bits_of = all_bits(new) | old
    kept = {id(each) for key, each in new.named_parameters(remove_duplicate=False) if key in old}
    return bits_of, {key for key, each in new.named_parameters() if id(each) not in kept}


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_model_computes_the_same_and_a_new_layer_is_initialised(name, tmp_path):
    """I01, I02, I03, B17: a save of one model, and a load into another that was built on meta."""
    saved(tmp_path, [name])
    torch.manual_seed(5)
    whole = model_of(name)
    model = on_meta(lambda: model_of(name))
    assert resumed(tmp_path / f"{name}2", model) == ((), all_bits(whole))
    assert torch.equal(logits(model), logits(whole))
    found, bits_of = resumed(tmp_path / f"{name}1", on_meta(lambda: model_of(name)))
    assert (bits_of, {*found}) == wanted_bits(name)


def sharded(collectives, folder):
    """Each model, cut by FSDP2 on all ranks: the bits of its tensors, gathered, without a load, and after one; and whether it computes the same."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (collectives.world_size,))

    def cut(name):
        model = on_meta(lambda: model_of(name))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    found = {}
    for name in NAMES:
        model = cut(name)
        materialize(model, "cpu")
        initialize(model, seed=0, collectives=collectives)
        whole, part = cut(name), cut(name)
        loaded = [
            resumed(f"{folder}/{name}{layers}", each, collectives=collectives)
            for layers, each in ((1, part), (2, whole))
        ]
        torch.manual_seed(5)
        found[name] = all_bits(model), loaded, torch.equal(logits(whole), logits(model_of(name)))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_models_have_the_same_values_when_fsdp2_cuts_them(processes, world_size, tmp_path):
    """I01, I05, I08: six models on two and on four ranks, of a fresh run, and loaded in part and as a whole."""
    saved(tmp_path)
    for found in processes.run(world_size, sharded, str(tmp_path), collectives=PATIENT, timeout_secs=240):
        for name in NAMES:
            torch.manual_seed(5)
            whole = all_bits(model_of(name))
            fresh, ((new, grown), (nothing, loaded)), computes_the_same = found[name]
            assert fresh == all_bits(built(name)), name
            assert (grown, {*new}) == wanted_bits(name), name
            assert (nothing, loaded) == ((), whole), name
            assert computes_the_same, name


def staged(collectives, folder):
    """Each rank makes its stage of each model, loads it from the run of one process, and initialises the rest."""
    from torch.distributed.pipelining import PipelineStage

    found = {}
    for name in NAMES:
        for layers in (2,) if name in TIED else (1, 2):
            part = stage_of(on_meta(lambda name=name: model_of(name)), collectives.rank)
            materialize(part, "cpu")
            stage = PipelineStage(part, collectives.rank, 2, torch.device("cpu"))
            run = f"{folder}/{name}{layers}"
            if (
                name in TIED
            ):  # a checkpoint has one tensor for both ends, a source of weights supplies it under either name
                attach([stage], weights=CheckpointWeights(run)).take_weights(collectives)
            else:
                restored(run, attach([stage]), collectives=collectives)
            found[name, layers] = initialize(stage, seed=0, collectives=collectives), all_bits(part)
    return found


def test_two_stages_load_what_they_have_of_one_model(processes, tmp_path):
    """I01, I05, B19: ends that are tied across the stages have one value in both."""
    saved(tmp_path)
    ranks = processes.run(2, staged, str(tmp_path), collectives=PATIENT, timeout_secs=240)
    for name in NAMES:
        torch.manual_seed(5)
        whole = all_bits(model_of(name))
        for layers, (bits_of, new) in ((1, wanted_bits(name)), (2, (whole, set())))[name in TIED :]:
            together = {}
            for found in ranks:
                assert found[name, layers][1].items() <= bits_of.items(), name
                together |= found[name, layers][1]
            assert together == bits_of, name
            assert {key for found in ranks for key in found[name, layers][0]} == new, name


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_of_a_model_have_the_values_of_the_whole(name):
    """I05, I08: each stage is a deep copy of the model on meta without the other's layers."""
    whole = all_bits(built(name))
    model = on_meta(lambda: model_of(name))
    seen = {}
    for stage in (0, 1):
        part = stage_of(copy.deepcopy(model), stage)
        materialize(part, "cpu")
        initialize(part, seed=0)
        assert all_bits(part).items() <= whole.items()
        seen |= all_bits(part)
    assert seen == whole
