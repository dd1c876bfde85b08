"""States of live runs in other pieces: ties, frozen parameters and the contract, which the optimizer does not show."""

import pytest
import torch

import trainfold
from trainfold.core.errors import InvalidState
from trainfold.core.format.fingerprint import fingerprint
from trainfold.transforms import (
    compose,
    hub_rules,
    merge,
    rearrange,
    rename,
    stack,
    tie,
    transform_state,
    transpose,
    untie,
)
from trainfold.weights import dcp_training, take_training, write_dcp_directory

TIE = tie("head.weight", "emb.weight")
FUSED = merge(["q.{kind}", "k.{kind}"], "qk.{kind}")


def tied(emb="emb", head="head"):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({emb: torch.nn.Embedding(4, 4), head: torch.nn.Linear(4, 4, bias=False)})
    model[head].weight = model[emb].weight
    return model


def parts(**frozen):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(3, 2), "k": torch.nn.Linear(3, 2), "o": torch.nn.Linear(4, 1)})
    for name, is_frozen in frozen.items():
        model[name].requires_grad_(not is_frozen)
    return model


def run(model, steps, kind=torch.optim.AdamW, **options):
    optimizer = kind(model.parameters(), lr=0.1, **options)
    live = trainfold.attach(model, optimizer)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=1)
    return live


@pytest.mark.parametrize(
    "transform",
    [
        TIE,
        compose(rename("emb.{rest*}", "embed.{rest*}"), tie("head.weight", "embed.weight")),
        compose(transpose("emb.weight"), transpose("head.weight")),
        rename("emb.{rest*}", "embed.{rest*}"),
        untie("other.weight", "emb.weight"),
    ],
    ids=str,
)
def test_what_was_tied_is_tied_again_by_the_inverse(transform):
    """B11, K01: it came back as two parameters, each with moments of its own, and was trained apart."""
    model = tied()
    live = run(model, 2)
    state = live.capture()
    other = transform_state(state, transform)
    assert len(other.optimizer.groups[0].params) == len(other.model.params) == 1
    again = transform_state(other, transform.inverse)
    assert again.model.ties == state.model.ties
    assert fingerprint(again) == fingerprint(state)
    assert again.contract == state.contract
    live.restore(again)


def test_a_tied_model_takes_a_directory_of_its_hub_names_with_rules_that_tie(tmp_path):
    """M24: the flow of the page, for a tied model."""
    rules = hub_rules("llama", heads=2, kv_heads=2, head_dim=2, tied=True)
    live = run(tied("tok_embeddings", "output"), 1)
    write_dcp_directory(tmp_path / "theirs", transform_state(live.capture(), rules))
    mine = run(tied("tok_embeddings", "output"), 0)
    taken = take_training(transform_state(mine.capture(), rules), dcp_training(tmp_path / "theirs"))
    mine.restore(transform_state(taken, rules.inverse))
    assert fingerprint(mine.capture())["optimizer"] == fingerprint(live.capture())["optimizer"]
    assert mine.capture().model.ties == (("output.weight", "tok_embeddings.weight"),)


def test_rules_that_do_not_tie_bring_a_tied_model_of_the_hub_to_the_names_of_reference_code():
    """B11: those that bring a head back are refused, with these as the next move."""
    model = torch.nn.ModuleDict({"model": tied("embed_tokens", "head")})
    model["lm_head"] = model["model"].pop("head")
    state = run(model, 1).capture()
    rules = {
        is_tied: hub_rules("llama", heads=2, kv_heads=2, head_dim=2, tied=is_tied).inverse for is_tied in (True, False)
    }
    other = transform_state(state, rules[False])
    assert other.model.ties == (("output.weight", "tok_embeddings.weight"),)
    assert fingerprint(transform_state(other, rules[False].inverse)) == fingerprint(state)
    with pytest.raises(InvalidState, match=r"expected no (output|lm_head).weight beside .*tied=False"):
        transform_state(state, rules[True])


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (transpose("head.weight"), r"^(head|emb).weight: expected elements of its own, or a tie: .*found elements of emb.weight, which is tied to head.weight, in emb.weight and head.weight"),
        (rearrange("head.weight", "(a b) i -> (b a) i", a=2), "which is tied to head.weight"),
        (compose(rename("emb.weight", "x.0"), rename("head.weight", "x.1"), stack("x.{i}", "both", over="i")), "which is tied to head.weight"),
        (untie("head.weight", "emb.weight"), r"untie head.weight from emb.weight: expected no head.weight beside emb.weight.*tie_word_embeddings"),
    ],
)  # fmt: skip
def test_one_tensor_is_never_made_two_in_silence(transform, said):
    """B11: a head alone in another form would be trained apart from the embeddings."""
    with pytest.raises(InvalidState, match=said):
        transform_state(run(tied(), 1).capture(), transform)


