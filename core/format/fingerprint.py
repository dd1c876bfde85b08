"""Fingerprints: one digest for each component, so that "the same bits" is a string that people compare in logs.

A component's fingerprint is the XXH3-128 digest of one line for each leaf, sorted by path: the path, the kind (dtype and
shape, or the scalar's type) and the leaf's own digest. The manifest holds the leaf digests, so a checkpoint's
fingerprints cost no reading. The order of a dict, the device, strides and ties do not matter; every bit does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.format.manifest import TensorRecord
from trainfold.core.format.structure.places import places
from trainfold.core.json_values import Json, canonical_json, encode_scalar, scalar_kind
from trainfold.core.layout.slices import Box, check_cover, volume, whole_box

if TYPE_CHECKING:
    from trainfold.core.format.content_sum import ContentSum
    from trainfold.core.layout.world import Collectives
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


def content_fingerprint(state: "TrainState", *, collectives: "Collectives | None" = None) -> dict[str, str]:
    """One digest for each component of a state, which does not depend on how its tensors are cut.

    It reads about 2 GB/s, a fifth of the speed of `fingerprint`, so no save computes it.

    Law: a state that ranks hold in parts has the digests of the same state on one rank, and of its checkpoints as ``trainfold verify --contents``
    shows them. What each rank has of its own, such as random streams, counts for each rank.

    Args:
        state: this rank's.
        collectives: the ranks that hold parts of the state; all of them call. None for one process.

    Returns:
        Component name -> ``"sum:<32 hex digits>"``, in the state's order.

    Raises:
        InvalidState: if the parts that the ranks hold do not tile a tensor.
        StateDonated: if a donating step has consumed the state.
        UnsupportedLeaf: for a leaf that the format cannot hold.

    Examples:
        >>> from trainfold import Progress, TrainState
        >>> content_fingerprint(TrainState(trainer=Progress(step=1)))
        {'trainer': 'sum:3dfe584bb33e9196cd08ddc0af54c6f1'}
    """
    from trainfold.core.format.codec import as_tensor
    from trainfold.core.format.content_sum import add, box_sum, sum_text
    from trainfold.core.format.structure.describe import describe
    from trainfold.core.format.structure.outline import by_rule
    from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero
    from trainfold.core.format.structure.unite import is_by_name
    from trainfold.core.layout.world import World
    from trainfold.core.state.components import components_of
    from trainfold.core.tensor_memory import tensor_bytes

    described = {name: describe(component, name) for name, component in components_of(state).items()}
    nodes = {name: each.node for name, (each, _) in described.items()}
    kinds = {name: {path: str(spec) for path, spec in each.tensors.items()} for name, (each, _) in described.items()}
    sums: dict[str, dict[str, tuple[Box, ContentSum]]] = {}
    for name, (each, tensors) in described.items():
        sums[name] = {}
        for path, spec in each.tensors.items():
            box = spec.slices[0] if spec.slices else whole_box(spec.shape)
            sums[name][path] = box, box_sum(tensor_bytes(as_tensor(tensors[path], path)), spec.dtype, box)
    first = [name for name, node in nodes.items() if counts_on_rank_zero(node)]
    own = [name for name, node in nodes.items() if belongs_to_rank(name, node)] + first
    cut = {
        name: {p: sums[name][p] for p, spec in each.tensors.items() if spec.slices}
        for name, (each, _) in described.items()
    }
    given: dict[str, Any] = {
        name: (nodes[name], kinds[name], sums[name]) if name in own else cut[name] for name in nodes
    }
    spread = [name for name in nodes if state.stage is not None and is_by_name(nodes[name])]
    world = World() if collectives is None else World(collectives.rank, collectives.world_size)
    for name in spread:
        given[name] = state.stage, by_rule(described[name][0], world, is_spread=True), sums[name]
    every = [given] if collectives is None else collectives.gather(given)
    found = {}
    for name, (each, _) in described.items():
        if name in spread:
            lines = [_of_all_stages(name, [rank[name] for rank in every])]
        elif name in own:
            parts = [rank[name] for rank in every][: 1 if name in first else None]
            if not each.tensors and all(part == parts[0] for part in parts):
                parts = parts[:1]
            if len(parts) > 1:
                parts = _stored_once(parts)
            lines = [
                (node, [(kind[p], sum_text(total)) for p, (_, total) in totals.items()]) for node, kind, totals in parts
            ]
        else:
            whole = {path: total for path, (_, total) in sums[name].items()}
            whole |= {
                path: add(_held_once(path, [rank[name][path] for rank in every], each.tensors[path].shape))
                for path in cut[name]
            }
            lines = [(nodes[name], [(kinds[name][path], sum_text(total)) for path, total in whole.items()])]
        found[name] = contents_text(component_fingerprint(name, lines))
    return found


def contents_text(text: str) -> str:
    """A fingerprint whose lines have content sums, marked as such.

    Examples:
        >>> contents_text("xxh3:0123")
        'sum:0123'
    """
    return "sum:" + text.removeprefix(DIGEST_PREFIX)


def _of_all_stages(name: str, ranks: "list[tuple[Any, Any, dict[str, Any]]]") -> "tuple[Json, list[tuple[str, str]]]":
    """The structure of a component of all stages of a pipeline, with the kind and content sum of each tensor."""
    from trainfold.core.format.content_sum import add, sum_text
    from trainfold.core.format.structure.unite import unite
    from trainfold.core.layout.stage import ranks_by_stage

    parts = ranks_by_stage([stage for stage, _, _ in ranks])
    whole = unite(name, [(those, ranks[those[0]][1]) for those in parts.values()], len(ranks)).described
    held = {path: [sums[path] for _, _, sums in ranks if path in sums] for path in whole.tensors}
    return whole.node, [
        (str(spec), sum_text(add(_held_once(path, held[path], spec.shape)))) for path, spec in whole.tensors.items()
    ]


def _stored_once(ranks: "list[tuple[Json, dict[str, str], dict[str, Any]]]") -> "list[tuple[Json, Any, Any]]":
    """What each rank has of its own, as a checkpoint has it: the first rank of a share of the data stores the value for the others."""
    from trainfold.core.format.structure.ownership import share_of, without_value

    seen: set[tuple[int, int]] = set()
    found: list[tuple[Json, Any, Any]] = []
    for node, kinds, sums in ranks:
        share = share_of(node)
        found.append((without_value(node), {}, {}) if share in seen else (node, kinds, sums))
        seen |= set() if share is None else {share}
    return found


def _held_once(path: str, parts: "list[tuple[Box, ContentSum]]", shape: tuple[int, ...]) -> "list[ContentSum]":
    """The content sums of the parts of a tensor that ranks hold, each part once: replicas hold the same one."""
    once = dict(parts)
    check_cover(path, [box for box in once if volume(box) or not volume(whole_box(shape))], shape)
    return list(once.values())


def component_fingerprint(
    name: str, parts: Sequence[tuple[Json, Sequence[tuple[str, str]]]], *, more: Sequence[str] = ()
) -> str:
    """The fingerprint of a component from its structure and its tensors' digests.

    Args:
        name: the component.
        parts: for each structure (one, or one for each rank), its node and, for each tensor index, the tensor's kind
            (``"float32[2, 3]"``) and digest. A tensor without a digest has no line.
        more: lines for what has none of its own.

    Returns:
        ``"xxh3:<32 hex digits>"``.

    Examples:
        >>> component_fingerprint("n", [(5, [])])
        'xxh3:ddc3fc30dac113b1d87acdae45dd7641'
    """
    lines = list(more)
    for rank, (node, tensors) in enumerate(parts):
        root = name if len(parts) == 1 else f"{name}@{rank}"
        for leaf in places(node, root):
            if leaf.tensor is None:
                kind = scalar_kind(leaf.value, leaf.path)
                digest = digest_of(canonical_json(encode_scalar(leaf.value, leaf.path)))
            else:
                kind, digest = tensors[leaf.tensor]
            if digest:
                lines.append(f"{leaf.path}\t{kind}\t{digest}\n")
    return digest_of("".join(sorted(lines)).encode("utf-8", "surrogatepass"))


def recorded_fingerprint(name: str, nodes: Sequence[Json], tables: Sequence[Sequence[TensorRecord]]) -> str:
    """The fingerprint of a component from the records of its tensors, as version 1 of the manifest has it.

    Args:
        name: the component.
        nodes: its structures, one or one for each rank.
        tables: for each structure, the records of its tensors.
    """
    lines = [[(str(record.spec), tensor_digest(record)) for record in table] for table in tables]
    return component_fingerprint(name, list(zip(nodes, lines, strict=True)))


def tensor_digest(record: TensorRecord) -> str:
    """The digest of a stored tensor: that of its bytes or, if only the digests of several shards are known, the digest of these."""
    return record.whole_digest or digest_of(
        "\n".join(f"{shard.box} {shard.digest}" for shard in record.shards).encode()
    )
