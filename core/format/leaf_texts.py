"""The leaves of a checkpoint as texts that can be compared, from its manifest alone. This module imports no torch."""

from collections.abc import Mapping
from typing import Final

from trainfold.core.format.fingerprint import component_fingerprint, tensor_digest
from trainfold.core.format.manifest import ComponentRecord, Manifest, TensorRecord
from trainfold.core.format.structure.places import places

_WRITTEN_BITS: Final = 4096


def labelled(component: ComponentRecord, part: int) -> str:
    """The root of the leaf paths of a component, with the rank if each rank saved its own."""
    return component.name if len(component.nodes) == 1 else f"{component.name}@rank{part}"


def fingerprints(manifest: Manifest) -> dict[str, str]:
    """The fingerprint of each component."""
    return {component.name: component.fingerprint for component in manifest.components}


def leaf_texts(manifest: Manifest, sums: Mapping[str, str] | None = None) -> dict[str, str]:
    """Each leaf with its kind and contents: a digest for a tensor, the value for anything else.

    A tensor of which only slices have digests has a digest of these, so it equals only a tensor in the same slices, unless it has a sum.

    Args:
        manifest: of the checkpoint.
        sums: leaf -> content sum, of tensors for which that counts.
    """
    known = sums or {}
    found: dict[str, str] = {}
    for component in manifest.components:
        for part, node in enumerate(component.nodes):
            records = component.tensors[part]
            for leaf in places(node, labelled(component, part)):
                if leaf.tensor is None:
                    found[leaf.path] = _exact(leaf.value)
                else:
                    record = records[leaf.tensor]
                    found[leaf.path] = f"{record.spec} {known.get(leaf.path) or tensor_digest(record)}"
    return found


def stored_tensors(manifest: Manifest) -> dict[str, TensorRecord]:
    """Each leaf that is a tensor, and its record."""
    return {
        leaf.path: component.tensors[part][leaf.tensor]
        for component in manifest.components
        for part, node in enumerate(component.nodes)
        for leaf in places(node, labelled(component, part))
        if leaf.tensor is not None
    }


def cut_otherwise(one: Manifest, other: Manifest) -> tuple[str, ...]:
    """The leaves whose digests say nothing, because two checkpoints store the same kind of tensor in other slices."""
    theirs = stored_tensors(other)
    return tuple(
        path
        for path, mine in stored_tensors(one).items()
        if (found := theirs.get(path)) is not None
        and found.spec == mine.spec
        and not (found.whole_digest and mine.whole_digest)
        and [shard.box for shard in found.shards] != [shard.box for shard in mine.shards]
    )


def fingerprints_with(manifest: Manifest, sums: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint of each component, with content sums for the digests of some leaves.

    Args:
        manifest: of the checkpoint.
        sums: leaf -> content sum; a component without any that all ranks share has the fingerprint that was recorded.
    """
    found = {}
    for component in manifest.components:
        texts = [
            [
                (str(record.spec), sums.get(labelled(component, part) + record.path.removeprefix(component.name)))
                for record in table
            ]
            for part, table in enumerate(component.tensors)
        ]
        if any(each for table in texts for _, each in table) or (sums and component.is_own):
            lines = [
                [(kind, each or tensor_digest(record)) for (kind, each), record in zip(table, records, strict=True)]
                for table, records in zip(texts, component.tensors, strict=True)
            ]
            found[component.name] = component_fingerprint(
                component.name, list(zip(component.nodes, lines, strict=True))
            )
        else:
            found[component.name] = component.fingerprint
    return found


def _exact(value: object) -> str:
    if type(value) is int and value.bit_length() > _WRITTEN_BITS:
        return hex(value)  # Python refuses to write out thousands of decimal digits
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)
