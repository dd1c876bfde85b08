"""transformers' Trainer, with its checkpoints and resume_from_checkpoint."""

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from loops import task


class Model(torch.nn.Module):
    """The task as the Trainer calls it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        """The loss and the outputs."""
        return {"loss": task.loss_of(self.net, x, labels), "logits": self.net(x.to(next(self.parameters()).dtype)) * 0}


class Rows(torch.utils.data.Dataset):
    """The data as dicts."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        """One sample."""
        x, y = self.data[index]
        return {"x": x, "labels": y}


class Report(TrainerCallback):
    """Records the losses; a value logged at a step belongs to the step."""

    def __init__(self, case):
        self.case = case

    def on_log(self, args, state, control, logs=None, **_):
        """A step was logged; its checkpoint follows, so the process dies at a later step."""
        del args, control
        if logs and "loss" in logs:
            task.after_step(self.case, state.global_step, logs["loss"])


def arguments(case, **more):
    """Return the options of all runs."""
    return TrainingArguments(
        output_dir=case.run,
        per_device_train_batch_size=case.batch_size,
        num_train_epochs=case.epochs,
        learning_rate=task.LEARNING_RATE,
        weight_decay=0.01,
        max_grad_norm=0.0,
        lr_scheduler_type="cosine" if case.schedule == "cosine" else "constant",
        gradient_accumulation_steps=case.accumulate,
        dataloader_num_workers=case.workers,
        optim="adamw_torch" if case.optimizer == "AdamW" else "sgd",
        save_steps=case.save_every,
        logging_steps=1,
        seed=0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def train(case, *, resume):
    """Train, from its newest checkpoint if there is one."""
    if case.two_optimizers or case.ema:
        raise task.NotOffered
    task.seed_all()
    net = task.make_net(case)
    pair = (None, None)
    if case.schedule == "onecycle":
        optimizer = task.optimizers_of(case, net)[0]
        pair = (optimizer, task.scheduler_of(case, optimizer))
    trainer = Trainer(
        Model(net), arguments(case), train_dataset=Rows(task.Data(augment=case.augment)), callbacks=[Report(case)],
        optimizers=pair,
    )  # fmt: skip
    is_there = resume and any(case.folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if is_there else None)
    task.finish(case, net)


def evaluate(net, loader):
    """Its ``eval_loss``."""
    case = task.Case("runs/evaluation", batch_size=8)
    args = arguments(case)
    args.per_device_eval_batch_size = loader.batch_size
    return Trainer(Model(net), args, eval_dataset=Rows(loader.dataset)).evaluate()["eval_loss"]
