"""The leaves of a checkpoint as texts that can be compared, from its manifest alone. This module imports no torch."""

from typing import Final

from trainfold.core.format.fingerprint import tensor_digest
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.format.structure.places import places

_WRITTEN_BITS: Final = 4096


def labelled(component: ComponentRecord, part: int) -> str:
    """The root of the leaf paths of a component, with the rank if each rank saved its own."""
    return component.name if len(component.nodes) == 1 else f"{component.name}@rank{part}"


def fingerprints(manifest: Manifest) -> dict[str, str]:
    """The fingerprint of each component."""
    return {component.name: component.fingerprint for component in manifest.components}


def leaf_texts(manifest: Manifest) -> dict[str, str]:
    """Each leaf with its kind and contents: a digest for a tensor, the value for anything else.

    A tensor that is stored in several slices has a digest of the slices' digests, so it equals only a tensor in the
    same slices.
    """
    found: dict[str, str] = {}
    for component in manifest.components:
        for part, node in enumerate(component.nodes):
            records = component.tensors[part]
            for leaf in places(node, labelled(component, part)):
                if leaf.tensor is None:
                    found[leaf.path] = _exact(leaf.value)
                else:
                    record = records[leaf.tensor]
                    found[leaf.path] = f"{record.spec} {tensor_digest(record)}"
    return found


def _exact(value: object) -> str:
    if type(value) is int and value.bit_length() > _WRITTEN_BITS:
        return hex(value)  # Python refuses to write out thousands of decimal digits
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)
