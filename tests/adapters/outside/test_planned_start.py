"""The plan of a run that would begin with the weights of a source: it says before anything is read what a restore then does, or why it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, ResumeRefused, TrainfoldError
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.components import select
from trainfold.core.weights.several.fresh_start import FreshStart
from trainfold.weights import ByScript, Cast, CheckpointWeights, Frozen, LoadSpec, SeveralSources

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "other")
SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (1, 3), "1.bias": (1,), "other": (2,)}


class Listed:
    """A source of some tensors; it counts the reads."""

    def __init__(self, number, forms):
        self.number, self.forms, self.reads = number, forms, 0

    def __repr__(self):
        return f"Listed({self.number})"

    def specs(self):
        return {name: LeafSpec(dtype, shape) for name, (dtype, shape) in self.forms.items()}

    def supply(self, wanted):
        for name in wanted:
            if name in self.forms:
                self.reads += 1
                dtype, shape = self.forms[name]
                yield name, torch.full(shape, float(self.number), dtype=getattr(torch, dtype))


@st.composite
def sources(draw):
    specs = []
    for number in range(draw(st.integers(1, 3))):
        names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
        dtypes, shapes = st.sampled_from(("float32", "float32", "float16")), st.sampled_from((0, 0, 0, 1))
        forms = {name: (draw(dtypes), tuple(n + draw(shapes) for n in SHAPES[name])) for name in sorted(names)}
        source = Listed(number, forms)
        mode = draw(st.sampled_from(("used", "any", "any", "filled")))
        kept = Cast(source) if draw(st.booleans()) else source
        specs.append(LoadSpec(kept, strict=mode, overrides=draw(st.booleans())))
    if draw(st.booleans()):
        specs.append(ByScript())
    return SeveralSources(specs) if len(specs) > 1 or draw(st.booleans()) else specs[0].source


def script(*, frozen=False):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(not frozen)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained)


def run_of(kind):
    store = MemoryStore()
    live = attach(*script())
    if kind in ("saved", "damaged"):
        live.advance(samples=1)
        save(live.capture(), store)
    if kind == "damaged":
        store.delete("step-00000001/manifest.json")
    if kind == "unfinished":
        store.write("step-00000001/model-00000-of-00001.safetensors", [b"half"], size_bytes=4)
    return store


@settings(deadline=None, max_examples=60)
@given(sources(), st.sampled_from(("empty", "empty", "unfinished", "saved", "damaged")), st.booleans())
def test_a_plan_with_initial_weights_says_what_a_restore_does(source, kind, frozen):
    """V02: the order of sources, and what is ignored and why; V10: whatever does not fit refuses the plan before anything is read. V18: it is what the restore does."""
    store, base = run_of(kind), MemoryStore()
    save(attach(script()[0]).capture(), base)
    frozen = frozen and kind in ("empty", "unfinished")  # the others have saved all of the model
    model, optimizer = script(frozen=frozen)
    live = attach(model, optimizer, weights=Frozen(CheckpointWeights(base)) if frozen else None)
    planned = plan(store, like=live.capture(), initial=source)
    parts = [each.source for each in source.sources] if isinstance(source, SeveralSources) else [source]
    listed = [getattr(each, "source", each) for each in parts]
    assert not any(getattr(each, "reads", 0) for each in listed)
    try:
        with CheckpointManager(store) as manager:
            restored = manager.restore(live, initial=source)
    except TrainfoldError as error:
        assert isinstance(planned, Refusal)
        said = error.refusal.reasons if isinstance(error, ResumeRefused) else getattr(error, "reasons", (error,))
        assert [each.where for each in planned.reasons] == [each.where for each in said]
        return
    if kind == "saved":
        assert isinstance(planned, ResumePlan)
        assert f"initial weights ignored: {restored.ignored[0]}" in str(planned)
        return
    assert isinstance(planned, FreshStart)
    assert planned.weights == restored.weights
    taken = {name: each.element_size() * each.numel() for name, each in model.state_dict().items() if name in planned.weights.sources}  # fmt: skip
    assert planned.size_bytes == sum(size for name, size in taken.items() if name not in planned.weights.by_script)
    assert all(str(use) in str(planned) for use in planned.weights.uses)


def test_the_plan_of_a_start_shows_each_source_and_what_all_else_begins_with():
    live = attach(*script())
    body = Listed(1, {"0.weight": ("float32", (3, 2)), "0.bias": ("float16", (3,)), "old": ("float32", (9,))})
    head = Listed(2, {"0.bias": ("float32", (3,)), "1.weight": ("float32", (1, 3))})
    source = SeveralSources([LoadSpec(Cast(body), strict="any"), LoadSpec(head, overrides=True), ByScript()])
    assert str(plan(MemoryStore(), like=live.capture(), initial=source)).splitlines()[1:] == [
        "in order     a step that is asked for: none; checkpoints of the run: none; initial: taken",
        "model        Cast(Listed(1)): 1 tensors; overridden: 0.bias; not used, as the model does not have them: old",
        "model        Listed(2): 2 tensors",
        "model        ByScript(): 1 tensors",
        "optimizer    as the script has it",
        "trainer      as the script has it",
        "rng          as the script has it",
    ]


def test_no_start_is_planned_where_a_restore_would_refuse_it(tmp_path):
    """K09: a step that is asked for, a folder of something else, a state without a model, a source that is not one."""
    live = attach(*script())
    source = SeveralSources([ByScript()])
    assert isinstance(plan(MemoryStore(), like=live.capture(), initial=source, step=3), Refusal)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (reason,) = plan(tmp_path, like=live.capture(), initial=source).reasons
    assert reason.error == "CheckpointForeign"
    with pytest.raises(InvalidArgument, match=r"plan.like: .*a model"):
        plan(MemoryStore(), like=select(live.capture(), ["trainer"]), initial=source)
    for wrong in ("models/base", ByScript(), Frozen(source)):
        with pytest.raises(InvalidArgument, match=r"plan.initial"):
            plan(MemoryStore(), like=live.capture(), initial=wrong)
    outside = attach(script()[0], weights=ByScript())
    with pytest.raises(InvalidArgument, match=r"plan.initial: .*outside at each start"):
        plan(MemoryStore(), like=outside.capture(), initial=source)


def test_a_source_that_cannot_be_opened_is_a_reason():
    live = attach(*script())
    refused = plan(MemoryStore(), like=live.capture(), initial=CheckpointWeights(MemoryStore()))
    assert [each.error for each in refused.reasons] == ["CheckpointMissing"]
