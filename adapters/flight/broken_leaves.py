"""`BrokenLeaves`: which parameters and buffers of modules have become a NaN or an infinity since the modules were first seen."""

import weakref
from collections.abc import Iterable, Iterator
from typing import final

import torch

from trainfold.adapters.flight.leaf_text import LeafText, looked_at


@final
class BrokenLeaves:
    """What was not finite of a module when it was first seen is not at fault in a step: it is a mask by design, or nothing has set it yet, as after `torch.empty`.

    It counts only once more of it is a NaN, or it is not finite in another way, or once the module was `used` and made a NaN of it.
    """

    def __init__(self) -> None:
        self._first: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, LeafText]] = weakref.WeakKeyDictionary()

    def note(self, module: torch.nn.Module) -> None:
        """Take what is not finite of a module for what it began with, if it was not seen before; also what is frozen, as it may be trained later."""
        if module not in self._first:
            leaves = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            self._first[module] = {leaf.path: leaf for leaf in _leaves(leaves) if leaf.bad}

    def used(self, module: torch.nn.Module) -> None:
        """Note that a module made a NaN of what is finite: what it has of NaNs is at fault from here on, as in a checkpoint that has them."""
        first = self._first.get(module, {})
        for path in [path for path, leaf in first.items() if "nan" in leaf.what]:
            del first[path]

    def parameters(self, module: torch.nn.Module) -> list[LeafText]:
        """The trainable parameters of its own that have become so."""
        return self._since(module, ((name, each) for name, each in module.named_parameters(recurse=False) if each.requires_grad))  # fmt: skip

    def buffers(self, module: torch.nn.Module) -> list[LeafText]:
        """The buffers of its own that have become a NaN, of those that checkpoints save: others may be scratch memory. Infinities may be where an observer begins again."""
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 - nothing public says which are saved
        saved = ((name, each) for name, each in module.named_buffers(recurse=False) if name not in unsaved)
        return [leaf for leaf in self._since(module, saved) if "nan" in leaf.what]

    def _since(self, module: torch.nn.Module, leaves: Iterable[tuple[str, torch.Tensor]]) -> list[LeafText]:
        first = self._first.get(module, {})
        found = []
        for leaf in _leaves(leaves):
            was = first.pop(leaf.path, None)  # what is set meanwhile counts if it breaks again
            if was is not None and _is_no_worse(leaf, was):
                first[leaf.path] = leaf
            elif leaf.bad:
                found.append(leaf)
        return found


def _is_no_worse(leaf: LeafText, was: LeafText) -> bool:
    """Whether a leaf is not finite in no other way, nor in more NaNs; more infinities may be a mask that grows."""
    return leaf.bad > 0 and {*leaf.what} <= {*was.what} and (leaf.bad <= was.bad or "nan" not in leaf.what)


def _leaves(leaves: Iterable[tuple[str, torch.Tensor]]) -> Iterator[LeafText]:
    return (leaf for name, each in leaves for leaf in looked_at(name, each, lambda _: None))
