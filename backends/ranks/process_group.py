"""What `TorchCollectives` asks of torch.distributed: the group and the store to use, and what an error of the transport says."""

import os
from typing import Any, Final

import torch

from trainfold.backends.ranks.launcher import restart_trap
from trainfold.core.errors import InvalidArgument, RankFailed

_ADVICE: Final = ". This is typically"  # what gloo adds


def initialised() -> Any:
    """torch.distributed, if it is initialised."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "TorchCollectives",
            expected="an initialised torch.distributed",
            found="none" if dist.is_available() else "a torch that was built without it",
            fix='start the ranks with torchrun, and call torch.distributed.init_process_group("gloo") (or "nccl") first',
        )
    return dist


def not_made(error: RuntimeError) -> RankFailed:
    """The error of a rank whose group cannot be made."""
    trap = restart_trap(os.environ)
    return RankFailed(
        "the ranks",
        expected="every rank to make its TorchCollectives",
        found=first_sentence(error).splitlines()[0],
        fix="make them at the same point on every rank; look at the ranks that did not come"
        + (f"; {trap}" if trap else ""),
    )


def checked_group(dist: Any, group: Any) -> Any:
    """The group, if this process is in it and it has a backend for the CPU."""
    if dist.get_rank(group) < 0:
        raise InvalidArgument(
            "TorchCollectives.group",
            expected="a group that this process is in",
            found=f"another one, at rank {dist.get_rank()} of all",
            fix="make collectives only on the ranks of the group",
        )
    backends = str(dist.get_backend_config(group))
    if "cpu:" not in backends:
        raise InvalidArgument(
            "TorchCollectives.group",
            expected="a group with a CPU backend",
            found=backends,
            fix="leave group out, so that a gloo group is made",
        )
    return group


def default_store(dist: Any) -> Any:
    """The store at which the ranks have met."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to the store of its groups


def is_of_transport(error: BaseException) -> bool:
    """Whether an error comes from the transport because another rank ended; it may be from a model that communicates."""
    import torch.distributed as dist

    kinds = (dist.DistBackendError, dist.DistNetworkError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def first_sentence(error: BaseException | str) -> str:
    """The text of an error, without the advice added by gloo."""
    return str(error).partition(_ADVICE)[0]


def padded_bytes(data: bytes, size_bytes: int) -> torch.Tensor:
    """Bytes as a tensor of a given size."""
    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)
