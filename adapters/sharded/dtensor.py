"""DTensors, as ``fully_shard`` (FSDP2) makes them: the part that this rank holds, as a `Shard` leaf. No other module knows DTensor.

A DTensor has no address and counts the bytes of all ranks. Its local part is a plain tensor: it may be a view of larger, padded memory, and
it is empty on a rank that has no rows. FSDP2 may replace it at the first forward and at a load with ``assign=True``, so it is never kept.
"""

import importlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.format.codec import DENSE
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import Placement, make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.fqn import NamedTensors, named_tensors

FSDP_ATTRIBUTES: Final = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""How the names of the attributes begin that ``fully_shard`` adds to a module."""
_MODULE: Final = "torch.distributed.tensor"
_RANDOM: Final = "torch.distributed.tensor._random"


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, a parameter or not; torch's module of them is not imported."""
    if type(value) in DENSE:  # nearly always
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, getattr(module, "DTensor", ()))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank: the local part of a DTensor, and any other tensor itself.

    Examples:
        >>> weight = torch.ones(2)
        >>> local_part(weight) is weight
        True
    """
    if type(tensor) in DENSE or not is_dtensor(tensor):
        return tensor
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return] # noqa: SLF001  # to_local() is a view of its own, and waits


def leaf_of(tensor: torch.Tensor, path: str) -> Any:
    """Return a tensor as a leaf: a `Shard` for a DTensor that is cut, the local part for one that is whole on this rank, else the tensor.

    Args:
        tensor: a parameter, buffer or slot.
        path: the leaf path, for the error.

    Raises:
        InvalidState: for a DTensor that is cut in a way that cannot be saved.

    Examples:
        >>> leaf_of(torch.ones(2), "w")
        tensor([1., 1.])
    """
    if not is_dtensor(tensor):
        return tensor
    found: Any = tensor
    shape, local = found.shape, local_part(found)
    cut = _cut(shape, found.device_mesh, found.placements)
    if cut.problem is None and tuple(local.shape) == cut.sizes:
        return local if cut.is_whole else Shard(local, tuple(shape), cut.starts, _is_copied(cut), cut.placement)
    raise InvalidState(
        path,
        expected="a DTensor of which each rank has a part, as fully_shard (FSDP2) and tensor parallelism make it",
        found=cut.problem or f"{list(local.shape)} of {list(shape)} where {list(cut.sizes)} belong",
        fix="redistribute it before the save: a sum that is still to be made, and a part in a place that no order of axes gives, cannot be saved",
    )


def _is_copied(cut: "_Cut") -> bool:
    """Whether other ranks hold the same part: of the mesh, or of another mesh that cuts as many ranks alike, such as a parameter that no plan of tensor parallelism names."""
    world: Any = torch.distributed.group.WORLD
    return cut.replicas > 1 or (world is not None and cut.ranks < world.size())


def cut_problem(tensor: Any) -> str | None:
    """Return why a DTensor cannot be saved, in words; None if each dimension of its mesh repeats it or cuts it."""
    return _cut(tensor.shape, tensor.device_mesh, tensor.placements).problem


def like_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a new DTensor for these values on this rank, cut as a parameter is, such as a slot of it. No rank waits for another one.

    As torch's optimizers make their slots: its memory is where the parameter's is, also if FSDP2 keeps that on the CPU.

    Args:
        value: this rank's part; a meta tensor for values that are written later.
        parameter: a DTensor.
    """
    made = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    if not value.is_meta:
        local_part(made).copy_(value)
    return made


def is_cut_like(tensor: Any, parameter: Any) -> bool:
    """Whether two DTensors are cut alike, over the same ranks."""
    return bool(
        tensor.shape == parameter.shape
        and tensor.device_mesh == parameter.device_mesh
        and tensor.placements == parameter.placements
    )


def total_norm(gradients: list[Any]) -> torch.Tensor:
    """Return the 2-norm of DTensors over one mesh, with the bits of ``torch.nn.utils.get_total_norm``.

    Gradients that are cut alike are reduced as plain local tensors: an operation on each DTensor would cost ten times as much.

    Args:
        gradients: at least one.
    """
    kinds = {(each.placements, each.dtype, each.device) for each in gradients}
    if len(kinds) > 1:
        return _whole(torch.nn.utils.get_total_norm(gradients))
    from torch.distributed.tensor import DTensor

    smallest = min(gradients, key=lambda each: local_part(each).numel())
    like: Any = torch._foreach_norm([smallest])[0]  # noqa: SLF001  # its placements are those of all norms
    norms = torch.stack(torch._foreach_norm([local_part(each) for each in gradients]))  # noqa: SLF001
    found: Any = DTensor.from_local(norms, smallest.device_mesh, like.placements, run_check=False)
    return _whole(torch.linalg.vector_norm(found))


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]


