"""Models of `transformers` that are built on meta: the values of an ordinary build, ties kept, the same on ranks and stages, and a resume that computes the same."""

import copy
import warnings

import pytest
import torch
from kit.adapters.construct_cases import all_bits, bits
from kit.adapters.construct_hf_cases import layers_of, logits, model_of
from kit.system.rank_refusals_cases import PATIENT

from trainfold.adapters.construct.recipes import slots_of
from trainfold.adapters.construct.replay import value_of
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.construct import initialize, materialize, on_meta

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


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_a_resumed_model_computes_the_same(name, tmp_path):
    """I01, I03, B17: a save of one model, and a load into another that was built on meta with another seed."""
    first = built(name)
    wanted = logits(first)
    with CheckpointManager(tmp_path, components=["model"]) as manager:
        live = attach(first)
        live.advance(samples=1)
        manager.save(live)
    again = on_meta(lambda: model_of(name))
    materialize(again, "cpu")
    with CheckpointManager(tmp_path, components=["model"]) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the position of data and the optimizer are left out on purpose
        manager.restore(attach(again))
    assert initialize(again, seed=9) == ()
    assert torch.equal(logits(again), wanted)


def sharded(collectives):
    """Each model, cut by FSDP2 on all ranks: the bits of its tensors, gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (collectives.world_size,))
    found = {}
    for name in NAMES:
        model = on_meta(lambda name=name: model_of(name))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        materialize(model, "cpu")
        initialize(model, seed=0, collectives=collectives)
        found[name] = all_bits(model)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_models_have_the_same_values_when_fsdp2_cuts_them(processes, world_size):
    """I08, I05: six models on two and on four ranks."""
    wanted = {name: all_bits(built(name)) for name in NAMES}
    for found in processes.run(world_size, sharded, collectives=PATIENT, timeout_secs=240):
        assert found == wanted


def test_two_stages_of_a_model_have_the_values_of_the_whole():
    """I05, I08: each stage is a deep copy of the model on meta without the other's layers, as torch's examples of pipelines cut a decoder."""
    whole = all_bits(built("llama"))
    model = on_meta(lambda: model_of("llama"))
    seen = {}
    for stage in (0, 1):
        part = copy.deepcopy(model)
        part.model.layers = torch.nn.ModuleDict({str(stage): part.model.layers[stage]})
        if stage == 0:
            part.model.norm = part.lm_head = None
        else:
            part.model.embed_tokens = None
        materialize(part, "cpu")
        initialize(part, seed=0)
        assert all_bits(part).items() <= whole.items()
        seen |= all_bits(part)
    assert seen == whole
