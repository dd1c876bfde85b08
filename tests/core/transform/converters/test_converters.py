"""Converters: views partition the weights, exports have the names and values of a model without the converter, and parts of them the bits of the whole."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.transform.apply import table_of, transform_specs, transform_tensors
from trainfold.core.transform.converters.converter import chain, view
from trainfold.core.transform.converters.lora import lora, lora_of
from trainfold.core.transform.converters.quantised import quantised
from trainfold.core.transform.naming import drop, rename, tie, untie
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import cast
from trainfold.properties.contracts import ContractBroken, check_converter

PEFT = "base_model.model."


@st.composite
def adapted(draw):
    """A model with some wrapped layers, its converter, and what it computes."""
    is_transposed, is_stabilised, is_decomposed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    alpha, alphas = (
        draw(st.sampled_from((1.0, 16.0, 3.0))),
        draw(st.sampled_from(({}, {"0.q": 5.0}, {r"layers\.\d.q": 2.0, "q": 7.0}))),
    )
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def some(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    tensors, wanted = {f"{PEFT}norm.weight": some(3)}, {}
    wanted["norm.weight"] = tensors[f"{PEFT}norm.weight"]
    for layer in range(draw(st.integers(1, 3))):
        rows, columns, rank = (draw(st.integers(1, 5)) for _ in range(3))
        is_embedding = draw(st.booleans())
        inputs_first = is_transposed or is_embedding
        shape = (columns, rows) if inputs_first else (rows, columns)
        name, low = f"layers.{layer}.q", ("lora_embedding_{}.default" if is_embedding else "lora_{}.default.weight")
        base, a, b, bias = some(*shape), some(rank, columns), some(rows, rank), some(rows)
        tensors |= {
            f"{PEFT}{name}.base_layer.weight": base,
            f"{PEFT}{name}.base_layer.bias": bias,
            f"{PEFT}{name}.{low.format('A')}": a,
            f"{PEFT}{name}.{low.format('B')}": b,
        }
        own = alphas.get("0.q", alpha) if layer == 0 else alpha
        own = alphas.get(r"layers\.\d.q", own)
        delta = (b.double() @ a.double()) * (own / (rank**0.5 if is_stabilised else rank))
        rows_of = (base.double().T if inputs_first else base.double()) + delta
        if is_decomposed:
            lengths = some(rows)
            tensors[f"{PEFT}{name}.lora_magnitude_vector.default.weight"] = lengths
            rows_of = rows_of / rows_of.norm(dim=1, keepdim=True) * lengths.double()[:, None]
        wanted |= {f"{name}.weight": rows_of.T if inputs_first else rows_of, f"{name}.bias": bias}
    for name in draw(st.sets(st.sampled_from(("head.weight", "score.dense.bias")))):
        module, _, inner = name.partition(".")
        tensors |= {f"{PEFT}{module}.original_module.{inner}": some(2), f"{PEFT}{module}.modules_to_save.default.{inner}": some(2)}  # fmt: skip
        wanted[name] = tensors[f"{PEFT}{module}.modules_to_save.default.{inner}"]
    return (
        lora(
            alpha=alpha,
            rank_stabilised=is_stabilised,
            fan_in_fan_out=is_transposed,
            alphas=alphas,
            decomposed=is_decomposed,
        ),
        tensors,
        wanted,
    )


@given(adapted())
def test_an_export_of_adapters_is_the_base_with_their_product_by_its_own_names(case):
    """K03, M39: rank-stabilised scales, scales by layer, modules that are trained whole, and weights with their inputs first too; what is not adapted keeps its bits."""
    converter, tensors, wanted = case
    check_converter(converter, tensors)
    found = dict(transform_tensors(converter, tensors))
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        if "q.weight" in name:
            torch.testing.assert_close(found[name].double(), each.double(), rtol=2e-2 if found[name].dtype == torch.bfloat16 else 1e-5, atol=1e-4)  # fmt: skip
        else:
            assert torch.equal(found[name], each)


@given(adapted())
def test_a_base_beside_its_adapters_is_merged_as_one_that_they_wrap(case):
    """K03: what a hub has and what a run of adapters has, together, are the export of the whole model."""
    converter, tensors, _ = case
    base = dict(transform_tensors(view(converter, "base"), tensors))
    owned = dict(transform_tensors(view(converter, "owned"), tensors))
    assert len(base) + len(owned) == len(tensors)
    apart = dict(transform_tensors(converter, base | owned))
    whole = dict(transform_tensors(converter, tensors))
    assert apart.keys() == whole.keys()
    assert all(torch.equal(apart[name], whole[name]) for name in whole)


BLOCKS = {"tensor": (None, None), "row": (1, None), "block": (2, 3)}


@given(st.sampled_from(sorted(BLOCKS)), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.booleans())
def test_an_export_of_quantised_weights_is_their_product_with_the_scales(kind, rows, columns, is_int, keeps_dims):
    """K06: float8 and int8, with a scale for a tensor, a row or a block with ragged edges. K04: payload and scales keep their dtypes in every other view, also under a cast."""
    block = BLOCKS[kind]
    payload = torch.arange(rows * columns).reshape(rows, columns) % 17 - 8
    payload = payload.to(torch.int8 if is_int else torch.float8_e4m3fn)
    sizes = [size if each is None else each for size, each in zip((rows, columns), block, strict=True)]
    grid = [-(-size // each) for size, each in zip((rows, columns), sizes, strict=True)]
    scale = torch.linspace(0.5, 2, grid[0] * grid[1]).reshape(grid)
    whole = scale.repeat_interleave(sizes[0], 0)[:rows].repeat_interleave(sizes[1], 1)[:, :columns]
    given_scale = scale if keeps_dims or kind == "block" else scale[:, 0] if kind == "row" else scale[0, 0]
    tensors = {"q.weight": payload, "q.weight_scale": given_scale, "norm.weight": torch.ones(2)}
    converter = quantised("{layer*}.weight", "{layer*}.weight_scale", block=block, dtype="float32")
    check_converter(converter, tensors)
    found = dict(transform_tensors(view(converter, "export"), tensors))
    assert torch.equal(found["q.weight"], payload.float() * whole)
    for which in ("full", "base"):
        kept = transform_specs(
            compose(view(converter, which), cast("bfloat16", without="{layer*}.weight_scale")), _specs(tensors)
        )
        assert kept["q.weight"].dtype == ("int8" if is_int else "float8_e4m3fn")
        assert which == "base" or kept["q.weight_scale"].dtype == "float32"


def _specs(tensors):
    return {name: LeafSpec(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()}


@st.composite
def adapted_and_quantised(draw):
    """Layers that are plain, quantised, adapted, or both, and what each of them is in the end."""
    generator, tensors, wanted = torch.Generator().manual_seed(draw(st.integers(0, 99))), {}, {}
    kinds = draw(st.lists(st.sampled_from(("plain", "quantised", "adapted", "both")), max_size=3))
    for layer, kind in enumerate(("both", "plain", *kinds)):
        base = torch.randint(-9, 9, (3, 2), generator=generator)
        weight = f"{layer}.base_layer.weight" if kind in ("adapted", "both") else f"{layer}.weight"
        tensors[weight] = base.to(torch.int8 if kind in ("quantised", "both") else torch.float32)
        value = base.float()
        if kind in ("quantised", "both"):
            tensors[f"{weight}_scale"] = torch.rand(3, 1, generator=generator)
            value = value * tensors[f"{weight}_scale"]
        if kind in ("adapted", "both"):
            a, b = torch.randn(1, 2, generator=generator), torch.randn(3, 1, generator=generator)
            tensors |= {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
            value = value + b @ a * 4
        wanted[f"{layer}.weight"] = value
    return tensors, wanted


SCALES = quantised("{layer*}.weight", "{layer*}.weight_scale", block=(1, None), dtype="float32")


@given(adapted_and_quantised(), st.permutations(range(12)))
def test_a_chain_of_converters_is_a_converter(case, order):
    """K03: its views partition the weights, and its export is that of the adapters on the weights that the scales give."""
    tensors, wanted = case
    names = [name for _, name in sorted(zip(order * 2, tensors, strict=False))]
    tensors = {name: tensors[name] for name in names}
    both = chain(SCALES, lora(alpha=4))
    check_converter(both, tensors)
    found = dict(transform_tensors(view(both, "export"), tensors))
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each)
    one_by_one = compose(view(SCALES, "export"), view(lora(alpha=4), "export"))
    assert {name: each.tolist() for name, each in transform_tensors(one_by_one, tensors)} == {name: each.tolist() for name, each in found.items()}  # fmt: skip
    for same in (chain(chain(SCALES), lora(alpha=4)), chain(SCALES, chain(lora(alpha=4)), chain())):
        assert [*map(same.key_filter, names)] == [*map(both.key_filter, names)]
        assert [*map(same.state_dict_adapter, names)] == [*map(both.state_dict_adapter, names)]
        assert str(view(same, "export")) == str(view(both, "export"))


def test_a_chain_in_the_wrong_order_says_what_comes_first():
    """K09: integers have nothing to add to."""
    tensors = {
        "q.base_layer.weight": torch.tensor([[1, 2], [3, 4]], dtype=torch.int8),
        "q.base_layer.weight_scale": torch.ones(2, 1),
        "q.lora_A.default.weight": torch.ones(1, 2),
        "q.lora_B.default.weight": torch.ones(2, 1),
    }
    with pytest.raises(
        InvalidState, match=r"expected a floating base, found int8.*dequantise it first: chain\(quantised"
    ):
        transform_specs(view(chain(lora(alpha=1), SCALES), "export"), _specs(tensors))


def test_a_scale_of_fewer_dimensions_than_blocks_need_is_refused():
    """K06: one scale a row is not one for each of several blocks in it."""
    specs = {"q.weight": LeafSpec("int8", (2, 4)), "q.weight_scale": LeafSpec("float32", (2,))}
    with pytest.raises(InvalidState, match=r"scales of blocks of \[1, 2\]"):
        transform_specs(view(quantised("{n}.weight", "{n}.weight_scale", block=(1, 2)), "export"), specs)


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_part_of_a_large_merge_has_the_bits_of_the_whole(decomposed):
    """K03: wherever it begins in a row; a matrix product has others, and so has a norm of rows."""
    torch.manual_seed(0)
    tensors = {
        "q.base_layer.weight": torch.randn(70, 1100, dtype=torch.float64),
        "q.lora_A.default.weight": torch.randn(9, 1100, dtype=torch.float64),
        "q.lora_B.default.weight": torch.randn(70, 9, dtype=torch.float64),
    }
    tensors |= {"q.lora_magnitude_vector.default.weight": torch.rand(70, dtype=torch.float64)} if decomposed else {}
    converter = lora(alpha=9, decomposed=decomposed)
    check_converter(converter, tensors)
    (each,) = table_of(converter, _specs(tensors)).values()

    def computed(box):
        return each.computed(box, lambda name, part: tensors[name][tuple(slice(*span) for span in part)])

    whole, threads = computed(((0, 70), (0, 1100))), torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            for rows, columns in (((0, 70), (0, 1100)), ((1, 70), (3, 1099)), ((31, 65), (511, 1025)), ((67, 69), (1, 2)), ((5, 5), (0, 1100))):  # fmt: skip
                assert torch.equal(computed((rows, columns)), whole[slice(*rows), slice(*columns)])
        finally:
            torch.set_num_threads(threads)


def test_lengths_of_rows_that_are_missing_are_not_taken_for_those_of_the_base():
    """K09: what its configuration calls DoRA is not merged as plain LoRA."""
    shapes = {"q.base_layer.weight": (3, 2), "q.lora_A.default.weight": (1, 2), "q.lora_B.default.weight": (3, 1)}
    specs = {name: LeafSpec("float32", shape) for name, shape in shapes.items()}
    converter = lora_of({"peft_type": "LORA", "use_dora": True})
    with pytest.raises(InvalidState, match="expected the length of each of 3 rows, found nothing"):
        transform_specs(converter, specs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q.lora_A.default.weight": None}, "found float32.*, nothing and float32"),
        ({"q.base_layer.weight": None}, "found nothing, .*export the base together with its adapters"),
        ({"q.base_layer.weight": (2, 3)}, "fan_in_fan_out=True"),
        (
            {"q.lora_magnitude_vector.default.weight": (3,)},
            r"expected matrices of low rank alone, found float32\[3\].*decomposed=",
        ),
        ({"q.lora_magnitude_vector.other.weight": (3,)}, "other parts of an adapter"),
        ({"lora_embedding_A.default": (3, 3)}, "other parts of an adapter"),
        ({"q.weight": (3, 2)}, "two that would be q.weight"),
    ],
)
def test_what_cannot_be_merged_is_named_from_dtypes_and_shapes(change, said):
    """K09: before anything is read."""
    shapes = {"q.base_layer.weight": (3, 2), "q.lora_A.default.weight": (1, 2), "q.lora_B.default.weight": (3, 1)}
    specs = {name: LeafSpec("float32", shape) for name, shape in (shapes | change).items() if shape is not None}
    with pytest.raises(InvalidState, match=said):
        transform_specs(lora(alpha=1), specs)


OTHERS = (
    "q.lora_A.other.weight",
    "q.lora_embedding_B.other",
    "q.lora_A.default.bias",
    "q.lora_magnitude_vector.other.weight",
)


@given(st.sets(st.sampled_from(OTHERS)), st.sampled_from(["base", "owned", "export", "full"]), st.booleans())
def test_a_second_adapter_is_in_no_view_but_that_of_everything(others, which, is_chained):
    """K03: a view has what is this adapter's, or the base, or refuses by name: the base had matrices of another adapter."""
    shapes = {"q.base_layer.weight": (3, 2), "q.lora_A.default.weight": (1, 2), "q.lora_B.default.weight": (3, 1)}
    specs = {name: LeafSpec("float32", shape) for name, shape in (shapes | dict.fromkeys(others, (1,))).items()}
    converter = chain(lora(alpha=1)) if is_chained else lora(alpha=1)
    names = {"base": {"q.weight"}, "owned": {*list(shapes)[1:]}, "export": {"q.weight"}, "full": {*specs}}
    if not others or which == "full" or (which == "owned" and not is_chained):
        assert {*transform_specs(view(converter, which), specs)} == names[which]
    else:
        with pytest.raises(InvalidState, match="other parts of an adapter"):
            transform_specs(view(converter, which), specs)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lora(alpha=0), "lora.alpha: expected a finite number > 0"),
        (lambda: lora(alpha=1, a="{layer*}.a", b="{other*}.b"), "expected the captures"),
        (lambda: lora(alpha=1, wrapped="{layer*}.base_layer.weight"), "{layer\\*} and {tensor} in wrapped="),
        (
            lambda: lora_of({"peft_type": "LORA", "use_qalora": True, "use_bdlora": True}),
            "use_qalora.*use_bdlora",
        ),
        (lambda: lora_of({"peft_type": "IA3"}), "IA3"),
        *(
            (
                lambda name=name: lora_of({"peft_type": "LORA", "init_lora_weights": name}),
                f"init_lora_weights='{name}', which has changed the base too.*path_initial_model_for_weight_conversion",
            )
            for name in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "PiSSA")
        ),
        (
            lambda: lora_of({"peft_type": "LORA", "alpha_pattern": {"q": 0}}),
            r"lora.alphas\['q'\]: expected a finite number > 0",
        ),
        (lambda: lora(alpha=1, alphas={"(": 1}), "missing \\)"),
        (lambda: lora(alpha=1, alphas={"(a+)+b": 1}), "may take long; write the names out"),
        (lambda: chain(lora(alpha=1), "quantised"), "chain.converters: expected an object with key_filter"),
        (lambda: quantised("{layer*}.weight", "{layer*}.scale", block=(0, 1)), "dequantise.block"),
        (lambda: view(lora(alpha=1), "adapters"), "view.which: expected one of"),
        (lambda: view(object(), "base"), "view.converter"),
    ],
)
def test_mistakes_are_errors_where_a_converter_is_configured(make, said):
    """K09, T75: ValueErrors of a name, and no assertions."""
    with pytest.raises(InvalidArgument, match=said):
        make()


