"""`with_numbers`: a saved value with its tensors of one element in place of where these are, such as learning rates in param groups."""

from collections.abc import Mapping
from typing import Any

import torch

from trainfold.backends.formats.torch_save.archive import member_of
from trainfold.backends.formats.torch_save.byte_range import ByteRange
from trainfold.backends.formats.torch_save.tensor_parts import read_box
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.slices import volume, whole_box
from trainfold.core.torch_files.stored_values import StoredTensor


def with_numbers(value: Any, file: ByteRange, members: Mapping[str, ByteRange]) -> Any:
    """A value as `archive_values` returns it, with tensors of one element; larger ones stay a `StoredTensor`.

    Args:
        value: of plain values.
        file: the archive.
        members: of it.

    Raises:
        CheckpointDamaged, CheckpointTorn: if the bytes of one are not there.
    """
    made: dict[int, Any] = {}  # a few dicts that hold one another have more places than there are atoms

    def of(each: Any) -> Any:
        if isinstance(each, StoredTensor):
            return _read(each, file, members)
        if type(each) not in (dict, list, tuple):
            return each
        if id(each) not in made:
            inner = each.items() if type(each) is dict else enumerate(each)
            found = {key: of(one) for key, one in inner}
            made[id(each)] = found if type(each) is dict else type(each)(found.values())
        return made[id(each)]

    return of(value)


def _read(stored: StoredTensor, file: ByteRange, members: Mapping[str, ByteRange]) -> torch.Tensor | StoredTensor:
    box = whole_box(stored.shape)
    if volume(box) != 1:
        return stored
    found = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    read_box(member_of(file, members, stored), stored, box, found)
    return found
