"""A state in other pieces: its step is the same step, and the inverse has the state again, to the bit."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kit.backends import dcp_cases as cases
from torch import nn

import trainfold
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.shard import make_shard
from trainfold.core.layout.stage import make_stage
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.masters import make_masters
from trainfold.core.transform.states.made_optimizer import ELEMENTWISE
from trainfold.core.transform.states.transform_state import transform_state
from trainfold.transforms import cast, compose, merge, rearrange, rename, split, stack, tie, transpose
from trainfold.weights import DcpDirectory, dcp_training, take_training, write_dcp_directory

HYPER = {"lr": 0.05}
KINDS = {kind.rpartition(".")[2]: getattr(torch.optim, kind.rpartition(".")[2]) for kind in sorted(ELEMENTWISE)}
RULES = {
    "transposed": transpose("{i}.experts.{e}.w"),
    "in pairs": rearrange("{i}.k.weight", "(h d two) i -> (h two d) i", h=2, two=2),
    "stacked": stack("{i}.experts.{e}.w", "{i}.experts.w", over="e"),
    "fused": merge(["{i}.q.{kind}", "{i}.k.{kind}", "{i}.v.{kind}"], "{i}.qkv.{kind}", shares=(2, 1, 1), groups=2),
    "renamed": rename("{i}.{rest*}", "layers.{i}.{rest*}"),
}


def params_of(layers, rng):
    found = {}
    for i in range(layers):
        for part, rows in (("q", 16), ("k", 8), ("v", 8)):
            found |= {
                f"{i}.{part}.weight": torch.randn(rows, 3, generator=rng),
                f"{i}.{part}.bias": torch.randn(rows, generator=rng),
            }
        found |= {f"{i}.experts.{e}.w": torch.randn(2, 5, generator=rng) for e in range(3)}
    return found


def optimizer_of(kind):
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}, "RMSprop": {"momentum": 0.5, "centered": True}}
    rules = [("bias$", {"lr": 0.01})]
    return trainfold.optimizer(KINDS[kind], **HYPER, **options.get(kind, {}), groups=rules)


def state_of(params, slots):
    model = trainfold.states.ModelState(Leaves(params), Leaves())
    return trainfold.TrainState(model=model, optimizer=slots, trainer=trainfold.Progress(step=3))


def stepped(optimizer, state, rng, steps, grads=None):
    for number in range(steps):
        given = (
            {name: torch.randn(each.shape, generator=rng) for name, each in state.model.params.items()}
            if grads is None
            else grads[number]
        )
        params, slots = optimizer.update(given, state.optimizer, state.model.params)
        state = state_of(params, slots)
    return state


def gradients(rng, params, steps):
    return [{name: torch.randn(each.shape, generator=rng) for name, each in params.items()} for _ in range(steps)]


@settings(max_examples=20)
@given(
    kind=st.sampled_from(list(KINDS)),
    rules=st.lists(st.sampled_from(list(RULES)), unique=True, max_size=4),
    seed=st.integers(0, 9),
    steps=st.integers(0, 2),
)
def test_a_step_of_a_state_in_other_pieces_is_the_same_step_and_the_inverse_has_the_state_again(
    kind, rules, seed, steps
):
    """K01, B08: every optimizer of the list, whatever is put together."""
    rng = torch.Generator().manual_seed(seed)
    transform = compose(*(rule for name, rule in RULES.items() if name in rules))
    params, optimizer = params_of(2, rng), optimizer_of(kind)
    state = stepped(optimizer, state_of(params, optimizer.init(params)), rng, steps)
    other = transform_state(state, transform)
    again = transform_state(other, transform.inverse)
    assert fingerprint(again) == fingerprint(state)
    assert {name: list(each) for name, each in again.optimizer.slots.items()} == {
        name: list(each) for name, each in state.optimizer.slots.items()
    }
    grads = gradients(rng, params, 2)
    theirs = [dict(transform_state(state_of(each, None), transform).model.params) for each in grads]
    after = stepped(optimizer, state, rng, 2, grads)
    other_after = stepped(optimizer, other, rng, 2, theirs)
    assert fingerprint(transform_state(other_after, transform.inverse)) == fingerprint(after)


def test_masters_gradients_and_ties_come_along():
    """B08, B11: of a live optimizer, whose parameters may have no gradient yet; a tied head stays tied."""
    params = {name: each.bfloat16() for name, each in params_of(1, torch.Generator().manual_seed(0)).items()}
    model = trainfold.states.ModelState(Leaves(params), Leaves({"scale": torch.ones(2)}), (("head", "0.experts.0.w"),))
    optimizer = trainfold.optimizer(torch.optim.Adam, lr=0.1)
    slots = optimizer.init(params)
    mine = trainfold.states.OptimizerState(
        slots.kind,
        slots.slots,
        slots.groups,
        make_masters(params),
        with_grad=("0.q.weight", "0.k.weight", "0.v.weight"),
    )
    state = trainfold.TrainState(model=model, optimizer=mine)
    other = transform_state(state, RULES["fused"])
    assert other.model.ties == (("head", "0.experts.0.w"),)
    assert other.optimizer.with_grad == ("0.qkv.weight",)
    assert other.optimizer.masters["0.qkv.weight"].dtype is torch.float32
    assert torch.equal(other.optimizer.masters["0.qkv.weight"].bfloat16(), other.model.params["0.qkv.weight"])
    assert list(other.model.buffers) == ["scale"]
    assert fingerprint(transform_state(other, RULES["fused"].inverse)) == fingerprint(state)
    assert transform_state(state, compose(tie("head", "0.experts.0.w"))).model.ties == ()


def changed(optimizer, name, **slots):
    found = {key: dict(each) for key, each in optimizer.slots.items()}
    found[name] |= slots
    return trainfold.states.OptimizerState(
        optimizer.kind, Leaves({key: each for key, each in found.items() if each}), optimizer.groups
    )


def split_groups(optimizer):
    (group,) = optimizer.groups
    return trainfold.states.OptimizerState(
        optimizer.kind,
        optimizer.slots,
        tuple(trainfold.states.ParamGroup(group.hyper, (name,)) for name in group.params),
    )


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda s, o: s.evolve(optimizer=trainfold.states.OptimizerState("torch.optim._adafactor.Adafactor", o.slots, o.groups)), InvalidState, r"optimizer: expected one that updates each element for itself: ASGD, .*found torch.optim._adafactor.Adafactor"),
        (lambda s, o: s.evolve(optimizer={"mine": 1}), InvalidState, "found dict"),
        (lambda s, o: s.evolve(optimizer=changed(o, "k", step=torch.tensor(7.0))), InvalidState, r"optimizer: qk: expected parts that have an equal step, found 2.0 for q, 7.0 for k"),
        (lambda s, o: s.evolve(optimizer=changed(o, "k", extra=torch.ones(1))), InvalidState, "optimizer: qk: expected parts that have one set of slots"),
        (lambda s, o: s.evolve(optimizer=changed(changed(o, "k", row=torch.ones(2)), "q", row=torch.ones(2))), InvalidState, r"optimizer: q.row: expected a tensor of the shape \[2, 3\] of its parameter, found \[2\]"),
        (lambda s, o: s.evolve(optimizer=split_groups(o)), InvalidState, "optimizer: qk: expected parts that have one param group, found 0 for q, 1 for k"),
        (lambda s, o: s.evolve(extra={"ema": {"q": torch.ones(2)}}), InvalidArgument, "state.extra: expected nothing, .*found ema"),
        (lambda s, o: s.evolve(stage=make_stage([0], 2)), InvalidArgument, "state: expected a whole model, found stage 0 of 2"),
        (lambda s, o: s.evolve(model=trainfold.states.ModelState(Leaves({"q": make_shard(torch.ones(1, 3), shape=(2, 3), starts=(0, 0))}), Leaves())), InvalidArgument, "found the part that this rank has of q"),
        (lambda s, o: s.evolve(model=trainfold.states.ModelState(Leaves({"q": torch.ones(2, 3)}), Leaves({"k": torch.ones(2, 3)}))), InvalidState, "qk: expected parts that are all parameters"),
        (lambda s, o: s.evolve(model=None), InvalidArgument, "found none"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_in_other_pieces_is_refused_by_name(change, error, said):
    """K09: nothing is guessed: of another optimizer, other counters, groups, slots; of a part of a model, and of what may have its names."""
    rng = torch.Generator().manual_seed(0)
    params, optimizer = {"q": torch.ones(2, 3), "k": torch.ones(2, 3)}, trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    state = stepped(optimizer, state_of(params, optimizer.init(params)), rng, 2)
    transform_state(state, merge(["q", "k"], "qk"))
    with pytest.raises(error, match=said) as refused:
        transform_state(change(state, state.optimizer), merge(["q", "k"], "qk"))
    assert refused.value.fix


def test_a_transform_that_changes_values_is_refused_and_names_alone_are_given_to_any_optimizer():
    params, optimizer = (
        {"q": torch.ones(2, 3), "k": torch.zeros(2, 3)},
        trainfold.optimizer(torch.optim.Adafactor, lr=0.1),
    )
    state = stepped(optimizer, state_of(params, optimizer.init(params)), torch.Generator().manual_seed(0), 1)
    with pytest.raises(InvalidArgument, match="a transform that has an inverse"):
        transform_state(state, cast("bfloat16"))
    with pytest.raises(
        InvalidState, match="q: expected elements that are each one of the model's, found several for each"
    ):
        transform_state(state, tie("k", "q"))
    other = transform_state(state, rename("q", "query"))
    assert other.optimizer.slots["query"]["row_var"] is state.optimizer.slots["q"]["row_var"]


class Layer(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(3, rows) for name, rows in parts.items()})


def step_on_squares(model, optimizer):
    """A step whose gradients are the same bits in all pieces; a product of matrices of other shapes has them on some machines alone."""
    sum(each.square().sum() for each in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def live_of(parts, weights=None):
    torch.manual_seed(1)
    model = Layer(parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, trainfold.attach(model, optimizer)


def test_a_run_with_a_fused_layer_goes_on_from_a_directory_that_has_its_parts_and_writes_one(tmp_path):
    """M24: both ways through the state in the pieces of the directory."""
    rules = split("parts.qk.{kind}", ["parts.q.{kind}", "parts.k.{kind}"])
    model, optimizer, live = live_of({"q": 2, "k": 2})
    step_on_squares(model, optimizer)
    live.advance(samples=4)
    write_dcp_directory(tmp_path / "theirs", live.capture())
    fused, fused_optimizer, mine = live_of({"qk": 4})
    taken = take_training(transform_state(mine.capture(), rules), dcp_training(tmp_path / "theirs"))
    mine.restore(transform_state(taken, rules.inverse))
    assert mine.progress.step == 1
    for each, steps in ((model, optimizer), (fused, fused_optimizer)):
        step_on_squares(each, steps)
    for one in (live, mine):
        one.advance(samples=4)
    assert fingerprint(transform_state(mine.capture(), rules))["optimizer"] == fingerprint(live.capture())["optimizer"]
    write_dcp_directory(tmp_path / "a", live.capture())
    write_dcp_directory(tmp_path / "b", transform_state(mine.capture(), rules))
    found, wanted = (DcpDirectory(tmp_path / name) for name in "ba")
    assert cases.all_bits(cases.everything(found)) == cases.all_bits(cases.everything(wanted))
    objects = [each.objects() for each in (found, wanted)]
    for each in objects:
        each["optim.param_groups.0.params"].sort()
    assert objects[0] == objects[1]
