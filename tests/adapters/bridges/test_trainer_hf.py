"""A `Trainer` of transformers that is killed and resumed ends with the bits of one that was never killed; `make hf` installs it."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from kit.forks import forked

import trainfold
from trainfold.adapters.bridges.transformers import TrainfoldCallback
from trainfold.core.state.state import Opaque, TrainState
from trainfold.weights import CheckpointWeights, HubDirectory, Wanted, write_hub_directory

transformers = pytest.importorskip("transformers")
ExportableState = pytest.importorskip("transformers.trainer_callback").ExportableState
pytestmark = [
    pytest.mark.slow(60),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
COUNTERS = TrainState(extra={"trainer_state": Opaque({"json": ""})})
STEPS = 6  # two epochs of three: of five batches two and two, and one


class Kills(transformers.TrainerCallback):
    """Kills its process within a step."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Counts(transformers.TrainerCallback, ExportableState):
    """Counts the evaluations, as `EarlyStoppingCallback` does."""

    def __init__(self):
        self.evaluations = 0

    def on_evaluate(self, *_, **__):
        self.evaluations += 1

    def state(self):
        return {"args": {}, "attributes": {"evaluations": self.evaluations}}


class Stream(torch.utils.data.IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(examples(10))


def examples(count):
    drawn = torch.randint(0, 32, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in drawn]


def trainer_of(run, callbacks, data=None, **changed):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=2, attention_dropout=0.1)  # fmt: skip
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "epoch",
            "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True} | changed  # fmt: skip
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(output_dir=f"{run}-out", **args),
        train_dataset=examples(10) if data is None else data,
        eval_dataset=examples(4),
        callbacks=callbacks,
    )


def train(run, die_at=None, extra=(), **changed):
    callback = TrainfoldCallback(run, every=1, keep_last=3)
    trainer = trainer_of(run, [Kills(die_at), *(each() for each in extra), callback], **changed)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))


def last(run):
    """The fingerprints of the last checkpoint, and its log, without times and the mean loss of this process."""
    plan = trainfold.plan(run, like=COUNTERS, components=["trainer_state"])
    counters = json.loads(
        trainfold.load(run, like=COUNTERS, components=["trainer_state"]).extra["trainer_state"].value["json"]
    )
    prints = {each.name: each.fingerprint for each in plan.manifest.components if each.name != "trainer_state"}
    log = [
        {k: v for k, v in each.items() if not k.endswith(("runtime", "per_second")) and k != "train_loss"}
        for each in counters["log_history"]
    ]
    return plan.step, prints, log, counters["total_flos"], counters["stateful_callbacks"].get("Counts")


@pytest.mark.parametrize("sampler", ["of_a_seed", "of_the_streams"])
def test_a_killed_trainer_resumes_bit_for_bit(sampler, tmp_path):
    """Within an epoch, at its start and at its end; a sampler may draw from its own seed, or from the global stream."""
    changed = {"accelerator_config": {"use_seedable_sampler": sampler == "of_a_seed"}}
    assert forked(train, str(tmp_path / "whole"), **changed) == 0
    whole = last(tmp_path / "whole")
    assert whole[0] == STEPS
    assert {"model", "optimizer", "scheduler", "rng", "trainer_epoch"} <= whole[1].keys()
    for step in (1, 3, 4, 5):
        run = str(tmp_path / f"killed-{step}")
        assert forked(train, run, step, **changed) == -signal.SIGKILL
        assert trainfold.plan(run, like=COUNTERS, components=["trainer_state"]).step == step
        assert forked(train, run, **changed) == 0
        assert last(run) == whole, step
        assert not Path(f"{run}-out", "trainfold-resume").exists()


