"""`repr(live)` names the components and the position of a run."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.attach import attach


def test_a_live_run_says_what_it_holds_and_where_it_stands():
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 10)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    live = attach(model, sgd, scheduler=scheduler, loader=loader, extra={"ema": (dict, lambda tree: None)})
    held = "model (Linear), optimizer (SGD), scheduler (StepLR), trainer, dataset, rng, ema (tuple)"
    assert repr(live) == f"<Live at step 0, epoch 0, 0 samples: {held}>"
    for (x,) in live.batches(epochs=1):
        model(x).sum().backward()
        sgd.step()
        scheduler.step()
        live.advance(samples=2)
    assert repr(live) == f"<Live at step 4, epoch 1, 8 samples: {held}>"


def test_an_open_window_is_named():
    live = attach(torch.nn.Linear(2, 1), None)
    live.advance(samples=2, steps=0)
    assert (
        repr(live)
        == "<Live at step 0, epoch 0, 2 samples, inside an accumulation window: model (Linear), trainer, rng>"
    )


def test_a_component_that_waits_for_its_object_is_named():
    build = lambda extra: attach(torch.nn.Linear(2, 1), None, extra=extra)
    saved = build({"ema": torch.nn.Linear(2, 1)}).capture()
    live = build({})
    live.restore(saved)
    assert repr(live).endswith("model (Linear), trainer, rng; not registered yet: ema>")
