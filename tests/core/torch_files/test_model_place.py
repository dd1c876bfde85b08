"""Which tensors of a saved state are the model's: the planted ones, or it is refused with the keys."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.torch_files.model_place import BESIDE_MODEL, MODEL_KEYS, beside_model, keys_of_values, model_place

HUB = {"model.embed.weight": 1, "lm_head.weight": 1}
NAMES = st.dictionaries(
    st.sampled_from(["w", "model.embed.weight", "lm_head.weight", "layers.0.w", "step", "0"]), st.just(1), min_size=1
)
SLOTS = st.fixed_dictionaries({"state": st.fixed_dictionaries({"w": st.just({"exp_avg": 1})})})
OTHERS = st.dictionaries(
    st.sampled_from(["net", "ema", "app", "state", "averaged"]), st.one_of(NAMES, SLOTS), max_size=2
)
BESIDE = st.dictionaries(st.sampled_from(sorted(BESIDE_MODEL)), SLOTS, max_size=2)


def place(state, key=None):
    paths = {".".join(map(str, keys)): keys for keys in keys_of_values(state)}
    return model_place(paths, paths, key=key, where="x")


def names_under(key, state):
    return {f"{key}.{name}" for name in state}


def flat(state):
    return {".".join(map(str, keys)) for keys in keys_of_values(state)}


@given(weights=NAMES, usual=st.sampled_from([None, *MODEL_KEYS]), others=OTHERS, beside=BESIDE)
def test_the_model_is_found_whole_and_alone_or_the_keys_are_shown(weights, usual, others, beside):
    """Whatever is beside it: nothing else is taken for weights, and no tensor of it is lost."""
    state = {**others, **beside, **(weights if usual is None else {usual: weights})}
    wanted = set(weights) if usual is None else names_under(usual, weights)
    if usual is None and (others or set(weights) == {"step"}):
        event("refused")
        with pytest.raises(InvalidArgument, match="|".join([*others, "the top"])):
            place(state)
    found = place(state, None if usual is not None else "")
    assert (found.key, found.names) == (usual or "", wanted)


@pytest.mark.parametrize(
    ("state", "keys"),
    [
        ({"net": HUB, "optimizer": {"state": {0: {"exp_avg": 1}}}}, ["net", "optimizer.state"]),
        ({"app": {"model": HUB, "optim": {"state": {"w": {"exp_avg": 1}}}}}, ["app.model", "app.optim"]),
        ({"model": HUB, "state_dict": HUB}, ["model", "state_dict"]),
        ({"state": {0: {"exp_avg": 1}}, "param_groups": 3}, ["state.0"]),  # an optimizer's own file
        ({"w": 1, "optimizer.state.w.exp_avg": 1}, ["the top"]),  # keys with dots
        ({"model": HUB, "model.w": 1}, ["model", "the top"]),
        ({"step": 1, "optim": {"w": 1}}, ["optim", "the top"]),
        ({"state_dict": {"model": HUB, "optimizer": {"state": {"w": 1}}}}, ["state_dict.model", "state_dict.optimizer"]),
        ({"optim": {"w": 1}}, ["optim"]),
        ({}, ["no tensor"]),
    ],
)  # fmt: skip
def test_what_keys_leave_open_is_refused_with_the_keys(state, keys):
    """Issue 20, section 4: an optimizer's tensors were written as weights, and those of a hub under another key lost."""
    with pytest.raises(InvalidArgument) as refused:
        place(state)
    assert all(key in refused.value.found for key in keys)


def test_names_without_their_keys_are_open_if_they_begin_as_keys_do():
    """A planner that is not the default one writes no keys."""
    assert model_place(["a.w", "b.w"], {}, key=None, where="x").names == {"a.w", "b.w"}
    for names in (["model.w", "lm_head.w"], ["w", "optim.state.w.exp_avg"]):
        with pytest.raises(InvalidArgument, match="key"):
            model_place(names, {}, key=None, where="x")
    assert model_place(["model.w", "lm_head.w"], {}, key="", where="x").names == {"model.w", "lm_head.w"}
    assert model_place(["model.w", "lm_head.w"], {}, key="model", where="x").names == {"model.w"}


@given(weights=NAMES, others=OTHERS, beside=BESIDE)
def test_what_is_beside_a_model_is_not_of_it_where_all_tensors_are_asked_for(weights, others, beside):
    """With the empty key, and tensors in dicts alone or under names with dots."""
    nested = {**{key: each for key, each in others.items() if each}, "net": weights}
    wanted = {name for key, state in nested.items() for name in names_under(key, flat(state))}
    assert place({**nested, **beside}, "").names == wanted
    dotted = {name: 1 for key, slots in beside.items() for name in names_under(key, flat(slots))}
    assert place({**weights, **dotted}, "").names == set(weights)
    if beside:
        with pytest.raises(InvalidArgument, match="tensors of a model"):
            place(beside, "")


def test_given_keys_have_tensors_under_them():
    """A conversion of nothing succeeded."""
    for key in ("foo", "epoch", "model.w"):
        with pytest.raises(InvalidArgument, match="tensors under model"):
            place({"model": {"w": 1}, "epoch": {}}, key)


def test_what_is_beside_the_model_is_named_from_where_the_keys_part():
    paths = {each: tuple(each.split(".")) for each in ("app.optim.state.w", "app.model.w", "train_state.n", "note")}
    assert beside_model(paths, paths, "app.model") == ("optimizer", "app.model.w", "trainer", "note")
    assert beside_model(paths, paths, "") == ("app", "trainer", "note")