def test_a_trainer_that_does_not_resume_is_refused(tmp_path):
    """Without what `resume` returns, a trainer would begin again, and save that over the run."""
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    callback = TrainfoldCallback(run, every=1)
    trainer = trainer_of(run, [callback])
    with pytest.raises(trainfold.errors.InvalidState, match="expected a call of resume before train"):
        trainer.train()
    callback.resume(trainer)
    with pytest.raises(trainfold.errors.InvalidState, match="begins at step 2, as the run does, found step 0"):
        trainer.train()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip=False"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=False"),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "dataloader_persistent_workers=False",
        ),
    ],
)
def test_settings_that_would_change_the_batches_are_refused(changed, expected, tmp_path):
    callback = TrainfoldCallback(str(tmp_path / "a"))
    with pytest.raises(trainfold.errors.InvalidArgument, match=expected):
        callback.resume(trainer_of(tmp_path / "a", [callback], **changed))


def test_another_order_of_the_batches_is_refused(tmp_path):
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    assert forked(train, run, data_seed=5) == 1
    callback = TrainfoldCallback(run, every=1)
    trainer = trainer_of(run, [callback])
    torch.manual_seed(7)  # of which the sampler makes its seed
    at = callback.resume(trainer)
    with pytest.raises(trainfold.errors.RestoreRefused, match="batches drawn as in the run"):
        trainer.train(resume_from_checkpoint=at)


def test_a_resume_is_no_start_to_evaluate_at_and_callbacks_count_on(tmp_path):
    """With ``eval_on_start``, and a callback whose state the trainer saves and by itself does not restore."""
    changed = {"eval_on_start": True, "extra": [Counts]}
    assert forked(train, str(tmp_path / "whole"), **changed) == 0
    assert last(tmp_path / "whole")[4]["attributes"] == {"evaluations": 3}
    run = str(tmp_path / "a")
    assert forked(train, run, 4, **changed) == -signal.SIGKILL
    assert forked(train, run, **changed) == 0
    assert last(run) == last(tmp_path / "whole")


def test_a_run_that_has_ended_within_an_epoch_makes_no_step_when_it_is_run_again(tmp_path):
    """The trainer would make one more each time, because it looks at ``max_steps`` after a step; further steps go on from the end."""
    run = str(tmp_path / "a")
    changed = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    assert forked(train, run, **changed, max_steps=4) == 0
    ended = last(run)[:2]
    assert forked(train, run, **changed, max_steps=4) == 0
    assert last(run)[:2] == ended
    assert ended[0] == 4
    assert forked(train, str(tmp_path / "whole"), **changed, max_steps=5) == 0
    assert forked(train, run, **changed, max_steps=5) == 0
    assert last(run)[:2] == last(tmp_path / "whole")[:2]


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
def test_a_damaged_checkpoint_is_passed_over_with_its_counters(tmp_path):
    """Weights of one step with the counters of another would leave out the steps between them."""
    assert forked(train, str(tmp_path / "whole")) == 0
    run = tmp_path / "a"
    assert forked(train, str(run), 3) == -signal.SIGKILL
    file = next((run / "step-00000003").glob("model-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    callback = TrainfoldCallback(str(run), every=1, keep_last=3)
    trainer = trainer_of(run, [callback])
    at = callback.resume(trainer)
    with pytest.raises(trainfold.errors.InvalidState, match="it is damaged, and restored that of step 2; start"):
        trainer.train(resume_from_checkpoint=at)
    callback.close()
    assert forked(train, str(run)) == 0
    assert last(run) == last(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"learning_rate": 1e-3}, r"base_lrs: saved \[0.01, 0.01\], wanted \[0.001, 0.001\]"),
        ({"max_grad_norm": 0.1}, "max_grad_norm: saved 1.0, wanted 0.1"),
        ({"bf16": True}, "bf16: saved False, wanted True"),
        ({"data": examples(9)}, "found .*'batches': 5, 'examples': 9"),
    ],
)
def test_what_was_changed_is_named(changed, found, tmp_path):
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    callback = TrainfoldCallback(run, every=1)
    trainer = trainer_of(run, [callback], **changed)
    at = callback.resume(trainer)
    with pytest.raises(trainfold.errors.TrainfoldError, match=found):
        trainer.train(resume_from_checkpoint=at)


