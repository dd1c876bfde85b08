"""What is exported beside `transformers` and `peft`: directories of theirs come back with equal bytes, train on, and adapters go out and in."""

import json
import logging

import pytest
import torch

import trainfold
from trainfold.core.state.leaves import Leaves
from trainfold.core.weights.asked import asked_of
from trainfold.transforms import adapter_rules, hub_rules_of
from trainfold.weights import CheckpointWeights, HubDirectory, Transformed, write_adapter_directory, write_hub_directory

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow(20),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 32


def llama(seed, *, tied=False):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def tensors_of(path):
    return {
        name: each for file in sorted(path.glob("*.safetensors")) for name, each in safetensors.load_file(file).items()
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], each) for name, each in other.items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_of_transformers_comes_back_with_equal_bytes_and_the_same_files(tied, tmp_path):
    """K05, T63: hub -> a run under the names of other code -> hub, with the map, the configuration and the tokenizer of the original."""
    llama(1, tied=tied).save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    (tmp_path / "theirs/tokenizer.json").write_text("{}")
    base = HubDirectory(tmp_path / "theirs")
    rules = hub_rules_of(base.config())
    mine = Transformed(base, rules.inverse)
    leaves = {name: torch.empty(each.shape) for name, each in mine.specs().items()}
    found = {name: each.clone() for name, each in mine.supply(asked_of(leaves, ()))}
    model = trainfold.states.ModelState(Leaves(found), Leaves({}))
    trainfold.save(trainfold.TrainState(model=model, trainer=trainfold.states.make_progress(step=1)), tmp_path / "run")
    write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "again", rules=rules, like=base)
    assert same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "theirs"))
    names = {each.name for each in (tmp_path / "theirs").iterdir()}
    assert {each.name for each in (tmp_path / "again").iterdir()} == names
    one, other = (
        json.loads((tmp_path / each / "model.safetensors.index.json").read_text()) for each in ("theirs", "again")
    )
    assert one["weight_map"] == other["weight_map"]
    assert one["metadata"]["total_size"] == other["metadata"]["total_size"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_is_trained_here_exported_and_trained_on_by_their_trainer(tied, tmp_path):
    """T63: the logits of the export are those of the model in memory, and `Trainer` fine-tunes it, and resumes from its own checkpoint of it."""
    model = llama(1, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    live = trainfold.attach(model, optimizer)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    live.advance(samples=2)
    trainfold.save(live.capture(), tmp_path / "run")
    config = json.loads(model.config.to_json_string())
    write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "hub", config=config, shard_bytes="8KB")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert torch.equal(logits(again), logits(model))

    rows = [{"input_ids": row, "labels": row} for row in TOKENS for _ in range(4)]

    def trainer(model, steps):
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"), max_steps=steps, save_steps=2, per_device_train_batch_size=2,
            report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100,
        )  # fmt: skip
        return transformers.Trainer(model=model, args=options, train_dataset=rows)

    trainer(again, 2).train()
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager")
    trainer(second, 4).train(resume_from_checkpoint=True)
    assert not torch.equal(logits(second), logits(model))


def adapted(seed, base, **settings):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), config
    )
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.add_(torch.randn_like(each) if "modules_to_save" in name else 0)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head", "norm"], "alpha_pattern": {"v_proj": 3}},
    ],
)
def test_adapters_go_out_to_peft_and_come_in_again(settings, tmp_path):
    """M39: from a checkpoint that has the adapters alone, and from one that has the base, too; logits and bytes are equal."""
    llama(1).save_pretrained(tmp_path / "base")
    tuned = adapted(2, tmp_path / "base", **settings)
    trainfold.save(trainfold.attach(tuned).capture(), tmp_path / "run")
    tuned.save_pretrained(tmp_path / "theirs")
    config = tuned.peft_config["default"].to_dict()
    plan = write_adapter_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "mine", config=config)
    assert any("q_proj.base_layer" in name for name in plan.left_out)
    assert same(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "theirs"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "mine")
    assert torch.equal(logits(again), logits(tuned))
    inside = torch.nn.ModuleDict({"net": tuned})  # as a module of Lightning has it
    write_adapter_directory(trainfold.attach(inside).capture(), tmp_path / "inside", config=config)
    assert same(tensors_of(tmp_path / "inside"), tensors_of(tmp_path / "theirs"))

    other = adapted(3, tmp_path / "base", **settings)
    assert not torch.equal(logits(other), logits(tuned))
    source = Transformed(
        HubDirectory(tmp_path / "theirs"), adapter_rules(modules_to_save=config["modules_to_save"]).inverse
    )
    own = dict(other.named_parameters())
    wanted = asked_of({name: each for name, each in own.items() if name in source.specs()}, ())
    assert len(wanted) == 8 + 4 * ("use_dora" in settings or "lora_bias" in settings) + 6 * (
        "modules_to_save" in settings
    )
    with torch.no_grad():
        for name, each in source.supply(wanted):
            own[name].copy_(each)
    assert torch.equal(logits(other), logits(tuned))
