"""`Look`: reads the state of attached objects that no component saves, as facts; bounded, and without running their code."""

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from time import thread_time
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from trainfold.adapters.own_state.attributes import SEQUENCES, attributes, held_by
from trainfold.adapters.sharded.dtensor import FSDP_ATTRIBUTES, local_part, own_class
from trainfold.adapters.watch.overwritten import is_remade, use_of
from trainfold.core.digest import digest_of
from trainfold.core.state.audit import (
    BUFFER,
    CARRIED,
    GENERATOR,
    LENGTH,
    NOTHING,
    NUMBER,
    ORDER,
    TENSOR,
    TEXT,
    Fact,
    attribute_of,
)
from trainfold.core.state.fqn import RECIPES
from trainfold.core.state.names.wrapper_names import path_in
from trainfold.core.tensor_memory import tensor_bytes

_DEPTH: Final = 6
_OBJECTS: Final = 20_000  # in one look
_BYTES: Final = 64 * 2**20  # bytes of tensors in one look
_SAMPLED: Final = 4096  # elements read of a tensor above _PIECE bytes
_PIECE: Final = 2**22
_SECS: Final = 0.5  # CPU seconds of this thread, so that other programs do not shorten a look
_WORDS: Final = 624  # the words of a Mersenne twister
_LONG: Final = 1000  # characters; longer texts are not compared
_ROWS: Final = 2**16  # values read of a list
_KINDS: Final = {bool: NUMBER, int: NUMBER, float: NUMBER, complex: NUMBER, str: TEXT, type(None): NOTHING}
_DATA: Final = (Dataset, Sampler, BatchSampler)
_LOADER: Final = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
# torch's modules that compute; its wrappers (DDP, compile, FSDP) contain machinery of a step, not state of a run
_COMPUTE: Final = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.")
_NO_STATE: Final = (*FSDP_ATTRIBUTES, RECIPES)  # how the names of attributes begin that are not state of a module
_CODE: Final = (type, type(sys), torch.jit.ScriptModule)
_HOSTS: Final = {"lightning": ("Trainer", "Fabric"), "pytorch_lightning": ("Trainer",), "lightning_fabric": ("Fabric",)}
_ENTERED: Final = frozenset({"builtins", "collections", "types", "functools", "random"})


