"""What a script has set of how its ranks train a module, for the resume contract: it changes the bits of the training, and no state has it."""

import math
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from trainfold.adapters.sharded.dtensor import is_dtensor
from trainfold.adapters.sharded.fsdp2_groups import data_mesh, divide_factors, fsdp2_modules, param_groups, reductions
from trainfold.core.digest import digest_of
from trainfold.core.json_values import Json
from trainfold.core.state.contract_kinds import BUCKETS, DIVISORS, PARTS, RANKS, WRAPPER

_SHOWN: Final = 8
_COMMUTES: Final = 2  # a sum over two ranks has no order, and its half is exact; DDP divides before it sums, and FSDP2 sums in other pieces


def settings_of_parallel(module: torch.nn.Module, path: str) -> dict[str, Json]:
    """Return contract key -> plain value: the mesh of the ranks that read different data, what wraps the module, mixed precision, the sizes of buckets, communication hooks and a divisor of gradients.

    Args:
        module: a module that is wrapped, sharded, or neither.
        path: the prefix of the keys.

    Examples:
        >>> settings_of_parallel(torch.nn.Linear(1, 1), "m")
        {}
    """
    wrappers = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
    groups = param_groups(fsdp2_modules([module]))
    found: dict[str, Json] = {}
    is_exact = True
    is_parallel = groups or wrappers or any(map(is_dtensor, module.parameters()))
    if is_parallel:  # all ranks of tensor parallelism alone read the same data
        mesh = [*data_mesh(groups).shape] if groups else [wrappers[0].process_group.size()] if wrappers else [1]
        found[RANKS] = mesh
        is_exact = math.prod(mesh) <= _COMMUTES
        if not is_exact:
            found[WRAPPER] = "FSDP2" if groups else "DDP"
            if buckets := [_buckets(each) for each in wrappers]:
                found[BUCKETS] = buckets[0] if len(buckets) == 1 else [*buckets[:_SHOWN]]
    texts = [
        _text(each) for each in [*(each.mixed_precision for each in wrappers), *(each.mp_policy for each in groups)]
    ]
    if precision := _precision(texts):
        found["(precision)"] = precision
        if len(texts) > _SHOWN and len(set(texts)) > 1:
            found[PARTS] = digest_of("\n".join(texts).encode())
    hooks = [getattr(hook[0], "__qualname__", "unknown") for each in wrappers for hook in each._comm_hooks]  # noqa: SLF001
    sums = reductions(groups, is_exact=is_exact)
    if hooks or any(sums):
        alike = sums[:1] if len(set(sums)) == 1 else [*sums[:_SHOWN], *_digest_of_more(sums)]
        found["(hooks)"] = [*hooks, *(alike if any(sums) else [])]
    if any(divisors := divide_factors(groups)):
        found["(divisor)"] = divisors[0] if len(divisors) == 1 else [*divisors[:_SHOWN]]
        if len(divisors) > 1:
            each = [group.gradient_divide_factor for group in groups]
            found[DIVISORS] = [*each[:_SHOWN], *_digest_of_more(each)]
    return {f"{path}.{key}": value for key, value in found.items()}


def _digest_of_more(values: list[Any]) -> list[str]:
    """A digest of all values, if there are more than a contract lists."""
    return [digest_of(repr(values).encode())] if len(values) > _SHOWN else []


def _buckets(wrapper: Any) -> Json:
    """How many bytes of gradients DDP sums at once, and in which order if it keeps one: a sum of three numbers and more is rounded otherwise in another place."""
    several = getattr(wrapper, "bucket_bytes_cap_list", None)
    each: Json = [*several] if several else int(wrapper.bucket_bytes_cap)
    return f"{each}, find_unused_parameters" if wrapper.find_unused_parameters and not wrapper.static_graph else each


def _precision(texts: list[str]) -> Json:
    """One text if all parts have one precision; else that of each, as far as a few; None if none is mixed."""
    if not any(texts):
        return None
    return (
        texts[0]
        if len(set(texts)) == 1
        else [*texts[:_SHOWN], f"{len(texts)} parts, {len(texts) - texts.count('')} mixed"]
    )


def _text(policy: Any) -> str:
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    dtypes = {name: getattr(policy, name, None) for name in names}
    return ", ".join(
        f"{name.removesuffix('_dtype')} {str(dtype).removeprefix('torch.')}"
        for name, dtype in dtypes.items()
        if dtype is not None
    )