@attrs.frozen
class Counted:
    """A converter of one's own: counters of a quantisation-aware layer, which an export leaves out."""

    export = drop("{layer*}.seen")
    adapter: object = str
    owns: object = lambda name: name.endswith(".seen")
    state_dict_transform: object = export

    def key_filter(self, name):
        return self.owns(name)

    def state_dict_adapter(self, name):
        return self.adapter(name)


SOME = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2), "a.seen": torch.tensor(3)}


def test_a_converter_of_ones_own_keeps_the_contract():
    check_converter(Counted(), SOME)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (Counted(owns=lambda name: False), "it owns none"),
        (Counted(owns=lambda name: name), "something else than True and False"),
        (Counted(adapter=lambda name: name.partition(".")[2]), "two tensors of the base have one name outside"),
        (Counted(state_dict_transform=compose()), "Its export has the names and shapes of the base"),
        (
            Counted(state_dict_transform=compose(drop("{layer*}.seen"), rename("a.weight", "c.weight"))),
            "found \\['b.weight', 'c.weight'\\]",
        ),
    ],
)
def test_the_contract_finds_a_converter_that_breaks_it(mine, said):
    """K03."""
    with pytest.raises(ContractBroken, match=said):
        check_converter(mine, SOME)


@attrs.frozen
class Odd:
    """An expression that computes something else than the one that it has."""

    of: object
    act: object

    dtype = property(lambda self: self.of.dtype)
    shape = property(lambda self: self.of.shape)

    def reads(self, box):
        return self.of.reads(box)

    def computed(self, box, read):
        return self.act(self.of.computed(box, read), read)