@pytest.mark.parametrize(
    ("kind", "options", "steps"), [(torch.optim.SGD, {"weight_decay": 0.1}, 2), (torch.optim.AdamW, {}, 0)]
)
def test_a_frozen_part_is_not_put_together_with_a_trained_one(kind, options, steps):
    """B08: neither slots nor groups show it before the first step; the fused parameter trained the frozen half."""
    with pytest.raises(InvalidState, match=r"^optimizer: qk.weight: expected parts that are all trained or all frozen, found q.weight is trained, k.weight is frozen") as refused:  # fmt: skip
        transform_state(run(parts(k=True), steps, kind, **options).capture(), FUSED)
    assert "state.evolve(optimizer=None)" in refused.value.fix
    alone = run(parts(k=True), steps, kind, **options).capture().evolve(optimizer=None)
    assert "attached.optimizer.frozen" not in transform_state(alone, FUSED).contract
    state = run(parts(q=True, k=True), steps, kind, **options).capture()
    assert transform_state(state, FUSED).contract["attached.optimizer.frozen"] == ["qk.bias", "qk.weight"]


def test_a_part_frozen_since_the_attach_counts_too():
    """B08: the contract notes what changed."""
    model = parts()
    live = run(model, 1)
    model["k"].requires_grad_(requires_grad=False)
    with pytest.raises(InvalidState, match=r"k\.weight is frozen"):
        transform_state(live.capture(), FUSED)
    model["q"].requires_grad_(requires_grad=False)
    found = transform_state(live.capture(), FUSED)
    assert found.contract["requires_grad"] == {"model.qk.bias": False, "model.qk.weight": False}
    again = transform_state(found, FUSED.inverse).contract
    assert again == {key: each for key, each in live.capture().contract.items() if key[-2:] not in (".q", ".k")}


def many(frozen=76):
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(80))
    for each in list(model)[:frozen]:
        each.requires_grad_(requires_grad=False)
    return model


def attached_many(*, is_in_optimizer):
    model = many()
    of = model.parameters() if is_in_optimizer else [each for each in model.parameters() if each.requires_grad]
    return trainfold.attach(model, torch.optim.SGD(of, lr=0.1))


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_in_optimizer", [False, True])
def test_of_many_frozen_parameters_the_names_are_known(is_in_optimizer, is_listed):
    """B08: what is compared lists 64; older checkpoints have a digest of the others alone, which fits those that the optimizer does not have."""
    state = attached_many(is_in_optimizer=is_in_optimizer).capture()
    if not is_listed:
        state = state.evolve(contract={key: each for key, each in state.contract.items() if key != "frozen"})
    if is_in_optimizer and not is_listed:
        with pytest.raises(InvalidState, match="not known, because there are too many frozen ones to list"):
            transform_state(state, merge(["76.weight", "77.weight"], "a.weight"))
        return
    found = transform_state(state, merge(["76.weight", "77.weight"], "a.weight"))
    assert found.contract["attached.optimizer.frozen"] == state.contract["attached.optimizer.frozen"]
    with pytest.raises(InvalidState, match=r"0\.weight is frozen"):
        transform_state(state, merge(["77.weight", "0.weight"], "a.weight"))


