"""A source whose tensors are transformed: it keeps the contract, reads what a rank needs, and is one start of a run."""

import weakref
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from trainfold.adapters.live.attach import attach
from trainfold.backends.runs.api import save
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_writer import write_hub_directory
from trainfold.backends.weights.transformed import Transformed
from trainfold.core.errors import InvalidArgument, InvalidState, SourceFailed
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import volume, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.transform.apply import transform_tensors
from trainfold.core.transform.fusing import merge, split, stack, unstack
from trainfold.core.transform.naming import rename, untie
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import cast, rearrange, transpose
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource, Wanted
from trainfold.core.weights.wrapped import Cast
from trainfold.properties.contracts import check_weight_source


class Tensors:
    """A source that yields boxes, in an order of its own, and counts what it is asked for."""

    def __init__(self, tensors, order=()):
        self.tensors, self.order, self.elements = tensors, order, 0

    def specs(self):
        return {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in self.tensors.items()}

    def supply(self, wanted):
        for name in sorted(wanted, key=lambda name: (*self.order, name).index(name)):
            if name in self.tensors:
                self.elements += volume(wanted[name].box)
                yield name, self.tensors[name][tuple(slice(*pair) for pair in wanted[name].box)]


class Files(Tensors):
    """A source that gives parts in any order, and counts the bytes of those that are still there."""

    def __init__(self, tensors, ties=None):
        super().__init__(tensors)
        self.ties, self.held, self.peak, self.expected, self.read, self.checks = ties or {}, 0, 0, [], [], 0

    @contextmanager
    def opened(self):
        def read(name, box):
            found = self.tensors[name][tuple(slice(*pair) for pair in box)].clone()
            self.read.append((name, box))
            self.held += found.nbytes
            self.peak = max(self.peak, self.held)
            weakref.finalize(found.untyped_storage(), self.let_go, found.nbytes)
            return found

        def check():
            self.checks += 1

        yield OpenWeights(self.specs(), read, ties=self.ties, expect=self.expected.extend, check=check)

    def let_go(self, size_bytes):
        self.held -= size_bytes


HUB = {
    "model.layers.0.qkv.weight": torch.arange(32.0).reshape(8, 4),
    "model.layers.1.qkv.weight": torch.arange(32.0).reshape(8, 4) * 2,
    "model.layers.0.experts.0.w": torch.arange(6.0).reshape(2, 3),
    "model.layers.0.experts.1.w": -torch.arange(6.0).reshape(2, 3),
    "model.embed": torch.arange(10.0).reshape(5, 2),
}
RULES = compose(
    split("model.layers.{i}.qkv.weight", [f"layers.{{i}}.{part}" for part in ("q", "k", "v")], shares=(2, 1, 1)),
    rearrange("layers.{i}.q", "(h two d) i -> (h d two) i", h=1, two=2),
    stack("model.layers.{i}.experts.{e}.w", "layers.{i}.experts", over="e"),
    rename("model.embed", "embed"),
    untie("head", "embed"),
    transpose("head"),
)
MINE = {
    **{f"layers.{i}.q": HUB[f"model.layers.{i}.qkv.weight"][[0, 2, 1, 3]] for i in range(2)},
    **{f"layers.{i}.k": HUB[f"model.layers.{i}.qkv.weight"][4:6] for i in range(2)},
    **{f"layers.{i}.v": HUB[f"model.layers.{i}.qkv.weight"][6:] for i in range(2)},
    "layers.0.experts": torch.stack([HUB["model.layers.0.experts.0.w"], HUB["model.layers.0.experts.1.w"]]),
    "embed": HUB["model.embed"],
    "head": HUB["model.embed"].T,
}


def test_it_keeps_the_contract_whatever_it_is_made_of(tmp_path):
    """J01: all, a few, parts of ranks, names that it does not have, and again."""
    save_file(HUB, tmp_path / "model.safetensors")
    check_weight_source(lambda: Transformed(Tensors(HUB), RULES), MINE)
    check_weight_source(lambda: Transformed(HubDirectory(tmp_path), RULES), MINE)
    assert isinstance(HubDirectory(tmp_path), ListedSource)
    twice = Transformed(Transformed(Tensors(HUB), RULES), rename("layers.{path*}", "h.{path*}"))
    check_weight_source(lambda: twice, {name.replace("layers.", "h."): each for name, each in MINE.items()})


@given(st.permutations(sorted(HUB)), st.data())
def test_whatever_comes_first_a_rank_gets_its_parts_and_reads_no_more_than_their_boxes(order, data):
    """J01: tensors wait for those that they are put together with, in any order."""
    wanted, rows = {}, 0
    for name in data.draw(st.sets(st.sampled_from(sorted(MINE)), min_size=1)):
        shape = tuple(MINE[name].shape)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
        wanted[name] = Wanted("float32", shape, ((start, stop), *((0, size) for size in shape[1:])))
        rows += stop - start
    source = Tensors(HUB, order)
    found = dict(Transformed(source, RULES).supply(wanted))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], MINE[name][tuple(slice(*pair) for pair in wanted[name].box)]) for name in found)
    assert source.elements <= sum(each.numel() for each in HUB.values())
    if wanted.keys() == {"layers.1.v"}:
        assert source.elements == 4 * rows


