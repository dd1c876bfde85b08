"""Small models of `transformers`, made from configurations: nothing is downloaded."""

import logging

import torch

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip


def makers():
    """Name -> (class, configuration): tables of rotary embeddings, tied embeddings, a mixture of experts."""
    import transformers as hf

    logging.getLogger("transformers").setLevel(logging.ERROR)
    causal, grouped = hf.AutoModelForCausalLM, {**SIZES, "num_key_value_heads": 2}
    return {
        "llama": (causal, hf.LlamaConfig(**grouped, rope_parameters=ROPE)),
        "gpt2": (causal, hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)),
        "qwen2": (causal, hf.Qwen2Config(**grouped, tie_word_embeddings=True)),
        "bert": (hf.AutoModelForMaskedLM, hf.BertConfig(**SIZES, tie_word_embeddings=True)),
        "mixtral": (causal, hf.MixtralConfig(**grouped, num_local_experts=4)),
        "qwen3moe": (causal, hf.Qwen3MoeConfig(**grouped, num_experts=4, moe_intermediate_size=16, head_dim=8)),
    }


def model_of(name):
    kind, config = makers()[name]
    return kind.from_config(config)


def layers_of(model):
    """The layers of a decoder that FSDP2 shards on their own."""
    inner = model.base_model
    return next(each for each in inner.modules() if isinstance(each, torch.nn.ModuleList))


def logits(model):
    tokens = torch.arange(24).reshape(2, 12) % 96
    return model.eval()(input_ids=tokens).logits
