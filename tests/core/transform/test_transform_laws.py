"""Laws of transforms over random models: specs, streams, parts and inverses, beside plain torch on whole tensors."""

import re
from collections import Counter

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import volume, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform import expression
from trainfold.core.transform.apply import plan_parts, transform_specs, transform_stream, transform_tensors
from trainfold.core.transform.expression import SourceTensor, computed_whole
from trainfold.core.transform.fusing import merge, stack
from trainfold.core.transform.naming import drop, rename, tie
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import cast, dequantise, rearrange, transpose

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8])


def specs_of(tensors):
    return {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}


def bits(tensors):
    return {name: (each.dtype, tuple(each.shape), bytes(tensor_bytes(each))) for name, each in tensors.items()}


def transformed(transform, tensors):
    return dict(transform_tensors(transform, tensors))


def part_of(tensors):
    return lambda name, box: tensors[name][tuple(slice(start, stop) for start, stop in box)]


def numbered(names, pattern):
    """The names that have a form, by the texts of its groups."""
    return {found.groups(): name for name in names if (found := re.fullmatch(pattern, name))}


@st.composite
def models(draw):
    """The tensors of a small model: attention with fewer keys than queries, experts, tied embeddings, and buffers of integers."""
    layers, experts, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    kv_heads, times, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype, rng = draw(DTYPES), torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def tensor(*shape, of=dtype):
        return torch.randint(0, 200, shape, generator=rng).to(of)

    found = {"embed": tensor(7, width)}
    for i in range(layers):
        for part, heads in (("wq", kv_heads * times), ("wk", kv_heads), ("wv", kv_heads)):
            found[f"layers.{i}.attn.{part}"] = tensor(heads * 2 * half, width)
        for e in range(experts):
            found[f"layers.{i}.experts.{e}.w"] = tensor(width, 3)
        found[f"layers.{i}.steps"] = tensor(4, of=torch.int64)
        found[f"layers.{i}.mask"] = tensor(4, of=torch.bool)
    found["head"] = found["embed"].clone()
    return found, {"kv_heads": kv_heads, "times": times, "half": half}


# Each is a transform, and the same by plain torch on whole tensors.


def in_pairs(sizes):
    def model(tensors):
        for name in numbered(tensors, r"layers\.(\d+)\.attn\.(w[qk])").values():
            heads = tensors[name].unflatten(0, (-1, 2, sizes["half"]))
            tensors[name] = heads.transpose(1, 2).flatten(0, 2)

    names = ["layers.{i}.attn.wq", "layers.{i}.attn.wk"]
    return rearrange(names, "(h two d) i -> (h d two) i", two=2, d=sizes["half"]), model


def fused(sizes, groups):
    def model(tensors):
        for (i,) in numbered(tensors, r"layers\.(\d+)\.attn\.wq"):
            parts = [tensors.pop(f"layers.{i}.attn.{part}") for part in ("wq", "wk", "wv")]
            tensors[f"layers.{i}.qkv"] = torch.cat(
                [piece for row in zip(*(each.chunk(groups) for each in parts), strict=True) for piece in row]
            )

    parts = [f"layers.{{i}}.attn.{part}" for part in ("wq", "wk", "wv")]
    return merge(parts, "layers.{i}.qkv", shares=(sizes["times"], 1, 1), groups=groups), model


def stacked(tensors):
    for i in dict.fromkeys(i for i, _ in numbered(tensors, r"layers\.(\d+)\.experts\.(\d+)\.w")):
        names = [f"layers.{i}.experts.{e}.w" for e in range(99)]
        tensors[f"layers.{i}.experts.w"] = torch.stack([tensors.pop(each) for each in names if each in tensors])


def layers_stacked(tensors):
    names = [f"layers.{i}.experts.w" for i in range(99)]
    tensors["experts"] = torch.stack([tensors.pop(each) for each in names if each in tensors])


def renamed(tensors):
    for name in list(tensors):
        if name.startswith("layers."):
            tensors[f"model.{name}"] = tensors.pop(name)


def turned(tensors):
    tensors["embed"] = tensors["embed"].T


def rounded(tensors):
    for name, each in tensors.items():
        if each.is_floating_point() and "attn" not in name:
            tensors[name] = each.to(torch.float16)


