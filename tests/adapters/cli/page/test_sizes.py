"""The bytes of a page by component, against the headers of the files themselves: of several ranks, and of files that another checkpoint uses in part."""

import json
import re

import pytest
from kit.backends.reuse_cases import SHAPES, Chain

from trainfold.adapters.cli.page import opened_indexes
from trainfold.adapters.cli.page.gather import PageReader
from trainfold.backends.stores.local import LocalStore
from trainfold.core.page.sections import SECTIONS
from trainfold.core.page.sizes import NOT_OPENED, NOT_USED, REST, bytes_by_component

VERSIONS = dict.fromkeys(SHAPES, 0)


def header_of(path):
    """Component -> bytes of the tensors in a file, as its header says; and of the header itself."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    rows = {name: row["data_offsets"] for name, row in json.loads(data[8:size]).items() if name != "__metadata__"}
    assert len(data) == size + max((stop for _, stop in rows.values()), default=0)
    return size, rows


def in_headers(folder):
    """What the headers of a directory's files say, for files that hold one component each."""
    found = {REST: 0}
    for path in folder.glob("*.safetensors"):
        size, rows = header_of(path)
        name = re.split(r"-\d", path.name)[0]
        found[name] = found.get(name, 0) + sum(stop - start for start, stop in rows.values())
        found[REST] += size
    return {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bytes_of_each_component_are_those_of_all_ranks(tmp_path, ranks, cut):
    """W22: a page counted rank 0's tensors alone, and called those of the other ranks headers."""
    run = tmp_path / "run"
    Chain(ranks, cut=cut, store=LocalStore(run)).save(1, VERSIONS)
    (entry,) = PageReader(run).read().inventory.entries
    assert bytes_by_component([entry.manifest], references=True) == in_headers(run / entry.name)
    assert bytes_by_component([entry.manifest]) == in_headers(run / entry.name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_file_that_is_referred_to_only_what_is_used_counts(tmp_path, ranks):
    """W22, C13: what a newer checkpoint has replaced is on the disk, and is nothing that it has."""
    run = tmp_path / "run"
    chain = Chain(ranks, store=LocalStore(run))
    chain.save(1, VERSIONS)
    chain.save(2, {**VERSIONS, "rows": 1, "half": 1})
    older, newer = [entry.manifest for entry in PageReader(run).read().inventory.entries]
    assert newer.references
    whole, own, found = in_headers(run / "step-00000001"), in_headers(run / "step-00000002"), bytes_by_component([newer], references=True)  # fmt: skip
    assert {name: found[name] for name in whole if name != REST} == {
        name: size for name, size in whole.items() if name != REST
    }, "as in a checkpoint that was saved in full"
    assert found[REST] == own[REST]
    referred = sum((run / file.path("")).stat().st_size for file in newer.references)
    assert sum(found.values()) == sum(path.stat().st_size for path in (run / "step-00000002").glob("*.safetensors")) + referred  # fmt: skip
    assert found[NOT_USED] > own["model"], "the header, and what the newer one has instead of it"
    assert bytes_by_component([older, newer]) == {name: whole.get(name, 0) + own.get(name, 0) for name in whole}
    assert NOT_USED in SECTIONS["sizes"][2](PageReader(run).read())


def test_ranks_whose_index_is_not_read_have_a_bar_of_their_own(tmp_path, monkeypatch):
    """W22: of a thousand ranks not all is read, and nothing is called what it is not."""
    run = tmp_path / "run"
    Chain(2, cut=True, store=LocalStore(run)).save(1, VERSIONS)
    monkeypatch.setattr(opened_indexes, "MOST_BYTES", 0)
    (entry,) = PageReader(run).read().inventory.entries
    found = bytes_by_component([entry.manifest])
    other = [path for path in (run / entry.name).glob("*.safetensors") if "-00001-of" in path.name]
    assert found[NOT_OPENED] == sum(path.stat().st_size for path in other)
    assert sum(found.values()) == entry.manifest.size_bytes
    assert found[REST] == sum(header_of(path)[0] for path in (run / entry.name).glob("*.safetensors") if path not in other)  # fmt: skip
    assert "1 of 2 ranks" in SECTIONS["sizes"][2](PageReader(run).read())


def test_each_manifest_is_read_whole_once(tmp_path, monkeypatch):
    """W22: that of each checkpoint of several ranks was read twice, for the list and for the bytes of all ranks."""
    run, read = tmp_path / "run", []
    Chain(2, cut=True, store=LocalStore(run)).save(1, VERSIONS)
    original = LocalStore.read

    def noted(self, name, *, start=0, stop=None):
        read.append((name, stop))
        return original(self, name, start=start, stop=stop)

    monkeypatch.setattr(LocalStore, "read", noted)
    PageReader(run).read()
    name = "step-00000001/manifest.json"
    assert read.count((name, (run / name).stat().st_size)) == 1, "of the first lines, less is asked for"


def test_an_index_that_is_damaged_is_a_problem_of_its_checkpoint(tmp_path):
    """W22: the page reads it, and names it."""
    run = tmp_path / "run"
    Chain(2, cut=True, store=LocalStore(run)).save(1, VERSIONS)
    (index,) = (run / "step-00000001").glob("*-00001-of-00002.json")
    index.write_bytes(index.read_bytes()[:-1] + b" ")
    (entry,) = PageReader(run).read().inventory.entries
    assert entry.problem.error == "CheckpointDamaged"
    assert "CheckpointDamaged" in SECTIONS["checkpoints"][2](PageReader(run).read())
