"""Adapters that `peft` has made are merged as `peft` merges them."""

import pytest
import torch

from trainfold.core.transform.apply import transform_tensors
from trainfold.core.transform.converters.lora import lora_of
from trainfold.properties.contracts import check_converter

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False,
        )
    )  # fmt: skip


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    )


CASES = {
    "plain": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilised": (llama, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 7}),
    "rank by layer": (llama, {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 4}}),
    "alpha by layer": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj"],
            "alpha_pattern": {"layers.1.self_attn.q_proj": 5, "v_proj": 3},
            "rank_pattern": {"v_proj": 4},
        },
    ),
    "modules to save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "lora_alpha": 7}),
    "dora, inputs first": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "embeddings": (llama, {"target_modules": ["q_proj", "embed_tokens"], "lora_alpha": 5}),
    "embeddings, dora": (llama, {"target_modules": ["embed_tokens"], "lora_alpha": 5, "use_dora": True}),
    "orthogonal": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "biases": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True, "lora_alpha": 5}),
    "inputs first": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_adapters_are_merged_as_peft_merges_them(case, tmp_path):
    """K03, K07: by the configuration that it saves; names and shapes are those of the model before, and values differ in last bits."""
    torch.manual_seed(0)
    make, settings = CASES[case]
    before = make()
    names = before.state_dict().keys()
    config = peft.LoraConfig(**{"r": 2, "init_lora_weights": False, **settings})
    model = peft.get_peft_model(before, config)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.add_(torch.randn_like(each) * 0.1 if "modules_to_save" in name or "magnitude" in name else 0)
    config.save_pretrained(tmp_path)
    converter = lora_of(peft.LoraConfig.from_pretrained(tmp_path).to_dict())
    tensors = {name: each.detach().clone() for name, each in model.state_dict().items()}
    check_converter(converter, tensors)
    found = dict(transform_tensors(converter, tensors))
    wanted = model.merge_and_unload().state_dict()
    assert found.keys() == names == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6)
