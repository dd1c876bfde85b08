"""Whether this process is one of several ranks, according to torch.distributed or to a launcher such as torchrun."""

from collections.abc import Mapping

import torch

from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.world import Collectives


def ranks_around(environment: Mapping[str, str]) -> str | None:
    """The evidence that there are other ranks, and how many; None without evidence.

    Examples:
        >>> ranks_around({"RANK": "0", "WORLD_SIZE": "4"}), ranks_around({"WORLD_SIZE": "1", "RANK": "0"}), ranks_around({})
        ('WORLD_SIZE=4 in the environment', None, None)
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks: int = torch.distributed.get_world_size()
        return f"torch.distributed with {ranks} ranks" if ranks > 1 else None
    size = environment.get("WORLD_SIZE", "")
    is_one_of_several = "RANK" in environment and size.isdecimal() and int(size) > 1
    return f"WORLD_SIZE={size} in the environment" if is_one_of_several else None


def world_given(collectives: Collectives | None, environment: Mapping[str, str], *, where: str) -> Collectives:
    """The ranks that the caller passed; one process without evidence of others.

    Args:
        collectives: the argument of the caller.
        environment: the environment of this process.
        where: the name of the argument, for the message.

    Raises:
        InvalidArgument: if the caller passed none and there are several ranks. Each would act alone, in the same place or on its own share.
    """
    if collectives is not None:
        return collectives
    others = ranks_around(environment)
    if others is not None:
        raise InvalidArgument(
            where,
            expected=f"the ranks of this job, because there is {others}",
            found="none",
            fix="make this call on every rank, with collectives=trainfold.TorchCollectives(); or say collectives=trainfold.SingleProcess() where "
            "this rank acts alone on purpose",
        )
    return SingleProcess()
