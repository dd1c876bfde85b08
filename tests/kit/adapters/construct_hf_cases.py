"""Small models of `transformers`, made from configurations: nothing is downloaded."""

import logging

import torch

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip


def makers(layers=2):
    """Name -> (class, configuration): tables of rotary embeddings, tied embeddings, a mixture of experts."""
    import transformers as hf

    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = {**SIZES, "num_hidden_layers": layers}
    causal, grouped = hf.AutoModelForCausalLM, {**sizes, "num_key_value_heads": 2}
    return {
        "llama": (causal, hf.LlamaConfig(**grouped, rope_parameters=ROPE)),
        "gpt2": (
            causal,
            hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0),
        ),
        "qwen2": (causal, hf.Qwen2Config(**grouped, tie_word_embeddings=True)),
        "bert": (hf.AutoModelForMaskedLM, hf.BertConfig(**sizes, tie_word_embeddings=True)),
        "mixtral": (causal, hf.MixtralConfig(**grouped, num_local_experts=4)),
        "qwen3moe": (
            causal,
            hf.Qwen3MoeConfig(**grouped, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
        ),
    }


def model_of(name, layers=2):
    kind, config = makers(layers)[name]
    return kind.from_config(config)


def stage_of(model, index):
    """The model without the layers, and the end, of the other one of two stages, as torch's examples of pipelines cut a decoder."""
    inner = model.base_model
    key, layers = next((name, each) for name, each in inner.named_modules() if isinstance(each, torch.nn.ModuleList))
    at, _, last = key.rpartition(".")
    setattr(inner.get_submodule(at), last, torch.nn.ModuleDict({str(index): layers[index]}))
    before = [name for name, _ in inner.named_children() if name in ("embed_tokens", "wte", "wpe", "embeddings")]
    after = [name for name, _ in inner.named_children() if name in ("norm", "ln_f")]
    for name in after if index == 0 else before:
        setattr(inner, name, None)
    for name in [each for each, child in model.named_children() if child is not inner] if index == 0 else ():
        setattr(model, name, None)
    return model


def layers_of(model):
    """The layers of a decoder that FSDP2 shards on their own."""
    inner = model.base_model
    return next(each for each in inner.modules() if isinstance(each, torch.nn.ModuleList))


def logits(model):
    tokens = torch.arange(24).reshape(2, 12) % 96
    return model.eval()(input_ids=tokens).logits
