"""What each rank contributes to the fingerprint of a component, so that no rank has to know the digest of every part that the others wrote."""

from collections.abc import Collection, Mapping, Sequence
from typing import final

import attrs

from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.format.fingerprint import component_fingerprint, tensor_digest
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.json_values import Json
from trainfold.core.layout.slices import whole_box


@final
@attrs.frozen
class FingerprintPart:
    """What a rank wrote of a component.

    Attributes:
        whole: the tensors that it wrote whole, or of which it wrote the first elements and all ranks hold the others, as text: ``index:digest`` without
            the digests' prefix, joined by commas.
        parts: the digest of the parts of tensors that no rank holds whole; empty for none.
        own: the fingerprint of what it alone has; empty for a component that all ranks share.
    """

    whole: str = ""
    parts: str = ""
    own: str = ""


def contributions_of(
    component: ComponentRecord, manifest: Manifest, ranks: Collection[int]
) -> dict[int, FingerprintPart]:
    """What ranks contribute, in the order in which they are given.

    Args:
        component: with at least the shards of these ranks.
        manifest: whose files the shards lie in.
        ranks: the ranks.
    """
    if component.is_own:
        return {rank: _own(component, rank) for rank in ranks}
    whole: dict[int, list[str]] = {rank: [] for rank in ranks}
    parts: dict[int, list[str]] = {rank: [] for rank in ranks}
    writers = [file.rank for file in manifest.files]
    for number, record in enumerate(component.tensors[0]):
        all_of_it, kind = whole_box(record.shape), str(record.spec)
        for shard in record.shards:
            rank = writers[shard.file]
            if rank not in whole:
                continue
            of_all = shard.digest if shard.box == all_of_it else shard.whole
            if of_all:
                whole[rank].append(f"{number}:{of_all.removeprefix(DIGEST_PREFIX)}")
            elif of_all is None:
                parts[rank].append(f"{record.path}\t{kind}\t{shard.box}\t{shard.digest}\n")
    return {
        rank: FingerprintPart(",".join(whole[rank]), digest_of(_bytes(parts[rank])) if parts[rank] else "")
        for rank in whole
    }


def _own(component: ComponentRecord, rank: int) -> FingerprintPart:
    lines = [(str(record.spec), tensor_digest(record)) for record in component.tensors[rank]]
    return FingerprintPart(own=component_fingerprint(f"{component.name}@{rank}", [(component.nodes[rank], lines)]))


def fingerprint_from(name: str, node: Json, kinds: Sequence[str], contributions: Mapping[int, FingerprintPart]) -> str:
    """The fingerprint of a component.

    Law: for a component whose tensors ranks hold whole, it is that of the same component of a state, however they share the writing.

    Args:
        name: the component.
        node: its structure; None if each rank has its own.
        kinds: dtype and shape of each tensor, in the order of the indices.
        contributions: of the ranks.

    Examples:
        >>> fingerprint_from("n", 5, [], {})
        'xxh3:ddc3fc30dac113b1d87acdae45dd7641'
    """
    own = {rank: each.own for rank, each in contributions.items() if each.own}
    if own:
        return digest_of(_bytes([f"{name}@{rank}\town\t{digest}\n" for rank, digest in sorted(own.items())]))
    digests: dict[int, str] = {}
    for each in contributions.values():
        pairs = (pair.split(":") for pair in each.whole.split(",") if pair)
        digests |= {int(number): DIGEST_PREFIX + digest for number, digest in pairs}
    parts = [f"{name}@{rank}\tparts\t{each.parts}\n" for rank, each in sorted(contributions.items()) if each.parts]
    lines = [(kind, digests.get(number, "")) for number, kind in enumerate(kinds)]
    return component_fingerprint(name, [(node, lines)], more=parts)


def fingerprint_in(component: ComponentRecord, manifest: Manifest) -> str:
    """The fingerprint of a component from the records of its tensors, as version 2 has it."""
    ranks = {0, *(file.rank for file in manifest.files if component.name in file.components)}
    if component.is_own:
        ranks = set(range(len(component.nodes)))
    contributions = contributions_of(component, manifest, sorted(ranks))
    kinds = [] if component.is_own else [str(record.spec) for record in component.tensors[0]]
    return fingerprint_from(component.name, component.nodes[0], kinds, contributions)


def _bytes(lines: list[str]) -> bytes:
    return "".join(sorted(lines)).encode("utf-8", "surrogatepass")
