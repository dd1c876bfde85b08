"""`size_section`: bytes on disk by component."""

from collections.abc import Mapping, Sequence

from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import lineage
from trainfold.core.markup.chart import bars_html
from trainfold.core.markup.texts import count_text
from trainfold.core.page.page_parts import note, scrolling
from trainfold.core.page.run_page import RunPage
from trainfold.core.printable import bytes_text


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
    return "".join(drawn) + note(f"{total} Files that others refer to count once.")


def _bars(title: str, sizes: Mapping[str, int]) -> str:
    rows = [(name, float(size), bytes_text(size)) for name, size in sizes.items()]
    return scrolling(title, bars_html(title, rows, ("component", "bytes")))


def bytes_by_component(manifests: Sequence[Manifest], *, references: bool = False) -> dict[str, int]:
    """Bytes of the tensors of each component in the files of these checkpoints, and the rest of these files.

    Law: without references, the sum is that of the sizes of the files.

    Args:
        manifests: of checkpoints.
        references: whether bytes in files of other checkpoints count.
    """
    found: dict[str, int] = {}
    whole = 0
    for manifest in manifests:
        counts = [references or not file.checkpoint for file in manifest.files]
        whole += sum(file.size_bytes for file, is_counted in zip(manifest.files, counts, strict=True) if is_counted)
        for component, spans in _spans(manifest).items():
            size = sum(stop - start for file, start, stop in spans if counts[file])
            found[component] = found.get(component, 0) + size
    ordered = dict(sorted(((name, size) for name, size in found.items() if size), key=lambda each: -each[1]))
    rest = whole - sum(ordered.values())
    return {**ordered, **({"headers and the rest": rest} if rest > 0 else {})}


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
