"""LoRA by `peft` on a small Llama of a model hub: checkpoints have the adapters alone, and a killed run is the run that was not killed."""

import os
import signal

import pytest
import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import open_store
from trainfold.core.errors import ResumeRefused
from trainfold.weights import Frozen, HubDirectory, Renamed

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def llama(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Tuned:
    """A script: it builds another base from its seed, and takes the one of the hub."""

    def __init__(self, seed, hub):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        self.model = peft.get_peft_model(llama(seed), config)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        base = Renamed(HubDirectory(hub), lambda n: n.removeprefix("base_model.model.").replace(".base_layer.", "."))
        self.live = attach(self.model, self.optimizer, weights=Frozen(base))

    def train(self, manager, steps):
        while self.live.progress.step < steps:
            batch = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(self.live.progress.step))
            self.model(input_ids=batch, labels=batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance(samples=2)
            manager.step(self.live)
        return self

    def bits(self):
        return {name: each.tolist() for name, each in self.model.named_parameters()}


def killed(folder, hub):
    """Train four steps, save the third, and end by SIGKILL inside the fifth."""
    with CheckpointManager(folder, every=3) as manager:
        first = Tuned(1, hub)
        manager.restore(first.live)
        torch.manual_seed(9)
        first.train(manager, 4)
        first.model(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.sum().backward()
        os.kill(os.getpid(), signal.SIGKILL)


def test_adapters_are_saved_alone_and_resume_on_the_base_bit_for_bit(processes, tmp_path):
    """B16, J06, J07: after a SIGKILL; streams too: LoRA draws dropout. Another base is refused."""
    hub, other = tmp_path / "hub", tmp_path / "other"
    llama(5).save_pretrained(hub)
    llama(6).save_pretrained(other)
    with CheckpointManager(tmp_path / "whole", every=3) as manager:
        whole = Tuned(1, hub)
        manager.restore(whole.live)
        torch.manual_seed(9)
        whole.train(manager, 6)
    (ended,) = processes.outcomes(1, killed, str(tmp_path / "killed"), str(hub))
    assert ended.code == -signal.SIGKILL, ended.printed
    store = open_store(tmp_path / "killed")
    paths = [each.path for each in read_manifest(store, "step-00000003").component("model").tensors[0]]
    assert len(paths) == 8
    assert all("lora_" in path for path in paths)
    with CheckpointManager(tmp_path / "killed", every=3) as manager:
        again = Tuned(2, hub)
        assert manager.restore(again.live).step == 3
        again.train(manager, 6)
    assert again.bits() == whole.bits()
    with (
        CheckpointManager(tmp_path / "killed", every=3) as manager,
        pytest.raises(ResumeRefused, match="outside_weights"),
    ):
        manager.restore(Tuned(2, other).live)