def device_of_mesh(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the accelerator of the DTensors' meshes; None without one. With FSDP2's CPU offload their memory is on the CPU.

    Examples:
        >>> device_of_mesh([torch.ones(1)]) is None
        True
    """
    for tensor in tensors:
        if is_dtensor(tensor):
            found: Any = tensor
            kind = found.device_mesh.device_type
            if kind not in ("cpu", "meta"):
                return torch.device(kind, torch.get_device_module(kind).current_device())
    return None


def mesh_of(tensors: Iterable[torch.Tensor]) -> Any:
    """Return the mesh of the first DTensor; None without one."""
    return next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)  # type: ignore[attr-defined]


def has_random_tracker() -> bool:
    """Whether a random operation on a DTensor has made torch's tracker of the accelerator's stream. On CPU meshes there is none."""
    module = sys.modules.get(_RANDOM)
    return module is not None and getattr(module, "_rng_tracker", None) is not None


def make_random_tracker(mesh: Any) -> None:
    """Make the tracker, which leaves the stream of each rank as it is.

    Otherwise the first random operation on a DTensor makes it, and gives every rank the stream that rank 0 has then.

    Args:
        mesh: of the model.
    """
    module: Any = importlib.import_module(_RANDOM)
    module._rng_tracker = module.OffsetBasedRNGTracker(mesh, run_state_sync=False)  # noqa: SLF001  # the public way, manual_seed, moves the streams


def named_shards(module: torch.nn.Module) -> NamedTensors:
    """Name the tensors of a module, after FSDP2 has freed what its last forward gathered.

    After a forward without a backward, as in an evaluation, FSDP2 leaves plain, gathered copies in the place of its parameters.
    """
    reshard(module)
    return named_tensors(module)


def reshard(*modules: torch.nn.Module) -> None:
    """Let every FSDP2 module put its own parameters back in place of gathered copies; a call costs little if there are none."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    if not FSDPModule.__subclasses__():  # fully_shard makes one for each class that it shards
        return
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a module as the script wrote it: ``fully_shard`` gives each module a subclass of its own.

    Examples:
        >>> own_class(torch.nn.Linear(1, 1))
        <class 'torch.nn.modules.linear.Linear'>
    """
    kind = type(module)
    if kind.__module__.startswith("torch.distributed.fsdp.") and any(
        each.__name__ == "FSDPModule" for each in kind.__mro__
    ):
        return next((each for each in kind.__mro__ if not each.__module__.startswith("torch.distributed.fsdp")), kind)
    return kind


def dtensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the DTensors among named tensors."""
    return {name: value for name, value in named if is_dtensor(value)}


class _Cut(NamedTuple):
    """What this rank holds of a DTensor, or why it cannot be saved."""

    problem: str | None
    is_whole: bool = True
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ranks: int = 1  # of its mesh
    replicas: int = 1  # how many of them hold the same part
    placement: Placement | None = None


@lru_cache(maxsize=2**14)
def _cut(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> _Cut:
    """Computed by our own rule: torch's says another place for uneven rows that tensor parallelism and then FSDP2 have cut."""
    cuts = _cuts(len(shape), tuple(mesh.shape), placements)
    if cuts is None:
        return _Cut(f"a DTensor with the placements {placements}")
    placement = make_placement(make_mesh(mesh.shape, ranks=mesh.mesh.flatten().tolist()), cuts)
    mine = placement.at(tuple(mesh.get_coordinate()))
    box = mine.box(tuple(shape))
    sizes, starts = tuple(stop - start for start, stop in box), tuple(start for start, _ in box)
    return _Cut(None, not any(cuts), sizes, starts, placement.mesh.size, mine.replicas, placement)


def _cuts(dimensions: int, sizes: tuple[int, ...], placements: tuple[Any, ...]) -> list[list[int]] | None:
    """For each dimension of a tensor the axes of the mesh that cut it, outermost first; None for placements that only torch knows.

    A strided shard cuts what as many parts as its factor says have been made of, by axes further right.
    """
    from torch.distributed.tensor import Replicate, placement_types
    from torch.distributed.tensor import Shard as Cut

    strided = getattr(placement_types, "_StridedShard", Cut)
    cuts: list[list[int]] = [[] for _ in range(dimensions)]
    for axis, each in reversed(list(enumerate(placements))):
        if type(each) is Replicate:
            continue
        if type(each) not in (Cut, strided):
            return None
        axes, parts, place = cuts[each.dim], 1, 0
        while place < len(axes) and parts < getattr(each, "split_factor", 1):
            parts *= sizes[axes[place]]
            place += 1
        if parts != getattr(each, "split_factor", 1):
            return None
        axes.insert(place, axis)
    return cuts
