"""`trainfold diff A B`: the differences between two checkpoints, from their manifests; tensors that are cut otherwise are read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs

from trainfold.adapters.cli.locate import Checkpoint, narrowed, open_checkpoint
from trainfold.adapters.cli.terminal.output import Answer, Different, Table
from trainfold.core.format.leaf_texts import cut_otherwise, fingerprints_with, leaf_texts
from trainfold.core.format.manifest import Manifest
from trainfold.core.resume.drift import ENVIRONMENT
from trainfold.core.state.notes import CONVERTED, FROZEN_LIST, LINEAGE

_SHOWN_LEAVES = 100
_ABSENT = "absent"


@final
@attrs.frozen
class Line:
    """One thing that was compared."""

    name: str
    a: str
    b: str

    @property
    def same(self) -> bool:
        """Whether both sides have it, with the same value."""
        return self.a == self.b


def diff_checkpoints(a: Path, b: Path, *, components: Sequence[str] | None = None, values: bool = False) -> Answer:
    """Compare two checkpoints. Where one of them stores the same kind of tensor in other slices, both are read, and their contents compared.

    Args:
        a: one checkpoint, or a run.
        b: the other.
        components: which components are compared, and nothing else; None for all of them and the contracts.
        values: whether the leaves that differ are read, to say by how much.

    Returns:
        Components, leaves and contract keys; with `Different` if any of them differs.

    Raises:
        CheckpointError: the matching subclass, if one of them cannot be used.
        UnknownComponent: for a name that neither of them knows.
    """
    one, other = open_checkpoint(a), open_checkpoint(b)
    mine, theirs = (narrowed(x.manifest, components, y.manifest) for x, y in ((one, other), (other, one)))
    resliced = cut_otherwise(mine, theirs)
    a_sums, b_sums = (_contents(each, resliced) for each in (one, other))
    compared = _lines(fingerprints_with(mine, a_sums), fingerprints_with(theirs, b_sums))
    leaves = [line for line in _lines(leaf_texts(mine, a_sums), leaf_texts(theirs, b_sums)) if not line.same]
    promises = _lines(_promises(mine), _promises(theirs)) if components is None else []
    contract = [line for line in promises if not line.same]
    made = [line for line in _lines(_circumstances(mine), _circumstances(theirs)) if not line.same]
    changed = [line.name for line in compared if not line.same]
    apart = _distances(one, other, [line.name for line in leaves]) if values else {}
    tables = [
        Table(
            "Components",
            ("component", one.url, other.url, "same"),
            tuple((line.name, line.a, line.b, "yes" if line.same else "NO") for line in compared),
        )
    ]
    rest = len(leaves) - _SHOWN_LEAVES
    shown = [*leaves[:_SHOWN_LEAVES], *([Line(f"... {rest} more", "see --json", "see --json")] if rest > 0 else [])]
    for title, name, lines in (("Leaves", "leaf", shown), ("Contract", "key", contract), ("Made by", "what", made)):
        if lines:
            rows = tuple((line.name, line.a, line.b) for line in lines)
            tables.append(Table(f"{title} that differ" if name == "leaf" else title, (name, "a", "b"), rows))
    if apart:
        tables.append(Table("By how much", ("leaf", ""), tuple((name, str(each)) for name, each in apart.items())))
    error = None
    if changed or contract:
        error = Different(
            f"{one.url} and {other.url}",
            expected="the same components and the same contract",
            found=f"differences in {_count(changed, 'component')}, {_count(leaves, 'leaf', 'leaves')} and {_count(contract, 'key')} of the contract",
            fix="see the tables; --json has every leaf",
        )
    data = {
        "a": one.url,
        "b": other.url,
        "same": error is None,
        "components": [{**attrs.asdict(line), "same": line.same} for line in compared],
        "leaves": [attrs.asdict(line) for line in leaves],
        "values": {name: attrs.asdict(each) for name, each in apart.items()},
        "contract": [attrs.asdict(line) for line in contract],
        "made_by": [attrs.asdict(line) for line in made],
    }
    return Answer(data, tuple(tables), error)


def _distances(one: Checkpoint, other: Checkpoint, leaves: Sequence[str]) -> Mapping[str, Any]:
    from trainfold.adapters.cli.formats.leaf_values import leaf_distances  # late: it imports torch

    return leaf_distances(one, other, leaves)


def _count(found: Sequence[object], one: str, several: str = "") -> str:
    """A number of things, in words."""
    return f"{len(found)} {one if len(found) == 1 else several or one + 's'}"


def _contents(checkpoint: Checkpoint, leaves: tuple[str, ...]) -> dict[str, str]:
    """The content sums of some tensors, which are read."""
    if not leaves:
        return {}
    from trainfold.backends.formats.native.contents import content_sums

    return content_sums(checkpoint.store, checkpoint.name, checkpoint.manifest, leaves)


def _lines(a: Mapping[str, str], b: Mapping[str, str]) -> list[Line]:
    return [Line(name, a.get(name, _ABSENT), b.get(name, _ABSENT)) for name in {**a, **b}]


def _circumstances(manifest: Manifest) -> dict[str, str]:
    head = manifest.head
    return {
        "run": head.run_id,
        "step": str(head.step),
        "timeline": str(head.timeline),
        "ranks": str(manifest.world_size),
        **{f"{library} version": version for library, version in manifest.versions.items()},
        **_plain({key: value for key, value in manifest.contract.items() if _is_circumstance(key)}),
    }


def _promises(manifest: Manifest) -> dict[str, str]:
    """The contract without circumstances: equal bits are equal wherever they were made."""
    return _plain(
        {key: value for key, value in manifest.contract.items() if not _is_circumstance(key) and key != FROZEN_LIST}
    )


def _is_circumstance(key: str) -> bool:
    return key in (CONVERTED, LINEAGE) or key.startswith(ENVIRONMENT)


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in values.items()}
