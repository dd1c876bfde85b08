"""`size_section`: bytes on disk by component."""

from collections.abc import Mapping, Sequence
from typing import Final

from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import lineage
from trainfold.core.markup.chart import bars_html
from trainfold.core.markup.texts import count_text
from trainfold.core.page.page_parts import note, scrolling
from trainfold.core.page.run_page import RunPage
from trainfold.core.printable import bytes_text

REST: Final = "headers and the rest"
NOT_USED: Final = "in files of other checkpoints, not used"
NOT_OPENED: Final = "of ranks that are not read here"


def size_section(page: RunPage) -> str:
    """Bytes on disk by component."""
    known = [(entry.name, entry.manifest) for entry in page.inventory.entries if entry.manifest is not None]
    sizes = page.sizes
    if not known:
        return note("No manifest could be read, so sizes are not known.")
    newest = next((entry for entry in lineage(page.inventory) if entry.manifest is not None), None)
    drawn = []
    if newest is not None and newest.manifest is not None:
        drawn.append(_bars(f"In the newest checkpoint, {newest.name}", bytes_by_component([newest.manifest], references=True)))  # fmt: skip
    if len(known) > 1:
        drawn.append(_bars(f"On disk, in the {len(known)} newest checkpoints", bytes_by_component([each for _, each in known])))  # fmt: skip
    total = f"{bytes_text(sum(sizes.values()))} in the data files of {count_text(len(sizes), 'checkpoint')}."
    return "".join(drawn) + note(f"{total} Files that others refer to count once.{_left_out([each for _, each in known])}")  # fmt: skip


def _left_out(manifests: Sequence[Manifest]) -> str:
    """Where the tables of tensors are not read of all ranks."""
    parts = [each for each in manifests if not has_all_indexes(each)]
    if not parts:
        return ""
    of = f"{count_text(len(parts), 'checkpoint')}, {len(parts[-1].opened or ())} of {parts[-1].world_size:,} ranks"
    return f" The tables of tensors are large, so they were not read of all ranks: of {of}; <code>trainfold inspect</code> reads them all."


def has_all_indexes(manifest: Manifest) -> bool:
    """Whether the tensors of all ranks are in it."""
    return manifest.opened is None or all(index.rank in manifest.opened for index in manifest.indexes)


def _bars(title: str, sizes: Mapping[str, int]) -> str:
    rows = [(name, float(size), bytes_text(size)) for name, size in sizes.items()]
    return scrolling(title, bars_html(title, rows, ("component", "bytes")))


def bytes_by_component(manifests: Sequence[Manifest], *, references: bool = False) -> dict[str, int]:
    """Bytes of the tensors of each component in the files of these checkpoints, and the rest of these files.

    Law: the sum is that of the sizes of the files; of a manifest with all indexes, the bytes of each component are those that the headers of the files say.

    Args:
        manifests: of checkpoints.
        references: whether files of other checkpoints count; of those, what is not used has a bar of its own.
    """
    found: dict[str, int] = {}
    apart = dict.fromkeys((REST, NOT_USED, NOT_OPENED), 0)
    for manifest in manifests:
        used = [0] * len(manifest.files)
        opened = [manifest.opened is None or file.rank in manifest.opened for file in manifest.files]
        counts = [is_open and (references or not file.checkpoint) for file, is_open in zip(manifest.files, opened, strict=True)]  # fmt: skip
        for component, spans in _spans(manifest).items():
            for at, start, stop in spans:
                if counts[at]:
                    used[at] += stop - start
                    found[component] = found.get(component, 0) + stop - start
        for file, is_open, size in zip(manifest.files, opened, used, strict=True):
            if references or not file.checkpoint:
                apart[NOT_OPENED if not is_open else NOT_USED if file.checkpoint else REST] += file.size_bytes - size
    ordered = sorted(((name, size) for name, size in found.items() if size), key=lambda each: -each[1])
    return dict(ordered) | {name: size for name, size in apart.items() if size > 0}


def _spans(manifest: Manifest) -> dict[str, set[tuple[int, int, int]]]:
    """Component -> (file, first byte, one past the last) of its tensors, those included that nothing but their place was read of."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for component in manifest.components:
        shards = (shard for table in component.tensors for record in table for shard in record.shards)
        found.setdefault(component.name, set()).update((each.file, each.start, each.stop) for each in shards)
    for other in manifest.others:
        places = zip(other.starts, other.stops, strict=True)
        found.setdefault(other.component, set()).update((other.file, start, stop) for start, stop in places)
    return found
