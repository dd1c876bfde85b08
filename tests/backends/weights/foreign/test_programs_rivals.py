"""Checkpoints that accelerate and Lightning themselves have written are gone on with; `make rivals` installs the two."""

import pytest
import torch
from kit.backends import dcp_cases as cases

import trainfold
from trainfold.weights import accelerate_training, lightning_training, take_training

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(number)) for number in range(6)]
STEPS = 3


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def check(training, theirs, optimizer):
    """A run that takes it goes on as the program's own objects do."""
    assert training.step == STEPS
    model = net()
    mine = torch.optim.AdamW(model.parameters(), lr=0.5)
    live = trainfold.attach(model, mine, scheduler=torch.optim.lr_scheduler.StepLR(mine, 2))
    live.restore(take_training(live.capture(), training))
    assert live.progress.step == STEPS
    assert cases.all_bits(model.state_dict()) == cases.all_bits(theirs.state_dict())
    optimizer.zero_grad()  # Lightning leaves those of its last step
    for batch in BATCHES[STEPS:]:
        for each, its in ((model, mine), (theirs, optimizer)):
            each(batch).square().mean().backward()
            its.step()
            its.zero_grad()
    assert cases.all_bits(model.state_dict()) == cases.all_bits(theirs.state_dict())


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_state_of_accelerate(is_safe, tmp_path):
    """M24: as `Accelerator.save_state` writes it, in both forms of the weights."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, wrapped, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for batch in BATCHES[:STEPS]:
        accelerator.backward(model(batch).square().mean())
        wrapped.step()
        scheduler.step()
        wrapped.zero_grad()
    accelerator.save_state(str(tmp_path / "a"), safe_serialization=is_safe)
    training = accelerate_training(tmp_path / "a")
    assert "not taken  random_states_0.pkl" in str(training)
    check(training, accelerator.unwrap_model(model), optimizer)


def test_a_checkpoint_of_lightning(tmp_path):
    """M24: as `Trainer.save_checkpoint` writes it, with callbacks, loops and hyperparameters, which are not taken."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, lr=0.01):
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=str(tmp_path)
    )
    data = torch.utils.data.TensorDataset(torch.cat(BATCHES))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(str(tmp_path / "a.ckpt"))
    training = lightning_training(tmp_path / "a.ckpt", module="net")
    assert "not taken  callbacks" in str(training)
    check(training, module.net, trainer.optimizers[0])