@final
class Look:
    """One look at the attached objects.

    Args:
        known: objects saved or looked at elsewhere, by id; they are skipped.
        addresses: the addresses of the saved storages.

    Attributes:
        facts: path -> the fact found there.
        tokens: path -> a token that identifies the same value among the saved ones, unless the value is a number.
    """

    def __init__(self, known: dict[int, Any], addresses: set[int]) -> None:
        self.facts: dict[str, Fact] = {}
        self.tokens: dict[str, str] = {}
        self._classes: dict[str, type] = {}  # of modules, by path
        self._seen = dict(known)
        self._addresses = addresses
        self._bytes = _BYTES
        self._objects = _OBJECTS
        self._deadline = thread_time() + _SECS
        self._in_loader = self._trusts_states = False

    def module(self, root: str, module: torch.nn.Module) -> None:
        """Look at a module: the attributes of all its submodules, and their non-persistent buffers."""
        for path, each in module.named_modules():
            self._module(submodule_path(root, module, path), each)

    def holder(self, root: str, target: Any) -> None:
        """Look at an optimizer, a scheduler, or an object under ``extra``."""
        self._attributes(root, target, 1)

    def loader(self, loader: Any, path: str = "loader") -> None:
        """Look at a loader: its dataset, samplers and functions."""
        self._in_loader = True
        self._trusts_states = hasattr(loader, "state_dict")  # then it saves the states of its parts itself
        if not isinstance(loader, DataLoader):
            self._attributes(path, loader, 1)
            return
        for name in _LOADER:
            self._visit(f"{path}.{name}", getattr(loader, name, None), path, 1)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self._seen[id(module)] = module
        own_kind = own_class(module)
        kind = own_kind.__module__
        is_torchs = kind.startswith("torch.")
        own = {name: value for name, value in vars(module).items() if not name.startswith(_NO_STATE)}
        if not is_torchs:
            self._classes[path] = own_kind
        if not is_torchs or kind.startswith(_COMPUTE):
            names = [name for name in own if name not in _module_names() and not (is_torchs and name[0] == "_")]
            for name in names:
                self._visit(f"{path}.{name}", own[name], path, 1)
        for name in module._non_persistent_buffers_set:  # noqa: SLF001 (torch has no public name for it)
            self._visit(f"{path}.{name}", module._buffers.get(name), path, 1, buffer=True)  # noqa: SLF001

    def _visit(self, path: str, value: Any, owner: str, depth: int, *, buffer: bool = False) -> None:
        kind = _KINDS.get(type(value))
        if kind is not None:
            if kind is not TEXT or len(value) < _LONG:
                self.facts[path] = Fact(kind, plain_text(value), owner)
            return
        if id(value) in self._seen or depth > _DEPTH or self._objects <= 0 or thread_time() > self._deadline:
            return
        self._seen[id(value)] = value
        self._objects -= 1
        with suppress(Exception):  # such as a proxy, or a dict that another thread changes: a look must not fail a save
            if isinstance(value, torch.nn.Module):
                self._unregistered(path, value)
            elif not self._is_value(path, value, owner, BUFFER if buffer else TENSOR) and self._is_entered(value):
                self._enter(path, value, depth)

    def _is_value(self, path: str, value: Any, owner: str, kind: str) -> bool:
        """Record a value without parts; False if the value has parts."""
        if isinstance(value, torch.Tensor):
            self._tensor(path, value, owner, kind)
        elif isinstance(value, np.ndarray):
            # a read-only array does not change, and reading a memory map would read its file
            if value.dtype.kind in "biufc" and value.flags.writeable and not isinstance(value, np.memmap):
                self._tensor(path, torch.from_numpy(value), owner, kind)
        elif isinstance(value, np.generic | itertools.count):
            self.facts[path] = Fact(NUMBER, repr(value), owner)
        elif (token := token_of_generator(value)) is not None:
            self.facts[path] = Fact(GENERATOR, token, owner)
            self.tokens[path] = token
        else:
            return False
        return True

    def _enter(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, SEQUENCES):
            self.facts[f"{path}[len]"] = Fact(LENGTH, str(len(value)), path)
        if isinstance(value, (dict, set, frozenset, *SEQUENCES)):
            for step, child in held_by(value):
                self._visit(path + step, child, path, depth + 1)
        else:
            self._attributes(path, value, depth + 1)

    def _attributes(self, path: str, value: Any, depth: int) -> None:
        """Visit an object's attributes; for torch's own classes only the public ones."""
        hidden = type(value).__module__.startswith("torch.")
        has_epoch = callable(getattr(type(value), "set_epoch", None))
        # then each epoch may make the attributes from scratch
        is_started = has_epoch or (self._in_loader and hasattr(type(value), "__iter__"))
        gives_order = has_epoch or (self._in_loader and isinstance(value, Sampler))
        skipped = _optimizer_names() if isinstance(value, torch.optim.Optimizer) else frozenset()
        held = held_by(value) if callable(value) and not attributes_only(value) else attributes(value)
        for step, child in held:
            name = step[1:]
            if (hidden and name[:1] == "_") or name in skipped or (has_epoch and "epoch" in name):
                continue
            if isinstance(value, IterableDataset) and type(child) in _KINDS:
                continue  # its batches are drawn again at a resume, and compared
            if is_started and child is not None and is_remade(type(value), name):
                continue
            if not (gives_order and self._is_order(path + step, child, path)):
                self._visit(path + step, child, path, depth)

    def _is_order(self, path: str, value: Any, owner: str) -> bool:
        """Record a list or tensor that may be a sampler's order, in full. False for anything else, or if there are objects in it."""
        if isinstance(value, torch.Tensor | np.ndarray):
            return id(value) in self._seen or self._is_value(path, value, owner, ORDER)
        token = token_of_rows(value) if type(value) in SEQUENCES and thread_time() <= self._deadline else None
        if token is None:
            return False
        self._seen[id(value)] = value
        self.facts[path] = Fact(ORDER, token, owner)
        self.tokens[path] = token
        return True

    def _is_entered(self, value: Any) -> bool:
        """Whether an object may hold state, that is: it is neither code nor machinery of torch, Python's library or trainfold."""
        kind = type(value)
        home = kind.__module__.split(".")[0]
        if isinstance(value, _CODE) or home == "trainfold":
            return False
        if kind.__name__ in _HOSTS.get(home, ()):  # a module refers to it; what it holds would use up this look
            return False
        if callable(value) and not isinstance(value, _DATA) and kind.__module__ in ("builtins", "functools"):
            return self._in_loader and not str(getattr(value, "__module__", "torch.")).startswith("torch.")
        if home in ("torch", "torchdata"):
            return home == "torch" and isinstance(value, (*_DATA, torch.optim.Optimizer))
        if self._in_loader and self._trusts_states and hasattr(kind, "state_dict"):
            return False
        return home not in sys.stdlib_module_names or home in _ENTERED

    def _unregistered(self, path: str, module: torch.nn.Module) -> None:
        """Look at a module in a plain list or dict, whose parameters are in no `state_dict`."""
        self.module(path, module)
        for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._tensor(f"{path}.{name}", value, path, TENSOR)

    def _tensor(self, path: str, value: torch.Tensor, owner: str, kind: str) -> None:
        value = local_part(value)  # to look at all of a DTensor, the ranks would have to wait for each other
        if value.layout is not torch.strided or value.device.type == "meta":
            return
        if value.grad_fn is not None:
            module, _, name = attribute_of(path).rpartition(".")
            if module not in self._classes or not use_of(self._classes[module], "forward", name).reads_old:
                return  # a value from forward for its backward is not used by the next step
            kind = CARRIED
        try:
            if value.untyped_storage().data_ptr() in self._addresses:
                return
            digest = self._digest(value)
        except (RuntimeError, NotImplementedError, TypeError):  # it has no memory
            return
        if digest is not None:
            self.facts[path] = Fact(kind, digest, owner, tuple(value.shape))
            self.tokens[path] = digest

    def _digest(self, value: torch.Tensor) -> str | None:
        """The token of a tensor; None if the byte budget of this look is used up."""
        size = value.numel() * value.element_size()
        size = size if size <= _PIECE or not value.is_contiguous() else _SAMPLED * value.element_size()
        if size > self._bytes:
            return None
        self._bytes -= size
        return token_of_tensor(value)