def test_tensors_are_let_go_when_nothing_needs_them_any_more(monkeypatch):
    """J01: the memory is that of what waits, not of the model; of a source that cannot be opened."""
    made, clone = [], torch.Tensor.clone

    def counted(tensor):
        found = clone(tensor)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch.Tensor, "clone", counted)

    class Counted(Tensors):
        def supply(self, wanted):
            for name, tensor in super().supply(wanted):
                assert sum(each() is not None for each in made) <= 3, "two that wait, and the one that was used last"
                copy = tensor.clone()  # which is counted
                yield name, copy
                del copy

    many = {f"{i}.{part}": torch.ones(1) for i in range(8) for part in "qk"}
    found = Transformed(Counted(many), merge(["{i}.q", "{i}.k"], "{i}.qk")).supply(
        {f"{i}.qk": Wanted("float32", (2,), ((0, 2),)) for i in range(8)}
    )
    assert [name for name, _ in found] == [f"{i}.qk" for i in range(8)]


@given(st.data())
def test_of_a_source_that_can_be_opened_no_more_is_held_than_one_result_needs(data):
    """J01: streamed == all at once; stacks of all layers waited for the last of them, the whole model at once."""
    layers = 4
    many = {f"{i}.{part}": torch.rand(3, 2) for i in range(layers) for part in "qkvx"}
    rules = compose(
        merge(["{i}.q", "{i}.k"], "{i}.qk"), stack("{i}.qk", "qk", over="i"), stack("{i}.v", "v", over="i"), cast("bfloat16", only="v"), transpose("{i}.x")
    )  # fmt: skip
    source = Files(many)
    made = dict(transform_tensors(rules, many))
    wanted = {}
    for name in data.draw(st.sets(st.sampled_from(sorted(made)), min_size=1)):
        shape = tuple(made[name].shape)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
        wanted[name] = Wanted(dtype_name(made[name].dtype), shape, ((start, stop), *whole_box(shape[1:])))
    found = {}
    for name, tensor in Transformed(source, rules).supply(wanted):
        found[name] = tensor.clone()
        del tensor
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert torch.equal(found[name], made[name][tuple(slice(*pair) for pair in each.box)])
    assert source.peak <= 2 * layers * many["0.q"].nbytes, "what the largest stack is made of"
    fused = [name for name in ("qk", "v") if name in wanted and volume(wanted[name].box) > (6 if name == "v" else 0)]
    assert {name[-1] for name, _ in source.read} == {*"".join(fused)}
    assert source.expected == source.read
    assert source.checks == bool(source.read), "it is asked at the end whether it is what it was"


def test_what_is_put_together_comes_of_one_checkpoint(tmp_path):
    """J01: what is read for one result and what is streamed for another, though a newer checkpoint lands in between."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in "abc"})
    live = attach(model)
    save(live.capture(), tmp_path)
    source = Transformed(CheckpointWeights(tmp_path), merge(["a", "b"], "ab"))
    found = source.supply({"c": Wanted("float32", (2,), ((0, 2),)), "ab": Wanted("float32", (4,), ((0, 4),))})
    assert next(found)[0] == "c"
    with torch.no_grad():
        model["a"].fill_(2)
    live.advance(samples=1)
    save(live.capture(), tmp_path)
    assert next(found)[1].tolist() == [1, 1, 1, 1]


def test_tied_weights_and_buffers_are_still_such_when_they_have_other_names(tmp_path):
    """L08: a tied weight was written twice, once for each of its names, and a buffer was rounded."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.wte.weight
            self.register_buffer("mean", torch.ones(2))

    save(attach(Model()).capture(), tmp_path / "run")
    source = Transformed(CheckpointWeights(tmp_path / "run"), rename("{path*}", "model.{path*}"))
    plan = write_hub_directory(source, tmp_path / "hub", dtype="bfloat16")
    dtypes = {name: each.dtype for name, each in HubDirectory(tmp_path / "hub").specs().items()}
    assert dtypes == {"model.wte.weight": "bfloat16", "model.mean": "float32"}
    assert plan.left_out == {"model.head.weight": "tied to model.wte.weight"}
    wanted = {name: Wanted("float32", (3, 2), ((0, 3), (0, 2))) for name in ("model.head.weight", "model.wte.weight")}
    assert dict(source.supply(wanted)).keys() == wanted.keys()
    both = Transformed(Files({"a": torch.ones(2), "b": torch.ones(2)}, ties={"c": "a"}), merge(["c", "b"], "cb"))
    with both.opened() as weights:
        assert weights.read("cb", ((0, 4),)).tolist() == [1, 1, 1, 1]