def less(tensors):
    for name in numbered(tensors, r"layers\.(\d+)\.mask").values():
        del tensors[name]


@st.composite
def chains(draw, *, has_inverse=False):
    tensors, sizes = draw(models())
    every = [in_pairs(sizes), fused(sizes, draw(st.sampled_from([1, sizes["kv_heads"]])))]
    every += [(stack("layers.{i}.experts.{e}.w", "layers.{i}.experts.w", over="e"), stacked)]
    if draw(st.booleans()):
        every += [(stack("layers.{i}.experts.w", "experts", over="i"), layers_stacked)]
    more = [(tie("head", "embed"), lambda tensors: tensors.pop("head")), (transpose("embed"), turned)]
    if not has_inverse:
        more += [(cast("float16", without=["{path*}.attn.{w}"]), rounded), (drop("layers.{i}.mask"), less)]
    chosen = (
        every
        + [each for each in more if draw(st.booleans())]
        + [(rename("layers.{path*}", "model.layers.{path*}"), renamed)]
    )
    return tensors, compose(*(each for each, _ in chosen)), [model for _, model in chosen]


@st.composite
def boxes(draw, shape):
    pairs = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((low, high) for low, high in pairs)


@given(chains())
def test_a_stream_has_the_bits_of_whole_tensors_in_plain_torch_and_the_specs_say_what_comes(chain):
    """K01, K04: names, order of the rules, dtypes and values; integers and booleans keep theirs."""
    tensors, transform, models_of = chain
    expected = dict(tensors)
    for each in models_of:
        each(expected)
    found = transformed(transform, tensors)
    assert bits(found) == bits(expected)
    assert list(transform_specs(transform, specs_of(tensors)).items()) == list(specs_of(found).items())


@given(chains(has_inverse=True))
def test_the_inverse_after_a_transform_is_the_identity(chain):
    """K02: bit by bit, with all names and no others."""
    tensors, transform, _ = chain
    assert bits(transformed(transform.inverse, transformed(transform, tensors))) == bits(tensors)
    assert bits(transformed(compose(transform, transform.inverse), tensors)) == bits(tensors)


