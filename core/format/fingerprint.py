"""Fingerprints: one digest for each component, so that "the same bits" is a string that people compare in logs.

A component's fingerprint is the XXH3-128 digest of one line for each leaf, sorted by path: the path, the kind (dtype and
shape, or the scalar's type) and the leaf's own digest. The manifest holds the leaf digests, so a checkpoint's
fingerprints cost no reading. The order of a dict, the device, strides and ties do not matter; every bit does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import TensorRecord
from trainfold.core.format.structure.places import places
from trainfold.core.json_values import Json, canonical_json, encode_scalar, scalar_kind

if TYPE_CHECKING:
    from trainfold.core.state.state import TrainState


def fingerprint(state: "TrainState") -> dict[str, str]:
    """One digest for each component of a state.

    Returns:
        Component name -> ``"xxh3:<32 hex digits>"``, in the state's order.

    Raises:
        StateDonated: if a donating step has consumed the state.
        UnsupportedLeaf: for a leaf that the format cannot hold.

    Examples:
        >>> from trainfold import Progress, TrainState
        >>> one = fingerprint(TrainState(trainer=Progress(step=1)))
        >>> one == fingerprint(TrainState(trainer=Progress(step=1))), one == fingerprint(TrainState(trainer=Progress()))
        (True, False)
    """
    from trainfold.core.format.codec import leaf_digest
    from trainfold.core.format.structure.describe import describe
    from trainfold.core.state.components import components_of

    found = {}
    for name, component in components_of(state).items():
        described, tensors = describe(component, name)
        lines = [(str(described.tensors[path]), leaf_digest(leaf, path)) for path, leaf in tensors.items()]
        found[name] = component_fingerprint(name, [(described.node, lines)])
    return found


def component_fingerprint(name: str, parts: Sequence[tuple[Json, Sequence[tuple[str, str]]]]) -> str:
    """The fingerprint of a component from its structure and its tensors' digests.

    Args:
        name: the component.
        parts: for each structure (one, or one for each rank), its node and, for each tensor index, the tensor's kind
            (``"float32[2, 3]"``) and digest.

    Returns:
        ``"xxh3:<32 hex digits>"``.

    Examples:
        >>> component_fingerprint("n", [(5, [])])
        'xxh3:ddc3fc30dac113b1d87acdae45dd7641'
    """
    lines = []
    for rank, (node, tensors) in enumerate(parts):
        root = name if len(parts) == 1 else f"{name}@{rank}"
        for leaf in places(node, root):
            if leaf.tensor is None:
                kind = scalar_kind(leaf.value, leaf.path)
                digest = digest_of(canonical_json(encode_scalar(leaf.value, leaf.path)))
            else:
                kind, digest = tensors[leaf.tensor]
            lines.append(f"{leaf.path}\t{kind}\t{digest}\n")
    return digest_of("".join(sorted(lines)).encode("utf-8", "surrogatepass"))


def recorded_fingerprint(name: str, nodes: Sequence[Json], tables: Sequence[Sequence[TensorRecord]]) -> str:
    """The fingerprint of a component from the records of its tensors.

    Args:
        name: the component.
        nodes: its structures, one or one for each rank.
        tables: for each structure, the records of its tensors.
    """
    lines = [[(str(record.spec), tensor_digest(record)) for record in table] for table in tables]
    return component_fingerprint(name, list(zip(nodes, lines, strict=True)))


def tensor_digest(record: TensorRecord) -> str:
    """The digest of a stored tensor: that of its bytes or, if it is stored in several shards, that of their digests."""
    if len(record.shards) == 1:
        return record.shards[0].digest
    return digest_of("\n".join(f"{shard.box} {shard.digest}" for shard in record.shards).encode())