def test_a_model_starts_from_a_hub_directory_with_other_names_and_another_dtype(tmp_path):
    """J01, J03, K06: what the model has not is not taken, what is missing is named before anything trains."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2)})
    weights = {
        "w.0": torch.randn(3, 2, dtype=torch.bfloat16),
        "b.0": torch.randn(2, dtype=torch.bfloat16),
        "w.1": torch.randn(2, 2, dtype=torch.bfloat16),
    }
    save_file(weights | {"b.1": torch.zeros(2), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    rules = compose(
        transpose("w.{i}"),
        rename("w.0", "a.weight"),
        rename("w.1", "b.weight"),
        rename("b.0", "a.bias"),
        rename("b.1", "b.bias"),
    )
    live = attach(model, weights=Transformed(HubDirectory(tmp_path), compose(rules, cast("float32"))))
    live.take_weights()
    assert torch.equal(model["a"].weight, weights["w.0"].T.float())
    assert torch.equal(model["b"].weight, weights["w.1"].T.float())
    attach(model, weights=Cast(Transformed(HubDirectory(tmp_path), rules))).take_weights()
    with pytest.raises(InvalidState, match=r"b\.bias"):
        attach(model, weights=Transformed(HubDirectory(tmp_path), rules.parts[0])).take_weights()


def test_what_cannot_be_planned_is_refused_before_anything_is_read():
    """K09."""

    class Unlisted:
        def supply(self, wanted):
            raise AssertionError("it was asked")

    with pytest.raises(InvalidArgument, match="a source that lists what it has"):
        list(Transformed(Unlisted(), RULES).supply({}))
    with pytest.raises(InvalidState, match="a first dimension"):
        list(Transformed(Tensors({"x": torch.tensor(1.0)}), unstack("x", "x.{e}", over="e")).supply({}))


class Otherwise(Tensors):
    """A source that does not supply what it lists."""

    def __init__(self, supplied):
        super().__init__({"a": torch.ones(2), "b": torch.ones(2)})
        self.supplied = supplied

    def supply(self, wanted):
        return iter(self.supplied)


@pytest.mark.parametrize(
    ("supplied", "said"),
    [
        ([("c", torch.ones(2))], "'c'. from Otherwise: expected one of the 2 names that were asked for"),
        ([("a", torch.ones(3))], r"'a'. from Otherwise: expected the shape \[2\], found \[3\]"),
        ([("a", torch.ones(2).half())], "'a'. from Otherwise: expected float32, found float16"),
        ([("a", torch.ones(2))] * 2, "'a'. from Otherwise: expected each name once"),
    ],
)
def test_a_source_that_supplies_something_else_than_it_lists_is_named(supplied, said):
    """J03: a name that nothing had asked for was a bare KeyError."""
    asked = {name: Wanted("float32", (2,), ((0, 2),)) for name in ("x", "y")}
    with pytest.raises(InvalidState, match=said):
        list(Transformed(Otherwise(supplied), compose(rename("a", "x"), rename("b", "y"))).supply(asked))


@pytest.mark.parametrize(
    ("read", "error", "said"),
    [
        (lambda *_: torch.ones(3), InvalidState, r"'a'. from Badly: expected the shape \[2\], found \[3\]"),
        (lambda *_: torch.ones(2).half(), InvalidState, "'a'. from Badly: expected float32, found float16"),
        (lambda *_: 1 / 0, SourceFailed, "'a'. from Badly: expected a part of a tensor, found ZeroDivisionError"),
    ],
)
def test_a_source_that_reads_something_else_than_it_lists_is_named(read, error, said):
    """J03."""

    class Badly(Tensors):
        @contextmanager
        def opened(self):
            yield OpenWeights(self.specs(), read)

    source = Transformed(Badly({"a": torch.ones(2), "b": torch.ones(2)}), merge(["a", "b"], "ab"))
    with pytest.raises(error, match=said):
        list(source.supply({"ab": Wanted("float32", (4,), ((0, 4),))}))


def test_a_source_that_uses_its_memory_again_gives_each_tensor_of_a_whole():
    """J01: tensors that wait for others are copied before the next one is asked for."""

    class OneBuffer:
        def specs(self):
            return {name: LeafSpec("float32", (2,)) for name in "abc"}

        def supply(self, wanted):
            memory = torch.empty(2)
            for number, name in enumerate("abc"):
                if name in wanted:
                    yield name, memory.fill_(number)

    ((_, found),) = Transformed(OneBuffer(), merge(["a", "b", "c"], "abc")).supply(
        {"abc": Wanted("float32", (6,), ((0, 6),))}
    )
    assert found.tolist() == [0, 0, 1, 1, 2, 2]
