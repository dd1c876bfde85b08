"""`WeightSource`: supplies weights from outside the checkpoints of a run. `ListedSource`: one that says what it has. `FillingSource`: one that reads into memory that is there. `Wanted`: one tensor that it is asked for. `source_name`: how messages call it."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, final, runtime_checkable

import attrs

from trainfold.core.errors import SourceFailed, TrainfoldError, error_text
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, whole_box

if TYPE_CHECKING:
    import torch

FIX_OF_SOURCE: Final = (
    "fix the source, from the error above; trainfold.properties.contracts.check_weight_source tests one"
)


@final
@attrs.frozen
class Wanted:
    """A tensor of a model without its values, and what this rank holds of it.

    Attributes:
        dtype: torch's name of the dtype, such as ``"bfloat16"``; empty if any floating dtype will do.
        shape: the shape of the whole tensor.
        box: what this rank holds: a (start, stop) pair for each dimension.
        tied_to: the first name of the tensor, if this is another one.

    Examples:
        >>> Wanted("float32", (4, 2), ((0, 2), (0, 2))).is_whole
        False
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box
    tied_to: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it."""
        return self.box == whole_box(self.shape)


@runtime_checkable
class WeightSource(Protocol):
    """What supplies weights: another checkpoint, a directory of a model hub, a server. Pass it to ``attach(weights=...)``.

    It runs where a run begins and at each resume. It is iterated to its end once, and a tensor is copied before the next one is asked for.
    What is yielded is what was supplied: what is missing then, or was not asked for, is an error that names it, before anything trains.
    """

    def supply(self, wanted: "Mapping[str, Wanted]") -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the tensors, in any order, each with its name: all of it, or the box of this rank.

        Args:
            wanted: canonical name -> what is wanted. A tensor with several names is there under each; one of them is enough.
        """


MemoryOf: TypeAlias = "Callable[[str], torch.Tensor | None]"
"""Name -> memory for what this rank holds of the tensor, of its shape; None if there is none to read into. It is asked when the tensor is about to be read."""


@runtime_checkable
class FillingSource(WeightSource, Protocol):
    """A source that reads a tensor straight into the memory of the model, where it has its very bytes. Those of trainfold that wrap such a source are one too."""

    def supply_into(self, wanted: "Mapping[str, Wanted]", memory: MemoryOf) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield as `supply` does. What was read into the memory of a name is yielded as that memory, under that name, and before another name of a tied tensor."""


@runtime_checkable
class ListedSource(WeightSource, Protocol):
    """A source that says what it has before it supplies anything, so that a transform can be planned."""

    def specs(self) -> Mapping[str, LeafSpec]:
        """Name -> dtype and shape of each tensor that it can supply."""


def without_memory(_name: str) -> None:
    """Give no memory: nothing is read into the model's."""
    return


def supply_of(
    source: WeightSource, wanted: "Mapping[str, Wanted]", memory: MemoryOf
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Ask a source for tensors, which it reads into memory if it can."""
    return source.supply_into(wanted, memory) if isinstance(source, FillingSource) else source.supply(wanted)


def source_name(source: object) -> str:
    """The class of a source, and of the one that it wraps, for messages.

    Examples:
        >>> from trainfold.core.weights.wrapped import Cast
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> source_name(Cast(Mine()))
        'Cast(Mine)'
    """
    inner = getattr(source, "source", None)
    mine = type(source).__name__
    return f"{mine}({source_name(inner)})" if isinstance(inner, WeightSource) else mine


def listed_by(source: ListedSource) -> Mapping[str, LeafSpec]:
    """What a source says that it has.

    Raises:
        SourceFailed: for an error of the source's own, which is the cause.
    """
    try:
        return source.specs()
    except TrainfoldError:
        raise
    except Exception as error:
        raise SourceFailed(
            f"weights from {source_name(source)}",
            expected="names with dtypes and shapes, from specs()",
            found=error_text(error),
            fix=FIX_OF_SOURCE,
        ) from error
