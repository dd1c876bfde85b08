"""The contract of `Converter`: what a converter has to do, whatever it adds to the weights of a model."""

from collections.abc import Callable, Mapping

import torch

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, volume, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.transform.apply import table_of, transform_specs, transform_tensors
from trainfold.core.transform.converters.converter import Converter, view
from trainfold.core.transform.transform import compose
from trainfold.properties.differences import ContractBroken

Tensors = Mapping[str, torch.Tensor]


def check_converter(converter: Converter, tensors: Tensors) -> None:
    """Check that a converter keeps the contract of `Converter`.

    Args:
        converter: yours.
        tensors: the weights of a model that has it, by name: one at least that it has added, one of the base, and one with two rows or more.

    Raises:
        ContractBroken: naming every broken rule.

    Examples:
        >>> from trainfold.transforms import lora
        >>> tensors = {"q.base_layer.weight": torch.ones(2, 2), "q.lora_A.default.weight": torch.ones(1, 2), "q.lora_B.default.weight": torch.ones(2, 1)}
        >>> check_converter(lora(alpha=2), tensors)
    """
    broken = []
    for rule in _RULES:
        try:
            rule(converter, tensors)
        except Exception as error:  # noqa: BLE001 - of the user's converter: the other rules are checked too
            broken.append(f"{(rule.__doc__ or '').strip()}: {type(error).__name__}: {error}")
    if broken:
        raise ContractBroken("\n".join(broken))


def _specs(tensors: Tensors) -> dict[str, LeafSpec]:
    return {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}


def _has_the_methods(converter: Converter, tensors: Tensors) -> None:
    """It has the methods, and the tensors have something of each kind."""
    assert isinstance(converter, Converter), "key_filter, state_dict_adapter and state_dict_transform are needed"
    owned = [converter.key_filter(name) for name in tensors]
    assert all(type(each) is bool for each in owned), "key_filter returns something else than True and False"
    assert any(owned), "of the given tensors it owns none"
    assert not all(owned), "of the given tensors it owns all"


def _parts(converter: Converter, tensors: Tensors) -> None:
    """The base and what it owns have each tensor once, bit for bit and in its dtype."""
    named = {name: converter.state_dict_adapter(name) for name in tensors if not converter.key_filter(name)}
    assert len(set(named.values())) == len(named), f"two tensors of the base have one name outside: {named}"
    owned, base = (dict(transform_tensors(view(converter, which), tensors)) for which in ("owned", "base"))
    assert list(owned) == [name for name in tensors if converter.key_filter(name)], f"it owns {list(owned)}"
    assert list(base) == list(named.values()), f"expected {list(named.values())}, found {list(base)}"
    for name, each in tensors.items():
        found = owned[name] if name in owned else base[named[name]]
        assert found.dtype == each.dtype, f"{name} is {found.dtype}"
        assert _bits(found) == _bits(each), f"{name} has other bits"


def _export(converter: Converter, tensors: Tensors) -> None:
    """Its export has the names and shapes of the base, and nothing of its own."""
    base = transform_specs(view(converter, "base"), _specs(tensors))
    found = transform_specs(view(converter, "export"), _specs(tensors))
    assert sorted(found) == sorted(base), f"expected {sorted(base)}, found {sorted(found)}"
    other = [name for name, each in found.items() if each.shape != base[name].shape]
    assert not other, f"{', '.join(other)} have other shapes"


def _described(converter: Converter, tensors: Tensors) -> None:
    """Specs say what comes, and the transform describes itself in words."""
    transform = view(converter, "export")
    said = transform_specs(transform, _specs(tensors))
    assert _specs(dict(transform_tensors(transform, tensors))) == said, "specs say something else than tensors"
    assert str(transform).strip(), "str(state_dict_transform) is empty"
    assert " at 0x" not in str(transform), "str(state_dict_transform) does not describe it"


def _inverse(converter: Converter, tensors: Tensors) -> None:
    """The inverse of its transform, if it has one, gives the tensors back, bit for bit."""
    transform = converter.state_dict_transform
    if transform.inverse is None:
        return
    found = dict(transform_tensors(compose(transform, transform.inverse), tensors))
    assert sorted(found) == sorted(tensors), f"expected {sorted(tensors)}, found {sorted(found)}"
    other = [name for name, each in tensors.items() if found[name].dtype != each.dtype or _bits(found[name]) != _bits(each)]  # fmt: skip
    assert not other, f"{', '.join(other)} have other bits"


def _of_parts(converter: Converter, tensors: Tensors) -> None:
    """A part of an export is that of the whole, to the bit, and of the parts that it says it is made of, so that a shard of it may be made of shards."""
    table = table_of(view(converter, "export"), _specs(tensors))

    def computed(name: str, box: Box) -> torch.Tensor:
        said = [(source.name, inner) for source, inner in table[name].reads(box)]

        def read(source: str, inner: Box) -> torch.Tensor:
            is_said = any(source == other and _is_within(inner, outer) for other, outer in said)
            assert is_said, f"{name}: it reads {source} {inner}, which reads() of {box} does not yield"
            return tensors[source][tuple(slice(*span) for span in inner)]

        return table[name].computed(box, read)

    for name, each in table.items():
        whole = computed(name, whole_box(each.shape))
        for dim, size in enumerate(each.shape):
            box = (*whole_box(each.shape[:dim]), (size // 2, size), *whole_box(each.shape[dim + 1 :]))
            part = whole[tuple(slice(*span) for span in box)]
            assert _bits(computed(name, box)) == _bits(part), f"{name}: a part along dimension {dim} has other bits"


def _unchanged(converter: Converter, tensors: Tensors) -> None:
    """It leaves the tensors as they were, and an export can be made again."""
    before = {name: _bits(each) for name, each in tensors.items()}
    first, again = (
        {name: _bits(each) for name, each in transform_tensors(view(converter, "export"), tensors)} for _ in range(2)
    )
    assert {name: _bits(each) for name, each in tensors.items()} == before, "it wrote into them"
    assert first == again, "the second one is another"


_RULES: tuple[Callable[[Converter, Tensors], None], ...] = (_has_the_methods, _parts, _export, _described, _inverse, _of_parts, _unchanged)  # fmt: skip


def _is_within(box: Box, outer: Box) -> bool:
    """Whether a box has elements of another one alone."""
    return not volume(box) or all(low <= start and stop <= high for (start, stop), (low, high) in zip(box, outer, strict=True))  # fmt: skip


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
