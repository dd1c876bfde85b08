"""`TorchParallelism`: how modules train under DistributedDataParallel, FSDP2 or on one process, as torch has set them up."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from trainfold.adapters.sharded.dtensor import device_of_mesh, is_dtensor, local_part, total_norm
from trainfold.adapters.sharded.fsdp2_groups import data_mesh, divide_factors, fsdp2_modules, param_groups, synchronised
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.codec import DENSE
from trainfold.core.layout.parallelism import Coordinates, Parallelism
from trainfold.core.layout.world import World
from trainfold.core.step.rows.sharded import Sharded


@final
class TorchParallelism:
    """The `Parallelism` of modules that ``DistributedDataParallel`` wraps or ``fully_shard`` (FSDP2) has sharded; of any other modules, one process.

    It communicates over the process groups of the modules, in the thread that trains. `attach` makes it from its model.

    Args:
        modules: all modules that are trained together, wrapped and sharded. The same ranks must read different data for each of them.

    Raises:
        InvalidArgument: if the modules have other ranks.

    Examples:
        >>> alone = TorchParallelism(torch.nn.Linear(1, 1))
        >>> alone, alone.gradient_divisor
        (TorchParallelism(rank 0 of 1, share 0 of 1), 1.0)
    """

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._wrappers = [
            each for module in modules for each in module.modules() if isinstance(each, DistributedDataParallel)
        ]
        self._sharded = fsdp2_modules(modules)
        self._groups = _data_groups(self._wrappers, param_groups(self._sharded))
        self._summed = _reduced_by(self._wrappers)
        self._device = _device(modules)
        self._is_cut = any(is_dtensor(each) for module in modules for each in module.parameters())

    def __repr__(self) -> str:
        here = self.coordinates
        return (
            f"TorchParallelism(rank {here.world.rank} of {here.world.size}, share {here.data.rank} of {here.data.size})"
        )

    @property
    def device(self) -> torch.device:
        """Where the tensors are that ranks exchange."""
        return self._device

    @property
    def is_known(self) -> bool:
        """Whether the modules say how they are trained, or there is one rank."""
        if self._groups or self._is_cut or not torch.distributed.is_available():
            return True
        return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1

    @property
    def coordinates(self) -> Coordinates:
        """Each rank of the process groups has a share of the data. Ranks that only cut tensors, as in tensor parallelism, have one share."""
        rank, size = 0, 1
        for group in self._groups:
            rank = rank * torch.distributed.get_world_size(group) + torch.distributed.get_rank(group)
            size *= torch.distributed.get_world_size(group)
        if not self._groups and not (self._is_cut and torch.distributed.is_initialized()):
            return Coordinates(World(), World())
        world = World(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return Coordinates(world, World(rank, size))

    @property
    def gradient_divisor(self) -> float:
        """The number of shares, or what ``set_gradient_divide_factor`` has set.

        Raises:
            InvalidArgument: if the gradients of some parameters are divided by another number than those of others.
        """
        size = self.coordinates.data.size
        factors = {float(size if each is None else each) for each in divide_factors(param_groups(self._sharded))}
        if len(factors) > 1:
            raise InvalidArgument(
                "parallelism.gradient_divisor",
                expected="one number by which the gradients of all parameters are divided",
                found=" and ".join(f"{each:g}" for each in sorted(factors)),
                fix="call set_gradient_divide_factor on every module that fully_shard has sharded: it sets that module, and not those inside it",
            )
        return next(iter(factors), float(size))

    @contextmanager
    def gradient_sync(self, *, enabled: bool) -> Iterator[None]:
        """As ``no_sync`` of DDP around the forward too, and ``set_requires_gradient_sync`` of FSDP2."""
        before = [(each, each.require_backward_grad_sync) for each in self._wrappers]
        with ExitStack() as stack:
            stack.enter_context(synchronised(param_groups(self._sharded), enabled=enabled))
            try:
                for wrapper, _ in before:
                    wrapper.require_backward_grad_sync = enabled
                yield
            finally:
                for wrapper, was_on in before:
                    wrapper.require_backward_grad_sync = was_on

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums, by one all-reduce for each dtype and process group."""
        sums = [each.detach().clone() for each in tensors]
        for dtype in dict.fromkeys(each.dtype for each in sums) if self._groups else ():
            mine = [index for index, each in enumerate(sums) if each.dtype == dtype]
            flat = torch.cat([sums[index].reshape(-1).to(self._device) for index in mine])
            for group in self._groups:
                torch.distributed.all_reduce(flat, group=group)
            pieces = torch.split(flat, [sums[index].numel() for index in mine])
            for index, piece in zip(mine, pieces, strict=True):
                sums[index] = piece.reshape(sums[index].shape).to(sums[index].device)
        return sums

    def unsummed(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """The parameters whose gradients no backward sums over the ranks, such as the ``ignored_params`` of ``fully_shard``; none on one process.

        Those that require no gradient are not meant.
        """
        if not self._groups:
            return []
        return [
            each for each in parameters if each.requires_grad and id(each) not in self._summed and not is_dtensor(each)
        ]

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """With the bits of ``torch.nn.utils.clip_grad_norm_``; gradients that are cut over other meshes are added to them."""
        if set(map(type, gradients)) <= DENSE:  # nearly always, but for FSDP2
            return torch.nn.utils.get_total_norm(gradients)
        kinds: dict[Any, list[torch.Tensor]] = {}
        for each in gradients:
            kinds.setdefault(each.device_mesh if is_dtensor(each) else None, []).append(each)  # type: ignore[attr-defined]
        norms = [
            torch.nn.utils.get_total_norm(each) if mesh is None else total_norm(each) for mesh, each in kinds.items()
        ]
        if len(norms) > 1:
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
            return total
        return norms[0]

    def local(self, leaf: torch.Tensor) -> torch.Tensor:
        """The local part of a DTensor; any other tensor itself."""
        return local_part(leaf)

    def fail(self, error: BaseException) -> None:
        """Do nothing: process groups have no way to report an error, and the other ranks wait until their timeout."""


@final
class TrainingRanks:
    """How the ranks train the modules of a run: as `attach` was given it, or as torch has set them up.

    Args:
        parallelism: what `attach` was given; None if nothing.
        model: of the run.
        extra: the other components; modules may be registered later.
        around: makes the parallelism of a pipeline of that of its stages; None without a pipeline.

    Raises:
        InvalidArgument: for `Sharded`, by which no module is cut.
    """

    def __init__(
        self,
        parallelism: Parallelism | None,
        model: torch.nn.Module,
        extra: Mapping[str, Any],
        *,
        around: Callable[[TorchParallelism], Parallelism] | None = None,
    ) -> None:
        if isinstance(parallelism, Sharded):
            raise InvalidArgument(
                "attach.parallelism",
                expected="how the ranks train the objects of a loop",
                found="Sharded, which cuts the state of a step: every rank would train all of the model",
                fix="shard the model with fully_shard and leave parallelism= out; or pass it to make_step",
            )
        self._given = parallelism
        self._around = around
        self._found: Parallelism | None = None
        self._of_step: tuple[list[torch.nn.Parameter], list[Any]] | None = None
        self._model = model
        self._extra = extra

    def registered(self) -> None:
        """Note that the run has one more component, which may be a wrapped or sharded module."""
        self._found = self._of_step = None

    @property
    def of_step(self) -> tuple[list[torch.nn.Parameter], list[Any]]:
        """What a step is checked for, as at the first use after a registration.

        Returns:
            The parameters that were frozen when ``DistributedDataParallel`` wrapped their module, as the wrappers say; and the modules that
            ``fully_shard`` was called on.
        """
        if self._of_step is None:
            modules = self._modules
            self._of_step = [] if self._given is not None else unreduced(modules), fsdp2_modules(modules)
        return self._of_step

    @property
    def sharded(self) -> list[Any]:
        """The modules that ``fully_shard`` was called on."""
        return self.of_step[1]

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [self._model, *(each for each in self._extra.values() if isinstance(each, torch.nn.Module))]

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train; found at the first use after a registration.

        Raises:
            InvalidArgument: if there are several ranks, and nothing says how they train.
        """
        if self._given is not None:
            return self._given
        if self._found is None:
            found = TorchParallelism(*self._modules)
            if self._around is not None:
                self._found = self._around(found)
                return self._found
            if not found.is_known:
                raise InvalidArgument(
                    "attach.parallelism",
                    expected="the ranks that train the model, where torch.distributed has several",
                    found="no attached module that DistributedDataParallel wraps or that fully_shard has sharded",
                    fix="attach the wrapper itself; pass parallelism=trainfold.ranks.Replicas(trainfold.TorchCollectives()) to let live.check sum the "
                    "gradients, or Replicas(trainfold.SingleProcess()) if each rank trains a model of its own",
                )
            self._found = found
        return self._found


def _data_groups(wrappers: list[DistributedDataParallel], groups: list[Any]) -> list[Any]:
    """The process groups over which sums go one after the other; none on one process."""
    found = {str(_ranks(each.process_group)): [each.process_group] for each in wrappers}
    for group in groups:
        mesh = data_mesh([group])
        found[str(mesh.mesh.flatten().tolist())] = [mesh.get_group(index) for index in range(mesh.ndim)]
    if len(found) > 1:
        raise InvalidArgument(
            "parallelism",
            expected="modules that train on the same ranks",
            found=f"modules on the ranks {' and '.join(found)}",
            fix="attach them in runs of their own, or pass a parallelism of your own",
        )
    return next(iter(found.values()), [])


def unreduced(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters inside a ``DistributedDataParallel`` that it does not know: they were frozen when it was made, or came later. It never sums their gradients."""
    wrappers = [each for module in modules for each in module.modules() if isinstance(each, DistributedDataParallel)]
    summed = _reduced_by(wrappers) if wrappers else frozenset()
    return [each for wrapper in wrappers for each in _named_in(wrapper).values() if id(each) not in summed]


def _reduced_by(wrappers: list[DistributedDataParallel]) -> frozenset[int]:
    return frozenset(id(each) for wrapper in wrappers for each in _known_to(wrapper))


def _named_in(wrapper: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """What is in a wrapper now, without what it ignores."""
    return {name: each for name, each in wrapper.module.named_parameters() if name not in wrapper.parameters_to_ignore}


def _known_to(wrapper: Any) -> Sequence[torch.Tensor]:
    """The parameters whose gradients a wrapper sums: those that required one when it was made."""
    now = [each for each in _named_in(wrapper).values() if each.requires_grad]
    then = wrapper._get_ddp_logging_data()  # noqa: SLF001
    size_bytes = sum(each.numel() * each.element_size() for each in now)
    if (then["num_parameter_tensors"], then["total_parameter_size_bytes"]) == (len(now), size_bytes):
        return now
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001 - it makes tensors for all gradients, so not always
    return [each for bucket in buckets for each in bucket.parameters()]


def _ranks(group: Any) -> list[int]:
    return list(torch.distributed.get_process_group_ranks(group))


def _device(modules: Iterable[torch.nn.Module]) -> torch.device:
    parameters = [each for module in modules for each in module.parameters()]
    found = device_of_mesh(parameters)
    return found or (parameters[0].device if parameters else torch.device("cpu"))