@attrs.frozen
class Makes:
    """A transform of one's own."""

    act: object = lambda found, read: found
    text: str = "drops what was seen"
    inverse: object = None

    def __str__(self):
        return self.text

    def on(self, table):
        return {
            name: Odd(each, self.act) if name == "a.weight" else each
            for name, each in table.items()
            if name != "a.seen"
        }


@pytest.mark.parametrize(
    ("makes", "said"),
    [
        (Makes(lambda found, read: found + found.numel()), "a part along dimension 0 has other bits"),
        (Makes(lambda found, read: found.add_(1)), "it wrote into them"),
        (Makes(lambda found, read: found + read("a.seen", ())), "a.weight: it reads a.seen .*, which reads.. of .* does not yield"),
        (Makes(lambda found, read: found * read("a.weight", ((0, 2), (0, 2))).max()), "it reads a.weight .*, which reads.. of"),
        (Makes(text=" "), "is empty"),
        (Makes(inverse=rename("a.weight", "b")), "gives the tensors back.*expected"),
        (Makes(inverse=compose()), "expected .'a.seen', 'a.weight', 'b.weight'., found .'a.weight', 'b.weight'."),
    ],
)  # fmt: skip
def test_the_contract_finds_a_transform_that_breaks_it(makes, said):
    """K03: it sums in another order for a part, writes in place, reads what it does not declare, is silent, or has an inverse of something else."""
    check_converter(Counted(state_dict_transform=Makes()), SOME)
    with pytest.raises(ContractBroken, match=said):
        check_converter(Counted(state_dict_transform=makes), {name: each.clone() + 1 for name, each in SOME.items()})