def submodule_path(root: str, module: torch.nn.Module, path: str) -> str:
    """The path of a submodule, without the names of wrappers.

    Examples:
        >>> model = torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend="eager")
        >>> submodule_path("model", model, "_orig_mod.0"), submodule_path("model", model, "_orig_mod")
        ('model.0', 'model')
    """
    short = path_in(module, path)
    return f"{root}.{short}" if short else root


def plain_text(value: Any) -> str:
    """The text of a plain value; large ints in hexadecimal, because Python refuses to print thousands of decimal digits.

    Examples:
        >>> plain_text(0.1), plain_text(2**64)
        ('0.1', '0x10000000000000000')
    """
    return hex(value) if type(value) is int and abs(value) >= 2**64 else repr(value)


def token_of_tensor(value: torch.Tensor) -> str:
    """A token that identifies the values of a tensor: equal for equal bytes, and for equal words of a generator.

    For a large tensor, evenly spaced elements are read.

    Examples:
        >>> token_of_tensor(torch.arange(700)) == token_of_tensor(torch.arange(624, dtype=torch.int32))
        True
    """
    flat = value.detach().reshape(-1)
    if flat.numel() * flat.element_size() > _PIECE:
        flat = flat[:: flat.numel() // _SAMPLED]
    flat = flat.cpu()
    if not flat.is_floating_point() and not flat.is_complex() and flat.element_size() > 1 and flat.numel() >= _WORDS:
        flat = flat[:_WORDS].to(torch.int64)
    return digest_of(tensor_bytes(flat)) if flat.numel() else "empty"


def token_of_rows(value: Any) -> str | None:
    """A token that identifies a list of plain values, or of lists of them; for a long list, evenly spaced values are read.

    None if the list contains anything else.

    Examples:
        >>> token_of_rows([[0, 1], [2, 3]]) == token_of_rows(((0, 1), (2, 3)))
        True
        >>> token_of_rows([]), token_of_rows([object()])
        ('empty', None)
    """
    text: list[str] = []
    room = [_ROWS]
    if not _written(value, text, room):
        return None
    return f"rows {digest_of(' '.join(text).encode('utf-8', 'surrogatepass'))}" if len(value) else "empty"


def _written(value: Any, text: list[str], room: list[int]) -> bool:
    """Append the texts of plain values; False for a value that is not plain."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _KINDS:
        text.append(plain_text(value))
        room[0] -= 1
        return True
    if type(value) not in SEQUENCES:
        return False
    rows = list(value)
    text.append(f"[{len(rows)}")
    rows = rows if len(rows) <= _ROWS else rows[:: len(rows) // _SAMPLED]
    return all(_written(each, text, room) for each in rows if room[0] > 0)


def token_of_generator(value: Any) -> str | None:
    """A token that identifies the state of a random generator; None for anything else.

    Examples:
        >>> generator = torch.Generator()
        >>> token_of_generator(generator) == token_of_tensor(generator.get_state())
        True
    """
    if isinstance(value, torch.Generator):
        return token_of_tensor(value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return token_of_value(value.getstate()[1])
    if isinstance(value, np.random.RandomState):
        return _token_of_bits(value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        return _token_of_bits(value.bit_generator.state)
    if isinstance(value, np.random.BitGenerator):
        return _token_of_bits(value.state)
    return None


def token_of_value(value: Any) -> str | None:
    """A token that identifies a saved value, if it is a tensor, an array, or the words or the number of a generator.

    Examples:
        >>> token_of_value(tuple(range(625))) == token_of_value(np.arange(624, dtype=np.uint32))
        True
    """
    if isinstance(value, torch.Tensor):
        return token_of_tensor(value)
    if isinstance(value, np.ndarray):
        return token_of_tensor(torch.from_numpy(value.copy())) if value.dtype.kind in "biufc" else None
    if isinstance(value, tuple | list) and len(value) >= _WORDS and isinstance(value[0], int):
        return token_of_tensor(torch.tensor(value[:_WORDS], dtype=torch.int64))
    if type(value) is int and abs(value) >= 2**53:
        return f"int {plain_text(value)}"
    return token_of_generator(value)


def _token_of_bits(state: Any) -> str:
    """The token of the words, or of the large number, in the state of a numpy generator."""
    inner = state["state"]
    for value in inner.values() if isinstance(inner, dict) else (inner,):
        token = token_of_value(value)
        if token is not None:
            return token
    return repr(state)


def values_in(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a captured tree, each with the last key on its path; a long row of numbers is one value."""
    token = token_of_value(tree) if isinstance(tree, tuple | list) else None
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from values_in(child, str(key))
    elif isinstance(tree, tuple | list) and token is None:
        for child in tree:
            yield from values_in(child, name)
    else:
        yield name, tree


def lists_in(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The lists of a captured tree, each with the last key on its path."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from lists_in(child, str(key))
    elif isinstance(tree, tuple | list):
        yield name, tree
        for child in tree if token_of_value(tree) is None else ():
            yield from lists_in(child, name)


def attributes_only(value: Any) -> bool:
    """Whether a callable object is an instance of a class and not a function."""
    return type(value).__module__ not in ("builtins", "functools")


@cache
def _module_names() -> frozenset[str]:
    """The attributes that torch itself keeps in every module."""
    return frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"})


@cache
def _optimizer_names() -> frozenset[str]:
    """The attributes that torch itself keeps in every optimizer, and ``step``, which schedulers wrap."""
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return frozenset({*vars(plain), "_opt_called", "_step_count", "step"})
