"""What a rank does before it writes: as much with many ranks as with few, and shortcuts that give what the plain way gives."""

import gc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import announcement_of, by_rule, outline_of
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.replica_shares import Piece
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import whole_box
from trainfold.core.layout.world import World
from trainfold.core.save.file_layout import plan_file
from trainfold.core.save.save_plan import plan_save
from trainfold.core.state.names.tensor_names import storage_key

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
TREES = st.recursive(
    SCALARS, lambda each: st.one_of(st.lists(each), st.dictionaries(st.text(), each), st.tuples(each, each))
)


class Name(str):
    """A name that is not quite text."""

    __slots__ = ()


def described(tree):
    return describe(tree, "ema")[0]


def digest(tree):
    return announcement_of({"ema": described(tree)}).digests["ema"]


def copied(tree):
    """An equal tree of other objects; texts are not interned."""
    if isinstance(tree, str):
        return "".join(list(tree))
    if isinstance(tree, dict):
        return {copied(key): copied(each) for key, each in tree.items()}
    return type(tree)(map(copied, tree)) if isinstance(tree, list | tuple) else tree


def calls(action):
    """How many functions of Python are called. Of C, a plan calls `id` for each rank."""
    count = [0]

    def seen(_frame, event, _arg):
        count[0] += event == "call"

    before = sys.getprofile()
    gc.disable()  # Hypothesis is called at each collection
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count[0]


def of_rank(world):
    rule = make_placement(make_mesh((world.size,)), [[0]])
    tensors = {
        f"w{index}": Shard(torch.zeros(1, 3), (world.size, 3), (world.rank, 0), placement=rule) for index in range(20)
    }
    return {"ema": by_rule(described(tensors), world)}


def test_a_rank_plans_its_files_in_as_many_steps_with_512_ranks_as_with_8():
    """N10: planning depends on the leaves of a rank, and not on the number of ranks."""

    def plan(world):
        mine = of_rank(world)
        plan_save([mine] * world.size, step=1, only=world.rank)  # what is computed once for each shape
        return calls(lambda: plan_save([mine] * world.size, step=1, only=world.rank))

    assert plan(World(511, 512)) == plan(World(7, 8))


@given(TREES, TREES)
def test_digests_of_outlines_are_equal_where_their_texts_are(one, other):
    """The digest is not that of the text, because that takes twice as long."""
    assert (digest(one) == digest(other)) == (outline_of(described(one)) == outline_of(described(other)))


@given(TREES)
def test_the_digest_of_an_outline_does_not_depend_on_which_objects_are_shared(tree):
    assert digest({"ab": tree, "x": ["ab", "ab", tree]}) == digest(
        {"ab": copied(tree), "x": [*map(copied, ["ab", "ab", tree])]}
    )


def test_names_of_a_subclass_of_str_are_announced():
    """Its digest is that of the plain name too."""
    odd = Described({"leaves": {Name("a"): {"t": 0}}}, {"ema['a']": LeafSpec("float32", (2,))})
    assert announcement_of({"ema": odd}) == announcement_of({"ema": odd})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model.params['{}']", "optimizer.slots['{}']['m']", "ema['{}']"]),
            st.text(),
            st.sampled_from(["float32", "complex64", "bool", "float8_e4m3fn"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
        unique_by=lambda each: each[:2],
    )
)
def test_the_header_of_a_file_is_the_canonical_json_of_its_tensors(leaves):
    """Headers are put together from the text of each layout; the model is a dict."""
    pieces = [
        Piece(path.format(name), LeafSpec(dtype, tuple(shape)), whole_box(tuple(shape)))
        for path, name, dtype, shape in leaves
    ]
    plan = plan_file("a", ("x'\"\n",), 0, pieces)
    base = len(plan.header)
    model = {"__metadata__": {"format": "pt", "trainfold": "x'\"\n"}}
    for each in plan.tensors:
        key = storage_key(each.path)
        shape = [*each.shape, 2] if each.dtype == "complex64" and each.stored == "F32" else list(each.shape)
        offsets = [each.start - base, each.stop - base]
        model[each.path if key in model else key] = {"dtype": each.stored, "shape": shape, "data_offsets": offsets}
    assert plan.header[8:].rstrip(b" ") == canonical_json(model)


@pytest.mark.parametrize("name", ["weird \x7f \u2028 \ud83d", 'quote " and \\'])
def test_names_with_odd_characters_are_escaped_in_headers(name):
    plan = plan_file("a", ("ema",), 0, [Piece(name, LeafSpec("float32", ()), ())])
    row = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    assert plan.header[8:].rstrip(b" ") == canonical_json(
        {"__metadata__": {"format": "pt", "trainfold": "ema"}, name: row}
    )