def test_the_contract_compares_what_an_inverse_gives_back():
    """K03: of a converter that owns what the export ties."""
    tensors = {"e": torch.ones(2, 2), "b": torch.zeros(2, 2), "h": torch.ones(2, 2)}
    check_converter(Counted(owns=lambda name: name == "h", state_dict_transform=tie("h", "e")), tensors)

    @attrs.frozen
    class Untied:
        inverse = untie("h", "b")

        def __str__(self):
            return "leaves out h"

        def on(self, table):
            return tie("h", "e").on(table)

    with pytest.raises(ContractBroken, match=r"gives the tensors back.*: h have other bits"):
        check_converter(Counted(owns=lambda name: name == "h", state_dict_transform=Untied()), tensors)


def test_the_bias_of_an_adapter_is_added_to_that_of_its_layer_with_the_scale_of_the_matrices():
    """K03, K07: peft merges it so; a layer without a bias, and DoRA, are refused as there."""
    tensors = {
        "base_model.model.q.base_layer.weight": torch.zeros(3, 2), "base_model.model.q.base_layer.bias": torch.tensor([1.0, 2.0, 3.0]),
        "base_model.model.q.lora_A.default.weight": torch.ones(2, 2), "base_model.model.q.lora_B.default.weight": torch.ones(3, 2),
        "base_model.model.q.lora_B.default.bias": torch.tensor([1.0, 0.0, -1.0]),
    }  # fmt: skip
    converter = lora_of({"peft_type": "LORA", "lora_alpha": 8, "lora_bias": True})
    check_converter(converter, tensors)
    found = dict(transform_tensors(converter, tensors))
    assert torch.equal(found["q.bias"], torch.tensor([5.0, 2.0, -1.0]))
    assert torch.equal(found["q.weight"], torch.full((3, 2), 8.0))
    without = {name: each for name, each in tensors.items() if not name.endswith("base_layer.bias")}
    dora = tensors | {"base_model.model.q.lora_magnitude_vector.default.weight": torch.ones(3)}
    for wrong, of in (
        (without, converter),
        (dora, lora_of({"peft_type": "LORA", "use_dora": True, "lora_bias": True})),
    ):
        with pytest.raises(InvalidState, match=r"q\.(base_layer\.)?bias: expected a floating bias of the layer"):
            dict(transform_tensors(of, wrong))
