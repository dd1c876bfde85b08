"""Hypothesis strategies for leaves of every dtype, trees, states, specs, batches and faults."""

import errno
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from trainfold.backends.stores.memory import CrashAt, ErrorAt, Fault
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.leaf_spec import AnySpec, LeafSpec, ScalarSpec
from trainfold.core.optim.slot_layout import laid_out_like
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

DTYPES: tuple[str, ...] = tuple(STORED)
_FQN = st.from_regex(r"[a-z][a-z0-9_]{0,5}(\.[a-z0-9][a-z0-9_]{0,4}){0,3}", fullmatch=True)
_NAMES = st.text(min_size=1, max_size=8)


def shapes(*, max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors: 0-d and empty ones included."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def dtypes() -> st.SearchStrategy[str]:
    """Names of every dtype that the format can store."""
    return st.sampled_from(DTYPES)


@st.composite
def tensors(draw: st.DrawFn, *, dtype: st.SearchStrategy[str] | None = None, in_order: bool = False) -> torch.Tensor:
    """Tensors of any dtype, shape and bit pattern: NaN payloads, -0.0, subnormals; some are not contiguous.

    Examples:
        >>> from hypothesis import find
        >>> find(tensors(), lambda t: t.dtype == torch.bfloat16 and t.dim() == 0).shape
        torch.Size([])
    """
    name = draw(dtypes() if dtype is None else dtype)
    shape = draw(shapes())
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * STORED[name].itemsize, max_size=count * STORED[name].itemsize))
    raw = torch.tensor(list(data), dtype=torch.uint8)
    found = (
        raw.ne(0)
        if name == "bool"
        else raw.view(torch_dtype(name))
        if count
        else torch.empty(0, dtype=torch_dtype(name))
    )
    found = found.reshape(shape)
    if len(shape) > 1 and not in_order and draw(st.booleans()):
        # Copied as bytes: the contiguous copy of a transpose has no kernel for some dtypes.
        order = draw(st.permutations(range(len(shape))))
        found = _strided(found, order)
    return found


def scalars() -> st.SearchStrategy[Any]:
    """Every scalar that the format can store: ints beyond 2**63, NaN, infinities, any text, bytes."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**200), 2**200),
        st.floats(),
        st.text(max_size=12),
        st.binary(max_size=12),
    )


def leaves() -> st.SearchStrategy[Any]:
    """Tensors and scalars."""
    return st.one_of(tensors(), scalars())


def keys() -> st.SearchStrategy[Any]:
    """Dict keys: text, ints, bools, tuples of them."""
    plain = st.one_of(_NAMES, st.integers(-5, 2**70), st.booleans())
    return st.one_of(plain, st.tuples(plain, plain))


def trees(leaf: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Nested dicts, lists and tuples of leaves."""
    return st.recursive(
        leaves() if leaf is None else leaf,
        lambda inner: st.one_of(
            st.dictionaries(_NAMES, inner, max_size=4),
            st.dictionaries(keys(), inner, max_size=3),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=8,
    )


@st.composite
def states(draw: st.DrawFn, *, step: st.SearchStrategy[int] | None = None) -> TrainState:
    """States with a model, an optimizer with lazy slots, counters past 2**53, and user-declared components."""
    names = draw(st.lists(_FQN, unique=True, min_size=1, max_size=4))
    params = {name: draw(tensors()) for name in names}
    slotted = draw(st.lists(st.sampled_from(names), unique=True))
    # others are refused
    averages = {name: laid_out_like(draw(tensors(in_order=True)), params[name]) for name in slotted}
    slots = {name: {"exp_avg": average, "step": draw(scalars())} for name, average in averages.items()}
    group = ParamGroup({"lr": draw(st.floats(0, 1)), "betas": (0.9, 0.999), "fused": None}, tuple(names))
    big = st.integers(0, 2**70)
    progress = Progress(draw(st.integers(0, 10**9) if step is None else step), draw(big), draw(big), draw(big))
    return TrainState(
        model=ModelState(Leaves(params), Leaves({f"{name}_buffer": draw(tensors()) for name in names[:1]})),
        optimizer=OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (group,)),
        scheduler=draw(st.none() | st.just({"kind": "constant", "total": 10})),
        trainer=progress,
        dataset=draw(st.none() | trees(scalars()).filter(lambda tree: tree is not None)),
        rng=draw(st.none() | tensors(dtype=st.just("uint8"))),
        extra=draw(st.dictionaries(st.sampled_from(["ema", "scaler", "notes"]), trees(), max_size=2)),
    )


def batches(*, max_samples: int = 6, features: int = 3) -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """Batches of small integers, in which sums are exact: ``{"x": [n, features], "y": [n]}``, float32."""
    value = st.integers(-4, 4)

    def build(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        table = torch.tensor(rows, dtype=torch.float32)
        return {"x": table[:, :-1].contiguous(), "y": table[:, -1].contiguous()}

    row = st.lists(value, min_size=features + 1, max_size=features + 1)
    return st.lists(row, min_size=1, max_size=max_samples).map(build)


def specs() -> st.SearchStrategy[dict[str, AnySpec]]:
    """Specs of trees by leaf path, tensors and scalars."""
    tensor = st.builds(LeafSpec, dtype=dtypes(), shape=shapes())
    scalar = st.sampled_from(["int", "float", "str", "none"]).map(ScalarSpec)
    return st.dictionaries(_NAMES, st.one_of(tensor, scalar), max_size=6)


def faults(*, effects: int = 60) -> st.SearchStrategy[Fault]:
    """Faults for a `MemoryStore`: a crash or an error (full, failing, read-only) at any of its first effects."""
    index = st.integers(0, effects)
    code = st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS])
    return st.one_of(st.builds(CrashAt, index), st.builds(ErrorAt, index, code, st.booleans()))


def _strided(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    inverse = [list(order).index(i) for i in range(len(order))]
    return tensor.permute(*order).clone(memory_format=torch.contiguous_format).permute(*inverse)