def test_data_without_a_length_are_read_from_their_beginning(tmp_path):
    changed = {"data": Stream(), "max_steps": 2, "eval_strategy": "no"}
    assert forked(train, str(tmp_path / "whole"), **changed) == 0
    run = str(tmp_path / "a")
    assert forked(train, run, 1, **changed) == -signal.SIGKILL
    assert forked(train, run, **changed) == 0
    assert last(run) == last(tmp_path / "whole")


def test_a_closed_callback_leaves_the_run_to_another(tmp_path):
    """As after an interrupt in a notebook."""
    run = str(tmp_path / "a")
    first = TrainfoldCallback(run)
    first.resume(trainer_of(run, [first]))
    second = TrainfoldCallback(run)
    trainer = trainer_of(run, [second])
    with pytest.raises(trainfold.errors.RunLocked):
        second.resume(trainer)
    first.close()
    assert second.resume(trainer) is None
    second.close()


def test_a_callback_that_was_added_twice_is_refused(tmp_path):
    callback = TrainfoldCallback(str(tmp_path / "a"))
    with pytest.raises(trainfold.errors.InvalidArgument, match="this callback, once"):
        callback.resume(trainer_of(tmp_path / "a", [callback, callback]))


# --- on without the bridge -------------------------------------------------------------------------------------------


class Begins(transformers.TrainerCallback):
    """Keeps with what a trainer begins."""

    def __init__(self):
        self.seen = None

    def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        if self.seen is None:
            weights = {name: each.clone() for name, each in model.state_dict().items()}
            self.seen = state.global_step, weights, dict(optimizer.state), lr_scheduler.last_epoch


def supplied(source):
    every = {name: Wanted(each.dtype, each.shape, tuple((0, size) for size in each.shape)) for name, each in source.specs().items()}  # fmt: skip
    return {name: each.clone() for name, each in source.supply(every)}


def test_a_trainer_resumes_from_an_export_with_the_weights_and_the_step_and_nothing_else(tmp_path):
    """It begins at the step and its batch, with the weights; the optimizer is a new one, and the scheduler begins at 0."""
    run, hub = str(tmp_path / "run"), tmp_path / "hub"
    assert forked(train, run, 4) == -signal.SIGKILL
    begins = Begins()
    trainer = trainer_of(tmp_path / "next", [begins])
    write_hub_directory(CheckpointWeights(run), hub, config=trainer.model.config.to_dict())
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
        trainer.train(resume_from_checkpoint=str(hub))
    transformers.TrainerState(global_step=4, train_batch_size=2).save_to_json(str(hub / "trainer_state.json"))
    drawn = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: drawn.append(len(rows)) or collate(rows)
    trainer.train(resume_from_checkpoint=str(hub))
    step, weights, slots, last_epoch = begins.seen
    assert (step, trainer.state.global_step, last_epoch) == (4, STEPS, 0)
    assert not slots
    kept = supplied(HubDirectory(hub))
    assert kept.keys() == supplied(CheckpointWeights(run)).keys() <= weights.keys()
    assert all(torch.equal(weights[name], each) for name, each in kept.items())
    assert drawn.count(2) == 3, "the batches of the other two steps of the second epoch"


def test_what_a_bridged_trainer_saves_itself_resumes_without_the_bridge_bit_for_bit(tmp_path):
    """The way back: resume once with the bridge and the trainer's own checkpoints, and go on with these."""
    assert forked(train, str(tmp_path / "whole")) == 0
    run = str(tmp_path / "run")
    assert forked(train, run, 2) == -signal.SIGKILL
    assert forked(train, run, 4, save_strategy="epoch") == -signal.SIGKILL
    trainer = trainer_of(tmp_path / "next", [])
    trainer.train(resume_from_checkpoint=f"{run}-out/checkpoint-3")
    assert trainer.state.global_step == STEPS
    whole, found = supplied(CheckpointWeights(tmp_path / "whole")), trainer.model.state_dict()
    assert whole.keys() <= found.keys()
    assert all(torch.equal(found[name], each) for name, each in whole.items())
