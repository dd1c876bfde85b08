"""What is read row by row is what is read opcode by opcode, of files that are damaged too."""

import io
import pickle
import zipfile
from functools import cache

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainfold.core.errors import TrainfoldError
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files import dcp_metadata, stored_values
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.core.torch_files.text_rows import PlaceRows, TensorRows

SHAPES = [(4, 2), (6,), (), (2, 2, 2), (2, 1, 1, 3)]
FILES = ["__0_0.distcp", "__1_0.distcp"]


def of_torch(*, is_shared):
    """Metadata as torch pickles them: of a chunk or two, with places beyond 2 GB, and parts of rows that come again: first indexes, files or whole places."""
    listed, stored, again, last = {}, {}, torch.Size([0]), "__2_0.distcp"
    for number in range(24):
        shape, name = torch.Size(SHAPES[number % 5]), f"m.{number}"
        starts = [0, 2] if number % 10 == 5 else [0]
        sizes = torch.Size([shape[0] // len(starts), *shape[1:]]) if shape else shape
        chunks = [ChunkStorageMetadata(torch.Size([start, *[0] * (len(shape) - 1)] if shape else []), sizes) for start in starts]  # fmt: skip
        listed[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), shape, chunks)
        for each in chunks:
            first = again if shape == (6,) else each.offsets if number % 4 else torch.Size(list(each.offsets))
            file = FILES[number % 2] if number < 21 else last
            info = _StorageInfo(file, number * 700 if number % 7 else number * 10**9, 700 + number % 3)
            stored[MetadataIndex(name, first)] = stored[next(iter(stored))] if is_shared and number == 20 else info
    return pickle.dumps(Metadata(listed, None, stored), protocol=4)


def saved():
    """The pickle of a file of tensors, of which some share memory, are seen in parts, or are parameters."""
    tensors = {f"l{number}": torch.zeros(SHAPES[number % 5]).to([torch.float32, torch.bfloat16][number % 7 == 0]) for number in range(48)}  # fmt: skip
    tensors |= {"tied": tensors["l44"], "part": tensors["l40"][1:], "p": torch.nn.Parameter(torch.ones(2)), "t": torch.ones(2, 3).t()}  # fmt: skip
    file = io.BytesIO()
    torch.save({"model": tensors, "step": 3}, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))


@cache
def pickles():
    """The pickles, each with what reads it, the module that does, and where most of its rows begin."""
    mine = plan_dcp({f"m.{number}": LeafSpec("float32", SHAPES[number % 5]) for number in range(48)}, {"step": 3})
    metadata = [(each, dcp_metadata.read_dcp_metadata, dcp_metadata, each.index(b"storage_data")) for each in (of_torch(is_shared=False), mine.metadata, of_torch(is_shared=True))]  # fmt: skip
    return [*metadata, (saved(), stored_values.read_values, stored_values, 2300)]


def read(reader, data):
    """What comes of it."""
    try:
        return reader(data, "x")
    except TrainfoldError as error:
        return type(error), str(error)


damages = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "insert", "delete", "repeat"]), st.binary(min_size=1, max_size=3))  # fmt: skip


@given(st.integers(0, 3), st.lists(damages, max_size=2))
@example(0, [])
@example(1, [])
@example(2, [])
@example(3, [])
@example(3, [(0.5, "PUT", b"\x01")])
def test_rows_are_what_their_opcodes_say(which, drawn):
    """U02, M24: damage in a row, and references to the inside of one, never become other values."""
    whole, reader, module, begin = pickles()[which]
    data = bytearray(whole)
    for place, kind, text in drawn:
        at = begin + int(place * (len(data) - begin))
        if kind == "PUT":  # remembered under the number of another value
            data[data.index(b"tr", at) + 2] ^= text[0]
        elif kind == "set":
            data[at : at + len(text)] = text
        elif kind == "insert":
            data[at:at] = text
        else:
            data[at : at + len(text)] = data[at : at + len(text)] * 2 if kind == "repeat" else b""
    found, rows = read(reader, bytes(data)), module._rows
    module._rows = lambda _, __: {}
    try:
        assert found == read(reader, bytes(data))
    finally:
        module._rows = rows


def test_tables_of_torch_and_of_this_library_are_read_by_rows(monkeypatch):
    """Otherwise a plan of 100,000 tensors takes twice as long: each is read once, and its rows as a whole."""
    taken, reads = [], []
    for kind in (PlaceRows, TensorRows):

        def at(self, at, original=kind.at):
            found = original(self, at)
            taken.append(0 if found is None else len(found[0]))
            return found

        monkeypatch.setattr(kind, "at", at)
    for module in (dcp_metadata, stored_values):
        monkeypatch.setattr(module, "read_pickle", lambda *args, each=module.read_pickle, **more: reads.append(args) or each(*args, **more))  # fmt: skip
    for which in (0, 1, 3):
        taken.clear()
        reads.clear()
        whole, reader, *_ = pickles()[which]
        reader(whole, "x")
        assert len(reads) == 1
        assert sum(taken) >= 30
