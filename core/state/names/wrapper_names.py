"""Names without the prefixes of wrappers: `name_in` asks the modules, and `canonical_name` has the name alone."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")
CHECKPOINTS: Final = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""The module of torch that wraps for activation checkpointing."""
# class of a wrapper of torch -> the name under which it has the module that it wraps (ADR-0056)
_WRAPPERS: Final = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    f"{CHECKPOINTS}.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}
_PREFIXES: Final = frozenset(_WRAPPERS.values())
UNNAMED: Final = "_trainfold_unnamed"
"""The attribute of a class of modules of which no child is in a name: each tensor has the name that it has in its part."""
ANY: Final = "*"
"""Stands for any name under which a wrapper has what it wraps."""


def canonical_name(name: str) -> str:
    """Strip every part that is the prefix of a wrapper, at any depth: of a name without the modules that it leads through.

    A user's own module may have such a name too, so two names may become one. `name_in` asks the modules.

    Law: it is idempotent, and always keeps the last part of the name.

    Examples:
        >>> canonical_name("module._orig_mod.h.0._checkpoint_wrapped_module.attn.weight")
        'h.0.attn.weight'
        >>> canonical_name("head.module")
        'head.module'
    """
    if "module" not in name and "_orig_mod" not in name:
        return name  # nearly always
    *path, leaf = name.split(".")
    return ".".join([*(part for part in path if part not in _PREFIXES), leaf])


def names_alone(names: Collection[str]) -> dict[str, str]:
    """The names of a flat dict without the prefixes of wrappers, where nothing but the names says what wraps.

    ``module`` is an ordinary word, and taken for a prefix only in front, where all names with several parts have it. The others are words of torch's alone.

    Args:
        names: such as those of a ``state_dict()``.

    Returns:
        Name -> the name without prefixes. Two may become one.

    Examples:
        >>> names_alone(["n_averaged", "module.enc.module.w", "module.enc._orig_mod.b"])
        {'n_averaged': 'n_averaged', 'module.enc.module.w': 'enc.module.w', 'module.enc._orig_mod.b': 'enc.b'}
    """
    found = {
        name: [
            *(part for part in name.split(".")[:-1] if part not in _PREFIXES or part == "module"),
            name.rpartition(".")[2],
        ]
        for name in names
    }
    while (inner := [parts for parts in found.values() if len(parts) > 1]) and all(
        parts[0] == "module" for parts in inner
    ):
        for parts in inner:
            del parts[0]
    return {name: ".".join(parts) for name, parts in found.items()}


def name_in(root: torch.nn.Module, name: str) -> str:
    """The name of a tensor without the prefixes of the wrappers that it leads through (DDP, FSDP1, compile, activation checkpointing, an average).

    The class of each module says whether it is a wrapper: a module of the user's keeps its name, whatever it is.

    Args:
        root: the module.
        name: of a parameter or buffer, as ``root.named_parameters()`` gives it.

    Examples:
        >>> class Encoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.module = torch.nn.Linear(1, 1)
        >>> name_in(torch.compile(torch.nn.Sequential(Encoder()), backend="eager"), "_orig_mod.0.module.weight")
        '0.module.weight'
    """
    if "module" not in name and "_orig_mod" not in name and wrapped_name(root) is None:
        return name  # nearly always
    *path, leaf = name.split(".")
    kept: list[str] = []
    owner: torch.nn.Module | None = root
    for part in path:
        inside = None if owner is None else wrapped_name(owner)
        while owner is not None and inside not in (None, ANY, part) and part not in owner._modules:  # noqa: SLF001
            owner = owner._modules.get(str(inside))  # noqa: SLF001  # some wrappers leave their prefix out of the names that they give
            inside = None if owner is None else wrapped_name(owner)
        if inside not in (part, ANY):
            kept.append(part)
        owner = None if owner is None else owner._modules.get(part)  # noqa: SLF001  # get_submodule walks from the root each time
    return ".".join([*kept, leaf])


def path_in(root: torch.nn.Module, path: str) -> str:
    """`name_in` of a module: empty for the root, and for what wrappers at the root wrap.

    Examples:
        >>> path_in(torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend="eager"), "_orig_mod.0")
        '0'
    """
    return name_in(root, f"{path}._")[:-2] if path else path


def short_path_in(root: torch.nn.Module, path: str) -> str:
    """`path_in` without all that could be the prefix of a wrapper: as settings and states of modules are called in checkpoints (ADR-0056).

    Examples:
        >>> short_path_in(torch.nn.Sequential(torch.nn.ReLU()), "0.module.act")
        '0.act'
    """
    return canonical_name(f"{path_in(root, path)}._")[:-2] if path else ""


def under_names_of(names: Collection[str], found: Mapping[str, T]) -> Mapping[str, T]:
    """The tensors of a copy of a model under the names that the model has, where only the parts that may be of wrappers differ.

    Args:
        names: of the model.
        found: name -> what a copy has there, such as an average in a class of the user's with the copy as its ``module``.

    Returns:
        The same values. Their names are left as they are if the copy has all names, and where two would become one.

    Examples:
        >>> under_names_of(["enc.module.w"], {"module.enc.module.w": 1, "steps": 2})
        {'enc.module.w': 1, 'steps': 2}
    """
    if all(name in found for name in names):
        return found
    full = {canonical_name(name): name for name in names}
    new = {full.get(canonical_name(name), name): value for name, value in found.items()}
    return new if len(new) == len(found) and len(full) == len(names) else found


def wrapped_name(module: torch.nn.Module) -> str | None:
    """The name under which a wrapper has what it wraps, or ``*`` for any name; None for any other module.

    Examples:
        >>> wrapped_name(torch.optim.swa_utils.AveragedModel(torch.nn.ReLU())), wrapped_name(torch.nn.ReLU())
        ('module', None)
    """
    kind: Any = type(module)
    return _wrapped_by(kind)


@lru_cache(maxsize=4096)
def _wrapped_by(kind: type) -> str | None:
    if getattr(kind, UNNAMED, False):
        return ANY
    # by name: most of these modules of torch are not imported by a program that does not use them
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
