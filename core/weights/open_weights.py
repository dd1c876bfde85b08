"""`OpenWeights`: what a source has, and a way to read it in any order. `OpenSource`: a source that can be opened so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import attrs

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box
from trainfold.core.weights.source import ListedSource

if TYPE_CHECKING:
    import torch


@final
@attrs.frozen
class OpenWeights:
    """The weights of a source, as they are at one moment.

    Attributes:
        specs: name -> dtype and shape, in the order in which they are read fastest.
        read: returns a part of a tensor, by its name and a (start, stop) pair for each dimension. It is not written to.
        identity: a text that is another one if the contents are; empty if that is not known.
        ties: another name of a tensor -> its first one, which is in ``specs``.
        buffers: the names of those that are not parameters, if that is known.
        read_into: the same, into contiguous memory of that dtype and shape; None if ``read`` needs no memory of its own.
        check: raises if what was read may not be what was there at that moment; called when everything is read.
        expect: may be called once before `read`, with the parts that it will be called for, in about that order: what comes from elsewhere can come together.
    """

    specs: Mapping[str, LeafSpec]
    read: "Callable[[str, Box], torch.Tensor]"
    identity: str = ""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    buffers: frozenset[str] = frozenset()
    read_into: "Callable[[str, Box, torch.Tensor], None] | None" = None
    check: Callable[[], Any] = attrs.field(default=lambda: None)
    expect: "Callable[[Iterator[tuple[str, Box]]], Any]" = attrs.field(default=lambda _: None)


@runtime_checkable
class OpenSource(ListedSource, Protocol):
    """A source that gives its tensors in any order, part by part."""

    def opened(self) -> AbstractContextManager[OpenWeights]:
        """Give what there is now; it can be read until the block ends."""
