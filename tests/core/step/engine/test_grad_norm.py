"""The norm and the clipping of gradients are bitwise equal to torch's, for any gradients."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from trainfold.core.step.engine.grad_norm import Norm

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def params_of(shapes, dtypes, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape, dtype in zip(shapes, dtypes, strict=False):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        params.append(param)
    return params


def clipped(params, limit):
    """Clip the gradients of the parameters and return their norm."""
    norm_of = Norm(params)
    norm = norm_of.of(norm_of.grads())
    norm_of.clip(norm_of.grads(), limit, norm, norm.item())
    return norm


def same_bits(one, other):
    return (
        one.detach().numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
        if one.dtype != torch.bfloat16
        else same_bits(one.float(), other.float())
    )


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtypes=st.one_of(
        st.sampled_from(DTYPES).map(lambda dtype: [dtype] * 6),
        st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    ),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.5, 1.0, 30.0, 1e15]),
    clip_norm=st.sampled_from([1e-3, 0.5, 0.99, 1.0, 1.01, 5.0, float("inf")]),
    seed=st.integers(0, 2**32),
)
def test_clipping_has_the_bits_of_torch(shapes, dtypes, scale, clip_norm, seed):
    """Even if nothing is clipped; torch would then multiply the gradients by 1."""
    mine, theirs = (params_of(shapes, dtypes, scale, seed) for _ in range(2))
    norm = clipped(mine, clip_norm)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
    assert norm.dtype == wanted.dtype
    assert torch.equal(norm, wanted) or (norm.isnan() and wanted.isnan())
    for one, other in zip(mine, theirs, strict=True):
        assert same_bits(one.grad, other.grad)


@pytest.mark.parametrize("limit", [1.0, 1.0 + 1e-6, 1.0 + 3e-6, 1.005, 1.02])
def test_clipping_at_the_edge_has_the_bits_of_torch(limit):
    """The norm is just above, at, or just below the limit."""
    values = torch.tensor([0.6, 0.8]) * torch.tensor([[1.0], [0.999999], [1.000001]])
    for value in values:
        mine, theirs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        mine.grad, theirs.grad = value.clone(), value.clone()
        clipped([mine], limit)
        torch.nn.utils.clip_grad_norm_([theirs], limit)
        assert torch.equal(mine.grad, theirs.grad)


def test_sparse_gradients_are_clipped_as_torch_does_or_refused_as_torch_does():
    mine, theirs = (torch.nn.Embedding(4, 2, sparse=True) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    for module in (mine, theirs):
        (module(torch.tensor([1, 2, 2])) * 3).sum().backward()
    try:
        wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            clipped([mine.weight], 1.0)
        return
    norm = clipped([mine.weight], 1.0)
    assert torch.equal(norm, wanted)
    assert torch.equal(mine.weight.grad.to_dense(), theirs.weight.grad.to_dense())
