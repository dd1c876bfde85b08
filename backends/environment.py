"""The numerical environment: the settings of the program and properties of the machine that determine the bits of a sum."""

import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from trainfold.core.layout.shard import Shard
from trainfold.core.resume.drift import ENVIRONMENT
from trainfold.core.state.state import ModelState, TrainState

_UNKNOWN: Final = "unknown"
_BACKENDS: Final[Any] = torch.backends  # its modules have no types for their settings


def environment_of(state: TrainState) -> dict[str, Any]:
    """Contract key -> plain value, for the process and for the device of a state's model.

    It takes about twenty microseconds, so each save can read it: a program may change its settings while it runs.

    Examples:
        >>> found = environment_of(TrainState())
        >>> found["environment.default_dtype"], "environment.threads" in found
        ('float32', True)
    """
    found = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "mkldnn": _BACKENDS.mkldnn.enabled,
        "matmul_precision": _matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": _machine(),
        "flush_denormal": _flushes_denormals(),
    }
    device = _device_of(state)
    if device is not None:
        found["device"] = device.type
        if device.type == "cuda":
            found |= _cuda(device)
    return {f"{ENVIRONMENT}{name}": value for name, value in found.items()}


def _device_of(state: TrainState) -> torch.device | None:
    params = state.model.params if isinstance(state.model, ModelState) else {}
    first = next(iter(params.values()), None)
    return getattr(first.tensor if isinstance(first, Shard) else first, "device", None)


def _cuda(device: torch.device) -> dict[str, Any]:
    cudnn = _BACKENDS.cudnn
    return {
        "device_name": torch.cuda.get_device_name(device),
        "cuda": f"{torch.version.cuda}, cudnn {cudnn.version()}",
        "cudnn_precision": _read(lambda: cudnn.conv.fp32_precision),
        "cudnn": {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic},
    }


def _flushes_denormals() -> bool:
    """Whether numbers below the smallest normal one become 0 in this thread; torch has a setter and no getter, so it is tried."""
    smallest = sys.float_info.min
    return smallest / 2 == 0.0


@cache
def _machine() -> str:
    return platform.machine()


def _matmul_precision() -> Any:
    """The precision by its one name for all backends; by the backends' own names if a program has set them: torch refuses the one name then."""
    found = _read(torch.get_float32_matmul_precision)
    if found != _UNKNOWN:
        return found
    mkldnn, cuda = _BACKENDS.mkldnn, _BACKENDS.cuda
    return {
        "mkldnn": _read(lambda: mkldnn.matmul.fp32_precision),
        "cuda": _read(lambda: cuda.matmul.fp32_precision),
    }


def _read(setting: Callable[[], Any]) -> Any:
    """A setting with an old and a new name; torch refuses to read it if a program has used both."""
    try:
        return setting()
    except (RuntimeError, AttributeError):
        return _UNKNOWN
