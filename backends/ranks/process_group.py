"""What `TorchCollectives` asks of torch.distributed: the group and the store to use, and what an error of the transport says."""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch

from trainfold.backends.ranks.launcher import restart_trap
from trainfold.core.errors import InvalidArgument, RankFailed

_MOST_ASKING: Final = 1024
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


@final
class Arrivals:
    """Records in the store at which the ranks have met that this rank makes its collectives, for the error if another one does not.

    Args:
        dist: torch.distributed.
        group: the group that the collectives are made for; None for all ranks.

    Attributes:
        place: the key of what rank 0 writes about these collectives for the others.
    """

    def __init__(self, dist: Any, group: Any) -> None:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        self._keys: Final = [f"trainfold/made/{name}/{rank}" for rank in ranks]
        self._store: Final = default_store(dist)
        self._times: Final[int] = self._store.add(self._keys[ranks.index(dist.get_rank())], 1)
        self._is_first: Final = dist.get_rank() == ranks[0]
        self.place: Final = f"trainfold/met/{name}/{self._times}"

    def missing(self) -> list[int]:
        """The ranks of the group that have made theirs less often than this one; none if the store has gone with its host.

        Of more than 1,024 ranks only the first one asks, or the store could not answer all.
        """
        if len(self._keys) > _MOST_ASKING and not self._is_first:
            return []
        try:
            return [rank for rank, key in enumerate(self._keys) if self._store.add(key, 0) < self._times]
        except RuntimeError:
            return []


def not_made(error: RuntimeError, missing: Sequence[int]) -> RankFailed:
    """The error of a rank whose group cannot be made."""
    trap, said = restart_trap(os.environ), first_sentence(error).splitlines()[0]
    return RankFailed(
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "the ranks",
        expected="every rank to make its TorchCollectives",
        found=f"no call in time: {said}" if missing else said,
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


def is_of_tcp(dist: Any, store: Any) -> bool:
    """Whether a store is a server, of which a request costs microseconds."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return bool(isinstance(store, dist.TCPStore))


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


def start_all_gather(
    group: Any, tensor: torch.Tensor, world_size: int, timeout_secs: float
) -> tuple[Any, torch.Tensor]:
    """Start to gather the bytes of all ranks; the exchange, and one row for each rank."""
    rows = tensor.new_empty(world_size, tensor.numel())
    return group.allgather([list(rows)], [tensor], _timed(_c10d().AllgatherOptions(), timeout_secs)), rows


def start_broadcast(group: Any, tensor: torch.Tensor, source: int, timeout_secs: float) -> Any:
    """Start to overwrite a tensor with that of one rank."""
    options = _timed(_c10d().BroadcastOptions(), timeout_secs)
    options.rootRank, options.rootTensor = source, 0
    return group.broadcast([tensor], options)


def start_all_reduce(group: Any, tensor: torch.Tensor, timeout_secs: float) -> Any:
    """Start to overwrite a tensor with the sum over the ranks."""
    return group.allreduce([tensor], _timed(_c10d().AllreduceOptions(), timeout_secs))


def start_all_to_all(
    group: Any,
    received: torch.Tensor,
    given: torch.Tensor,
    timeout_secs: float,
    sizes: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Any:
    """Start to exchange parts: part i of each rank goes to rank i. The sizes are those of what comes and of what goes; equal ones without them."""
    come, go = sizes
    return group.alltoall_base(received, given, list(come), list(go), _timed(_c10d().AllToAllOptions(), timeout_secs))


def keep_exchange(exchange: Any) -> None:
    """Keep an exchange, and so its tensors, until `release_exchange`: see `TorchCollectives._wait`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(exchange))


def release_exchange(exchange: Any) -> None:
    """Undo `keep_exchange`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(exchange))


def _timed(options: Any, timeout_secs: float) -> Any:
    options.timeout = timedelta(seconds=timeout_secs)
    return options


def _c10d() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d