@given(chains(), st.data())
def test_a_part_has_the_bits_of_that_part_of_the_whole_and_reads_what_the_plan_says(chain, data):
    """K01: a rank computes its part from parts; what it reads is what was planned, and enough."""
    tensors, transform, _ = chain
    whole = transformed(transform, tensors)
    name = data.draw(st.sampled_from(sorted(whole)))
    box = data.draw(boxes(whole[name].shape))
    (plan,) = plan_parts(transform, specs_of(tensors), {name: box})
    seen = []

    def read(source, part):
        seen.append((source, part))
        return part_of(tensors)(source, part)

    sources = {key: SourceTensor(key, each.dtype, each.shape) for key, each in specs_of(tensors).items()}
    found = transform.on(sources)[name].computed(box, read)
    assert bits({"": found}) == bits({"": part_of(whole)(name, box)})
    planned = {(key, part) for key, parts in plan.reads.items() for part in parts}
    if volume(box):
        assert {each for each in seen if volume(each[1])} == {each for each in planned if volume(each[1])}
    else:
        assert plan.needed == 0
    assert not plan.is_gathered or plan.needed
    (plan,) = plan_parts(transform, specs_of(tensors), {name: box}, held=dict.fromkeys(tensors))
    assert not plan.is_gathered


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 130), st.data())
def test_blocks_of_scales_end_where_the_tensor_ends(rows, columns, block, data):
    """K06: whatever the sizes are; a part has the bits of the whole."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=rng).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block), -(-columns // block), generator=rng)
    tensors = {"a.b.weight": weight, "a.b.scale": scale, "norm": torch.ones(3)}
    transform = dequantise("{path*}.weight", "{path*}.scale", block=(block, block), dtype="float32")
    expected = weight.float() * scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    smallest = max(4, weight.numel() // 20)  # else it is thousands of bands, and the time of them
    before, expression._BAND_BYTES = expression._BAND_BYTES, data.draw(st.sampled_from((smallest, 1000, 1 << 22)))
    try:
        check_blocks(transform, tensors, expected, data.draw(boxes((rows, columns))))
    finally:
        expression._BAND_BYTES = before


def check_blocks(transform, tensors, expected, box):
    found = transformed(transform, tensors)
    assert bits(found) == bits({"a.b.weight": expected, "norm": torch.ones(3)})
    (source,) = [
        each
        for name, each in transform.on(
            {k: SourceTensor(k, v.dtype, v.shape) for k, v in specs_of(tensors).items()}
        ).items()
        if name != "norm"
    ]
    assert bits({"": source.computed(box, part_of(tensors))}) == bits({"": part_of(found)("a.b.weight", box)})


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest memory that an operation makes, beside that of known tensors."""

    def __init__(self, known):
        super().__init__()
        self.known, self.largest = {each.untyped_storage().data_ptr() for each in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        return found


def test_no_more_than_the_result_is_made_on_the_way(monkeypatch):
    """K01: not its size in float32, nor one scale for each element; a cast of a transposed tensor is in rows, so it is not copied again to be written."""
    monkeypatch.setattr(expression, "_BAND_BYTES", 4096)
    tensors = {"w": torch.ones(512, 256).to(torch.float8_e4m3fn), "s": torch.ones(4, 2), "t": torch.ones(64, 512)}
    transform = compose(
        dequantise("w", "s", block=(128, 128), dtype="bfloat16"), transpose("t"), cast("bfloat16", only="t")
    )
    table = transform.on({name: SourceTensor(name, each.dtype, each.shape) for name, each in specs_of(tensors).items()})
    for name, size in (("w", 2 * 512 * 256), ("t", 2 * 512 * 64)):
        with Largest(tensors.values()) as made:
            found = computed_whole(table[name], lambda name, box: tensors[name])
        assert found.is_contiguous()
        assert made.largest == size


def test_a_part_without_elements_of_stacked_scalars_has_none():
    """K02: ranks may have more places than there are rows."""
    tensors = {f"l.{number}.z": torch.tensor(float(number)) for number in range(2)}
    table = stack("l.{i}.z", "z", over="i").on(
        {name: SourceTensor(name, each.dtype, each.shape) for name, each in specs_of(tensors).items()}
    )
    assert table["z"].computed(((2, 2),), part_of(tensors)).shape == (0,)
    assert table["z"].computed(((1, 2),), part_of(tensors)).tolist() == [1.0]


def test_each_element_is_read_once_for_all_results():
    """K01: tensors that are taken apart are not read once for each part."""
    tensors = {"qkv": torch.arange(32.0).reshape(16, 2), "x": torch.ones(3)}
    transform = compose(merge(["q", "k", "v"], "qkv", shares=(2, 1, 1), groups=2).inverse, transpose("q"))
    read = Counter()

    def counted(name, box):
        read[name] += volume(box)
        return part_of(tensors)(name, box)

    names = [name for name, _ in transform_stream(transform, specs_of(tensors), counted)]
    assert names == ["q", "k", "v", "x"]
    assert read == {"qkv": 32, "x": 3}


def test_a_stream_reads_nothing_before_it_is_asked_and_one_result_at_a_time():
    """K01: the memory is that of the largest tensor, not of the model."""
    tensors, seen = {str(number): torch.ones(2) for number in range(3)}, []

    def read(name, box):
        seen.append(name)
        return part_of(tensors)(name, box)

    stream = transform_stream(rename("{n}", "layers.{n}"), specs_of(tensors), read)
    assert seen == []
    assert [(name, list(seen)) for name, _ in stream] == [
        ("layers.0", ["0"]),
        ("layers.1", ["0", "1"]),
        ("layers.2", ["0", "1", "2"]),
    ]


def test_what_shares_memory_with_its_source_is_not_copied():
    tensors = {"a": torch.arange(6.0).reshape(2, 3)}
    table = compose(rename("a", "b"), transpose("b")).on({"a": SourceTensor("a", "float32", (2, 3))})
    found = computed_whole(table["b"], part_of(tensors))
    assert found.shape == (3, 2)
    assert found.data_ptr() == tensors["a"].data_ptr()
    assert whole_box(table["b"].shape) == ((0, 3), (0, 2))
