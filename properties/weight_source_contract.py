"""The contract of `WeightSource`: what a source of weights has to do, whatever it reads from."""

from collections.abc import Callable, Mapping

import torch

from trainfold.core.layout.slices import whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.weights.account import Account
from trainfold.core.weights.open_weights import OpenSource
from trainfold.core.weights.source import Wanted, WeightSource
from trainfold.properties.differences import ContractBroken


def check_weight_source(factory: Callable[[], WeightSource], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that a source keeps the contract of `WeightSource`.

    Args:
        factory: makes the source.
        tensors: what it has, by name: two tensors at least, one of them with two rows or more.

    Raises:
        ContractBroken: naming every broken rule.

    Examples:
        >>> tensors = {"w": torch.arange(4.0), "b": torch.ones(1)}
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         yield from ((name, tensors[name]) for name in wanted if name in tensors)
        >>> check_weight_source(Mine, tensors)
    """
    broken = []
    for rule in (_all, _a_few, _parts, _others, _again, _opened):
        try:
            rule(factory(), tensors)
        except Exception as error:  # noqa: BLE001 - of the user's source: the other rules are checked too
            broken.append(f"{(rule.__doc__ or '').strip()}: {type(error).__name__}: {error}")
    if broken:
        raise ContractBroken("\n".join(broken))


def _supplied(source: WeightSource, wanted: Mapping[str, Wanted]) -> dict[str, torch.Tensor]:
    account, found = Account(source, wanted), {}
    for name, tensor in source.supply(wanted):
        assert name not in found, f"{name} came twice"
        found[name] = tensor.detach()[account.part_of(name, dtype_name(tensor.dtype), tensor.shape)].clone()
    return found


def _asked(tensors: Mapping[str, torch.Tensor]) -> dict[str, Wanted]:
    return {
        name: Wanted(dtype_name(each.dtype), tuple(each.shape), whole_box(tuple(each.shape)))
        for name, each in tensors.items()
    }


def _check_equal(found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(tensors), f"expected {sorted(tensors)}, found {sorted(found)}"
    for name, each in tensors.items():
        mine = found[name].cpu().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(mine, each.cpu().contiguous().view(-1).view(torch.uint8)), f"{name} has other bits"


def _all(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """It supplies each tensor that it is asked for, once, bit for bit."""
    _check_equal(_supplied(source, _asked(tensors)), tensors)


def _a_few(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """It supplies nothing that it is not asked for."""
    few = dict(list(tensors.items())[:1])
    _check_equal(_supplied(source, _asked(few)), few)


def _parts(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """A rank gets its part: the box that it holds, or the whole tensor to cut it from."""
    asked = _halves(tensors)
    cut = {name: each[tuple(slice(*span) for span in asked[name].box)] for name, each in tensors.items()}
    _check_equal(_supplied(source, asked), cut)


def _halves(tensors: Mapping[str, torch.Tensor]) -> dict[str, Wanted]:
    asked = _asked(tensors)
    for name, each in tensors.items():
        if each.dim() and len(each) > 1:
            box = ((len(each) // 2, len(each)), *whole_box(tuple(each.shape[1:])))
            asked[name] = Wanted(dtype_name(each.dtype), tuple(each.shape), box)
    return asked


def _others(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """Of a name that it does not have it supplies nothing, and the rest all the same."""
    asked = {**_asked(tensors), "no.such.tensor": Wanted("float32", (1,), ((0, 1),))}
    _check_equal(_supplied(source, asked), tensors)


def _again(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """It can be asked again, as at a second resume."""
    _supplied(source, _asked(tensors))
    _check_equal(_supplied(source, _asked(tensors)), tensors)


def _opened(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """If it can be opened, it gives whole tensors and parts in any order, and puts them into memory of the caller as they are."""
    if not isinstance(source, OpenSource):
        return
    with source.opened() as weights:
        for asked in (_halves(tensors), _asked(tensors)):
            for name, each in reversed(asked.items()):
                first = weights.ties.get(name, name)
                part = tensors[name][tuple(slice(*span) for span in each.box)]
                found = {"read": weights.read(first, each.box)}
                if weights.read_into is not None:
                    size = part.numel() * part.itemsize
                    found["read_into"] = torch.full((size,), 0x5A, dtype=torch.uint8).view(part.dtype).view(part.shape)
                    weights.read_into(first, each.box, found["read_into"])
                _check_equal(found, dict.fromkeys(found, part))
