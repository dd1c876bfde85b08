"""Whether this process is one of several ranks, according to torch.distributed or to a launcher such as torchrun."""

import logging
import os
from collections.abc import Mapping
from typing import Final

import torch

from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.user_warning import warn_user
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.world import Collectives

_LOG: Final = logging.getLogger("trainfold")


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


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one that speaks for all ranks: rank 0, or a process without evidence of others.

    Examples:
        >>> is_first_rank({"RANK": "1", "WORLD_SIZE": "4"}), is_first_rank({"RANK": "0"}), is_first_rank({})
        (False, True, True)
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_rank() == 0)
    return environment.get("RANK", "0") == "0"


def log_for_all(text: str, *about: object) -> None:
    """Log a warning about the run, which each rank finds alike, once a run: as a warning in the process that speaks for all ranks, in the others for debugging.

    Args:
        text: as for a logger.
        about: its arguments.
    """
    _LOG.log(logging.WARNING if is_first_rank(os.environ) else logging.DEBUG, text, *about)


def warn_for_all(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn the user once a run of what each rank finds alike; see `log_for_all`."""
    if is_first_rank(os.environ):
        warn_user(text, category)
    else:
        _LOG.debug("%s", text)


def restart_trap(environment: Mapping[str, str]) -> str | None:
    """What to change if torchrun may restart the workers and the restarted ones would not find each other; None if all is well.

    torchrun keeps one store for all restarts, in which gloo finds the addresses of processes that are gone: seen with torch 2.13. The agent
    reads the setting that helps, before it starts a worker, so no worker can set it.

    Examples:
        >>> restart_trap({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"})[:43]
        'torchrun may restart the workers 3 times, b'
        >>> restart_trap({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"})
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not restarts.isdecimal() or int(restarts) == 0:
        return None
    return (
        f"torchrun may restart the workers {restarts} times, but restarted workers would fail to connect: they find the addresses of the processes "
        "before them. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
    )


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
