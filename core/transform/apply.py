"""`transform_specs`, `transform_tensors`, `transform_stream` and `plan_parts`: a transform on specs, on tensors one at a time, and on what each rank holds."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, intersect, volume, whole_box
from trainfold.core.transform.expression import Expression, Read, SourceTensor, computed_whole
from trainfold.core.transform.transform import Transform, transform_given

if TYPE_CHECKING:
    import torch


def transform_specs(transform: Transform, specs: Mapping[str, LeafSpec]) -> dict[str, LeafSpec]:
    """Say what a transform makes of tensors, without any of them.

    Args:
        transform: what is done.
        specs: name -> dtype and shape.

    Returns:
        Name -> dtype and shape of each result, in the order in which `transform_tensors` yields them.

    Raises:
        InvalidState: if tensors have not the form that the transform needs.

    Examples:
        >>> from trainfold.core.transform.fusing import merge
        >>> specs = {"wk": LeafSpec("float32", (2, 8)), "wv": LeafSpec("float32", (2, 8))}
        >>> print(transform_specs(merge(["wk", "wv"], "kv"), specs)["kv"])
        float32[4, 8]
    """
    return {name: LeafSpec(each.dtype, each.shape) for name, each in table_of(transform, specs).items()}


def table_of(transform: Transform, specs: Mapping[str, LeafSpec]) -> dict[str, Expression]:
    """What each result is made of.

    Args:
        transform: what is done.
        specs: name -> dtype and shape of each source tensor.

    Raises:
        InvalidState: if tensors have not the form that the transform needs.
    """
    rules = transform_given("transform", transform)
    if odd := next((name for name, each in specs.items() if not isinstance(each, LeafSpec)), None):
        raise InvalidArgument(f"specs[{odd!r}]", expected="a dtype and a shape, as LeafSpec has them", found=shown(specs[odd]), fix='pass trainfold.states.LeafSpec("float32", (4, 2))')  # fmt: skip
    return rules.on({name: SourceTensor(name, each.dtype, each.shape) for name, each in specs.items()})


def is_made_of(each: Expression, names: Collection[str]) -> bool:
    """Whether a result is made of source tensors with these names alone."""
    return bool(names) and all(source.name in names for source, _ in each.reads(whole_box(each.shape)))


def transform_tensors(
    transform: Transform, tensors: "Mapping[str, torch.Tensor]"
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield what a transform makes of tensors in memory, one after the other.

    Args:
        transform: what is done.
        tensors: name -> tensor, on any device; they are not written to.

    Yields:
        The name and the tensor, which may share memory with a tensor that it is made of. Copy it before you write to it.

    Raises:
        InvalidState: at the call, if tensors have not the form that the transform needs; later, if two that are tied differ, or a number would become infinite where it is rounded.

    Examples:
        >>> import torch
        >>> from trainfold.core.transform.naming import rename
        >>> dict(transform_tensors(rename("w", "weight"), {"w": torch.ones(2)}))
        {'weight': tensor([1., 1.])}
    """
    import torch

    from trainfold.core.state.spec import dtype_name

    for name, each in tensors.items():
        if not isinstance(each, torch.Tensor) or each.layout is not torch.strided:
            raise InvalidArgument(f"tensors[{name!r}]", expected="a dense tensor", found=str(each.layout) if isinstance(each, torch.Tensor) else shown(each), fix="pass tensor.to_dense(), or leave it out")  # fmt: skip
    specs = {name: LeafSpec(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
    return transform_stream(
        transform, specs, lambda name, box: tensors[name][tuple(slice(start, stop) for start, stop in box)]
    )


def transform_stream(
    transform: Transform, specs: Mapping[str, LeafSpec], read: Read
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield what a transform makes of tensors that lie elsewhere, such as in files: `read` gives it the parts that it needs.

    Memory: one result and the largest part of which it is made, beside what ``read`` keeps. Nothing is read before the first one is asked for, and nothing
    twice that one result needs once.

    Args:
        transform: what is done.
        specs: name -> dtype and shape of each source tensor.
        read: returns a part of a source tensor, by its name and a (start, stop) pair for each dimension.

    Yields:
        The name and the tensor, which may share memory with what was read.

    Raises:
        InvalidState: as in `transform_tensors`.
    """
    table = table_of(transform, specs)
    return ((name, computed_whole(each, read)) for name, each in table.items())


@final
@attrs.frozen
class PartPlan:
    """What a rank needs for its part of a result.

    Attributes:
        name: of the result.
        box: the part of it.
        reads: source tensor -> the parts of it that are needed.
        needed: how many elements these have.
        is_gathered: whether the rank holds less than that, so that other ranks, or a file, have to give it the rest.
    """

    name: str
    box: Box
    reads: Mapping[str, tuple[Box, ...]]
    needed: int
    is_gathered: bool

    def __str__(self) -> str:
        how = "gathered" if self.is_gathered else "in parts"
        return f"{self.name} {_shown(self.box)}: {how}, of {', '.join(f'{name} {_shown(box)}' for name, each in self.reads.items() for box in each)}"


def plan_parts(
    transform: Transform,
    specs: Mapping[str, LeafSpec],
    wanted: Mapping[str, Box | None],
    *,
    held: Mapping[str, Box | None] | None = None,
) -> tuple[PartPlan, ...]:
    """Say which parts of source tensors a rank needs for its parts of the results.

    Args:
        transform: what is done.
        specs: name -> dtype and shape of each source tensor.
        wanted: result -> the part that this rank wants; None for all of it.
        held: source tensor -> the part that it holds; None for all of it. By default it holds nothing, and reads.

    Returns:
        A plan for each wanted part, in the order of ``wanted``.

    Raises:
        InvalidState: if tensors have not the form that the transform needs.
        InvalidArgument: for a name that is not one of the results or of the source tensors, and a box that is not one of the tensor.

    Examples:
        >>> from trainfold.core.transform.values import transpose
        >>> specs = {"w": LeafSpec("float32", (4, 6))}
        >>> print(*plan_parts(transpose("w"), specs, {"w": ((0, 3), (0, 4))}, held={"w": ((0, 4), (0, 3))}))
        w [0:3, 0:4]: in parts, of w [0:4, 0:3]
    """  # fmt: skip
    table = table_of(transform, specs)
    wants = _boxes("wanted", wanted, table, fix="see transform_specs for names and shapes")
    has = _boxes("held", held or {}, specs, fix="pass what this rank holds of the source tensors")
    plans = []
    for name, part in wants.items():
        needed = dict.fromkeys((source.name, each) for source, each in table[name].reads(part))  # each part once
        reads: dict[str, tuple[Box, ...]] = {}
        for source, each in needed:
            reads[source] = (*reads.get(source, ()), each)
        is_gathered = any(
            volume(each) > 0 and (source not in has or intersect(each, has[source]) != each) for source, each in needed
        )
        plans.append(PartPlan(name, part, reads, sum(volume(each) for _, each in needed), is_gathered))
    return tuple(plans)


def _boxes(
    where: str, given: Mapping[str, Box | None], known: Mapping[str, LeafSpec] | Mapping[str, Expression], *, fix: str
) -> dict[str, Box]:
    """Checked boxes; None for a whole tensor."""
    if unknown := [name for name in given if name not in known]:
        raise InvalidArgument(where, expected=f"names of {len(known)} tensors, such as {', '.join([*known][:4])}", found=", ".join(unknown[:8]), fix=fix)  # fmt: skip
    for name, box in given.items():
        shape = known[name].shape
        if box is not None and not _is_box(box, shape):
            raise InvalidArgument(f"{where}[{name!r}]", expected=f"a (start, stop) pair for each dimension of {list(shape)}", found=shown(box), fix=fix)  # fmt: skip
    return {name: whole_box(known[name].shape) if box is None else box for name, box in given.items()}


def _is_box(box: object, shape: tuple[int, ...]) -> bool:
    try:
        return all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return False


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
