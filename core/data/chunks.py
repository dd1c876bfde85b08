"""Chunks: batches as columns with equal dimension 0, cut and joined so that a forward sees the same memory for any batch size."""

from collections.abc import Sequence
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidBatch
from trainfold.core.leaf_path import join
from trainfold.core.printable import with_article
from trainfold.core.tensor_memory import check_plain

# the alignment of torch's memory on a CPU; kernels may round differently at another alignment
_ALIGNMENT_BYTES: Final = 64
_ARRAYS = (torch.Tensor, np.ndarray)
_NUMBERS: Final = "biufc"


@final
@attrs.frozen(eq=False)
class Columns:
    """A batch, or a part of it, as columns: tensors, arrays, or lists with one value for each sample.

    Attributes:
        values: the columns; None if the batch has None.
        structure: the structure of the batch around them.
        paths: the path of each column, for messages.
        samples: the number of samples in each column.
    """

    values: tuple[Any, ...]
    structure: tree.Spec
    paths: tuple[str, ...]
    samples: int

    def part(self, start: int, stop: int) -> "Columns":
        """Return the samples ``[start, stop)``; tensors and arrays are views."""
        if (start, stop) == (0, self.samples):
            return self
        values = tuple(None if column is None else column[start:stop] for column in self.values)
        return attrs.evolve(self, values=values, samples=stop - start)


def columns_of(batch: Any) -> Columns:
    """Read a batch as columns.

    A list or tuple with tensors or arrays is structure, as in ``[x, y]``; one without is a column. A None is a column too, such as
    an absent mask: every batch has it in the same place.

    Raises:
        InvalidBatch: naming the leaf that is not a column, or the columns that differ in length.
        InvalidArgument: for tensors that are not plain memory.

    Examples:
        >>> found = columns_of({"text": ["a", "b", "c"], "x": torch.arange(3)})
        >>> found.samples, found.part(1, 3).values
        (3, (['b', 'c'], tensor([1, 2])))
    """
    found, structure = tree.flatten(batch, is_leaf=_is_column)
    paths = _paths(batch, "batch")
    for path, value in zip(paths, found, strict=True):
        if isinstance(value, torch.Tensor):
            check_plain(path, value)
    values = tuple(each.as_subclass(torch.Tensor) if isinstance(each, torch.Tensor) else each for each in found)
    lengths = [_length(value) for value in values]
    of_columns = {length for length, value in zip(lengths, values, strict=True) if value is not None}
    if None in of_columns or len(of_columns) != 1:
        shown = {
            path: f"{length} samples"
            if length is not None
            else f"{with_article(type(value).__name__)} that cannot be cut"
            for path, value, length in zip(paths, values, lengths, strict=True)
            if value is not None
        }
        raise InvalidBatch(
            "batch",
            expected="tensors or arrays that share dimension 0, and lists of one value for each sample",
            found=shown or "no leaf",
            fix="return a dict or a tuple of them from fetch or the loader's collate, or pass map(dict, loader) if collate returns another "
            "mapping; keep values that do not belong to a sample out of the batch; or leave chunk= out",
        )
    return Columns(values, structure, tuple(paths), of_columns.pop() or 0)


def joined(parts: Sequence[Columns]) -> Any:
    """Join parts, in their order, into one batch.

    Law: its tensors depend on the samples alone, including their strides and the alignment of their memory.

    Raises:
        InvalidBatch: naming the column whose parts do not fit together.

    Examples:
        >>> whole = columns_of({"x": torch.arange(5)})
        >>> joined([whole.part(1, 3), whole.part(3, 4)])
        {'x': tensor([1, 2, 3])}
    """
    first = parts[0]
    for part in parts[1:]:
        if part.structure != first.structure:
            raise _misfit("batch", str(first.structure), str(part.structure))
    columns = zip(first.paths, *(part.values for part in parts), strict=True)
    return tree.unflatten(first.structure, [_joined(path, pieces) for path, *pieces in columns])


def _is_column(node: Any) -> bool:
    return type(node) in (list, tuple) and not any(isinstance(leaf, _ARRAYS) for leaf in tree.leaves(node))


def _paths(node: Any, path: str) -> list[str]:
    level = None if _is_column(node) else tree.one_level(node)
    if level is None:
        return [path]
    kind, entries, children = level
    pairs = zip(entries, children, strict=True)
    return [found for entry, child in pairs for found in _paths(child, join(path, kind, entry))]


def _length(column: Any) -> int | None:
    if isinstance(column, _ARRAYS):
        return int(column.shape[0]) if column.ndim else None
    return len(column) if _is_column(column) else None


def _joined(path: str, pieces: list[Any]) -> Any:
    first = pieces[0]
    texts = [_described(piece) for piece in pieces]
    odd = next((text for text in texts if text != texts[0]), None)
    if odd is not None or len({type(piece) for piece in pieces}) > 1:
        raise _misfit(path, texts[0], odd or "another type")
    if first is None:
        return None
    if isinstance(first, torch.Tensor):
        return _whole_tensor(pieces)
    if isinstance(first, np.ndarray):
        return _whole_array(pieces)
    return type(first)(value for piece in pieces for value in piece)


def _described(piece: Any) -> str:
    """Describe the properties in which joined parts must agree."""
    if isinstance(piece, torch.Tensor):
        return f"{piece.dtype}, {[*piece.shape[1:]]} a sample, on {piece.device}"
    if isinstance(piece, np.ndarray):
        return f"{piece.dtype}, {[*piece.shape[1:]]} a sample"
    return "None" if piece is None else type(piece).__name__


def _misfit(path: str, expected: str, found: str) -> InvalidBatch:
    return InvalidBatch(
        path,
        expected=f"batches that can be joined; the previous batch has {expected}",
        found=found,
        fix="pad samples to one length for the dataset, or not at all, instead of the length of their batch",
    )


def _whole_tensor(pieces: list[torch.Tensor]) -> torch.Tensor:
    first = pieces[0]
    is_fresh = len(pieces) == 1 and _is_as_new(first) and not (first.is_conj() or first.is_neg())
    if is_fresh and first.data_ptr() % _ALIGNMENT_BYTES == 0:
        return first
    samples = sum(len(piece) for piece in pieces)
    whole = torch.empty((samples, *first.shape[1:]), dtype=first.dtype, device=first.device)
    return torch.cat(pieces, out=whole)


def _is_as_new(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor: a contiguous tensor may have others along dimensions of size 1."""
    return tensor.is_contiguous() and tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _whole_array(pieces: list[Any]) -> Any:
    found = np.ascontiguousarray(np.concatenate(pieces))
    if found.dtype.kind not in _NUMBERS or not found.nbytes:
        return found
    # torch's memory has the alignment that kernels expect
    memory = torch.empty(found.nbytes, dtype=torch.uint8).numpy()
    whole = memory.view(found.dtype).reshape(found.shape)
    whole[...] = found
    return whole
