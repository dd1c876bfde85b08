"""Names of components that a manager refuses before it knows those of the user."""

import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.component_names import BUILTIN_COMPONENTS, check_likely
from trainfold.core.errors import InvalidArgument, UnknownComponent
from trainfold.core.state.state import Progress, TrainState

LONG = [name for name in BUILTIN_COMPONENTS if len(name) > 3]
PLAUSIBLE = [
    "ema",
    "grad_scaler",
    "scaler",
    "tokenizer",
    "critic",
    "actor",
    "target",
    "target_model",
    "replay_buffer",
    "discriminator",
    "generator",
    "modules",
    "module",
    "modes",
    "mode",
    "modal",
    "node",
    "nodes",
    "moe",
    "model_2",
    "model2",
    "modelA",
    "model_ema",
    "optimizer_2",
    "optimizer_d",
    "d_optimizer",
    "critic_optimizer",
    "optim",
    "lr_scheduler",
    "schedule",
    "sched",
    "train",
    "tracker",
    "dataloader",
    "data",
    "database",
    "dataset_state",
    "sampler",
    "rnd",
    "rnn",
    "rngs",
    "prng",
    "ring",
    "range",
    "env",
    "png",
    "norm",
    "stats",
    "averager",
    "swa_model",
    "teacher",
    "student",
    "encoder",
    "lora",
    "progress",
    "curriculum",
]


@given(
    name=st.sampled_from(LONG),
    at=st.integers(0, 9),
    letter=st.sampled_from(string.ascii_lowercase),
    kind=st.integers(0, 3),
)
def test_every_slip_of_one_letter_is_refused_with_the_name_that_was_meant(name, at, letter, kind):
    """B02: ``moedl`` passed."""
    at %= len(name)
    typed = (
        name[:at] + letter + name[at:],
        name[:at] + name[at + 1 :],
        name[:at] + letter + name[at + 1 :],
        name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    )[kind]
    if typed == name or typed in PLAUSIBLE:
        return
    with pytest.raises(UnknownComponent, match=f"did you mean '{name}'"):
        check_likely([typed])


@pytest.mark.parametrize("name", ["moedl", "rgn", "nrg", "rn", "rnng", "Model", "RNG", "datasets"])
def test_a_slip_is_refused(name):
    """B02."""
    with pytest.raises(UnknownComponent, match="correct the name"):
        check_likely([name])


def test_no_plausible_name_of_a_users_component_is_refused():
    """B02: a refusal of a right name has no way out."""
    assert check_likely(PLAUSIBLE) == tuple(PLAUSIBLE)


@pytest.mark.parametrize("name", ["é", "a·b", "हिन्दी"])
def test_a_name_that_cannot_be_that_of_a_file_is_refused_before_anything_is_written(name):
    """It was accepted as an identifier, and a save of many ranks reported its own checkpoint as damaged."""
    store = MemoryStore()
    with pytest.raises(InvalidArgument, match="in ASCII"):
        save(TrainState(trainer=Progress(), extra={name: torch.zeros(1)}), store)
    assert store.list("") == []