def test_many_frozen_parameters_that_the_optimizer_has_keep_their_names_in_a_rename(tmp_path):
    """B08: before the first step nothing in the optimizer distinguishes them from the others; the contract lost them, and a resume met settings that differ."""
    state = attached_many(is_in_optimizer=True).capture()
    rules = rename("{i}.weight", "h.{i}.weight")
    renamed = transform_state(state, rules)
    body = torch.nn.ModuleDict({"h": many()})
    wanted = trainfold.attach(body, torch.optim.SGD(body.parameters(), lr=0.1)).capture()
    assert wanted.contract["attached.optimizer.frozen"][0] == "h.0.weight"
    for key in ("attached.optimizer.frozen", "frozen"):
        assert renamed.contract[key] == wanted.contract[key]
    assert transform_state(renamed, rules.inverse).contract == state.contract
    trainfold.save(state, tmp_path)
    plan = trainfold.plan(tmp_path, like=wanted, transform=rules)
    assert not any("frozen" in drift.where for drift in plan.drifts)
    assert plan.manifest.contract["frozen"] == wanted.contract["frozen"]


def test_a_run_in_other_pieces_resumes_from_a_checkpoint_of_the_state(tmp_path):
    """V12: settings of groups and modules were compared under names that were no more, and refused."""
    live = run(parts(), 1)
    state = transform_state(live.capture(), FUSED)
    assert state.contract["attached.model.o"] == {"kind": "Linear"}
    assert {key for key in state.contract if "'" in key} == {key.replace("k.bias", "o.bias") for key in live.capture().contract if "'" in key}  # fmt: skip
    assert not any(key in ("attached.model.q", "attached.model.k") for key in state.contract)
    trainfold.save(state, tmp_path / "run")
    model = torch.nn.ModuleDict({"qk": torch.nn.Linear(3, 4), "o": torch.nn.Linear(4, 1)})
    mine = run(model, 0)
    told = pytest.warns(UserWarning, match=r"attached.model.qk: saved nothing, wanted {'kind': 'Linear'}")
    with trainfold.CheckpointManager(tmp_path / "run", every=1) as manager, told:
        manager.restore(mine)
    assert mine.progress.step == 1
    again = transform_state(mine.capture(), FUSED.inverse)
    assert fingerprint(again)["optimizer"] == fingerprint(live.capture())["optimizer"]


def test_settings_of_a_module_go_with_its_name_and_origins_with_the_pieces():
    """V16: the contract has no name that the model has not."""
    state = run(parts(), 1).capture()
    state = state.evolve(
        contract={
            **state.contract,
            "weights.from": [["base", ["q.*", "q.weight", "o.weight"]]],
            "gradient_orders": {"model": "0 1"},
        }
    )
    other = transform_state(state, rename("q.{rest*}", "query.{rest*}"))
    assert other.contract["attached.model.query"] == {"kind": "Linear"}
    assert other.contract["weights.from"] == [["base", ["q.*", "query.weight", "o.weight"]]]
    assert other.contract["gradient_orders"] == {"model": "0 1"}
    fused = transform_state(state, FUSED)
    assert fused.contract["weights.from"] == [["base", ["q.*", "qk.weight", "o.weight"]]]
    assert "gradient_orders" not in fused.contract


def test_values_from_outside_that_have_another_name_are_of_the_state(tmp_path):
    """V07: a source from outside does not have that name, so a checkpoint has the values."""
    model = parts(q=True, k=True)
    trainfold.save(trainfold.attach(model).capture(), tmp_path / "base")
    source = trainfold.weights.Frozen(trainfold.weights.CheckpointWeights(tmp_path / "base"))
    live = trainfold.attach(model, torch.optim.AdamW(model["o"].parameters()), weights=source)
    live.take_weights()
    state = live.capture()
    assert state.origin.frozen
    assert "weights.outside" in state.contract
    other = transform_state(state, FUSED)
    assert other.origin.frozen == frozenset()
    assert "weights.outside" not in other.contract
    assert transform_state(state, rename("o.{rest*}", "out.{rest*}")).origin.frozen == state.origin.frozen
