"""The comparison of a saved component with the run's own, leaf by leaf. `Findings` collects what any comparison finds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from trainfold.core.format.fingerprint import tensor_digest
from trainfold.core.format.manifest import ComponentRecord, TensorRecord
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.places import places
from trainfold.core.format.structure.united_contract import group_params_of
from trainfold.core.json_values import Json
from trainfold.core.layout.leaf_spec import AnySpec, LeafSpec, ScalarSpec, diff_specs
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import Drift, DriftAction, make_drift, verdict_of

OPTIMIZER: Final = "trainfold.OptimizerState"
MODEL: Final = "trainfold.ModelState"
OWNERS: Final = frozenset(  # their owners compare what is in them
    {"trainfold.Opaque", "trainfold.OwnOptimizerState", "trainfold.PerRank", "trainfold.OfRankZero"}
)
_SCALAR: Final = ScalarSpec("scalar")


class Findings:
    """Drifts with their verdicts, problems, and saved leaves that are not loaded."""

    def __init__(self, policy: Mapping[str, DriftAction]) -> None:
        self.drifts: list[Drift] = []
        self.problems: list[Problem] = []
        self.ignored: set[str] = set()
        self._policy = policy

    def drift(
        self, kind: str, where: str, *, saved: object, wanted: object, cause: tuple[str, str] | None = None
    ) -> DriftAction:
        """Note a drift and return its verdict.

        A drift with a cause (kind and place) takes the verdict of the cause, unless the policy names its own kind. If the cause is refused,
        only the cause is listed.
        """
        found = make_drift(kind, where, saved=saved, wanted=wanted, policy=self._policy)
        if cause is not None and kind not in self._policy and f"contract:{where}" not in self._policy:
            found = attrs.evolve(found, verdict=verdict_of(*cause, self._policy))
            if found.verdict == "refuse":
                return found.verdict
        self.drifts.append(found)
        return found.verdict


def compare_component(  # noqa: PLR0911, PLR0913 - one return for each way to take a component
    name: str,
    saved: ComponentRecord,
    part: int,
    wanted: Described | None,
    findings: Findings,
    *,
    dims: Mapping[str, int],
) -> tuple[Literal["load", "adopt"], dict[str, str], tuple[str, ...]]:
    """Compare one component and decide how it is taken.

    A component that the target lacks, and one whose structure belongs to its owner (`Opaque`), is adopted as it was saved. An optimizer's
    slots are adopted too, because they appear lazily; they are checked for completeness.

    Args:
        name: the component.
        saved: the component in the checkpoint.
        part: the index of the structure to compare.
        wanted: the component of the target, or None.
        findings: where drifts and problems are noted.
        dims: FQN -> number of dimensions of each saved parameter.

    Returns:
        The verb, path -> dtype to cast to, and the paths that keep the target's values.
    """
    node = saved.nodes[part]
    if wanted is None or {node_class(wanted.node), node_class(node)} & OWNERS:
        return "adopt", {}, ()
    if _alike(node, saved.tensors[part], wanted):
        if node_class(node) == OPTIMIZER:
            _whole_slots(node, dims, findings)
            return "adopt", {}, ()
        return "load", {}, ()
    have = specs_of_node(node, name, [record.spec for record in saved.tensors[part]])
    want = specs_of_node(wanted.node, name, list(wanted.tensors.values()))
    if node_class(node) == OPTIMIZER and node_class(wanted.node) == OPTIMIZER:
        _optimizer_groups(node, wanted.node, findings)
        _whole_slots(node, dims, findings)
        masters = f"{name}.masters["
        have = {path: spec for path, spec in have.items() if path.startswith(masters) or _in_both_slots(path, want)}
        want = {path: spec for path, spec in want.items() if path.startswith(masters) or path in have}
        if not any(path.startswith(masters) for path in have) and any(path.startswith(masters) for path in want):
            findings.drift(
                "missing", f"{name}.masters", saved="nothing", wanted="fp32 masters (made again from the params)"
            )
            want = {path: spec for path, spec in want.items() if not path.startswith(masters)}
        cast, kept = _leaf_drifts(have, want, findings)
        return "adopt", cast, kept
    if name == "optimizer" and node_class(wanted.node) != OPTIMIZER:
        shared = set(have) & set(want)  # a user's optimizer may create its slots lazily too
        cast, kept = _leaf_drifts(
            {p: have[p] for p in have if p in shared}, {p: want[p] for p in want if p in shared}, findings
        )
        return "adopt", cast, kept
    if have and want and not set(have) & set(want):
        findings.problems.append(
            Problem("SpecMismatch", name, f"leaves such as {next(iter(want))}", f"only others, such as {next(iter(have))}",
                    "this is another model: choose another checkpoint; or if its modules have other names now, pass transform=trainfold.transforms.rename(old, new)", 20)
        )  # fmt: skip
        return "load", {}, ()
    for alias, said in _parted_ties(name, saved.tensors[part], wanted).items():
        have.pop(alias)
        findings.ignored.add(alias)
        if said:
            findings.drift(
                "unexpected",
                alias,
                saved=f"other values than {said}",
                wanted=f"one tensor: it is tied to {said} in this model",
            )
    cast, kept = _leaf_drifts(have, want, findings)
    return "load", cast, kept


def _parted_ties(name: str, saved: Sequence[TensorRecord], wanted: Described) -> dict[str, str]:
    """The saved tensors that are names of others in the target: path -> the path of the other one if its values differ, and empty if they do not.

    Only digests are compared, so what ranks have cut in two ways is not known, and is not in it.
    """
    records = {record.path: record for record in saved}
    found: dict[str, str] = {}
    for pair in saved_ties(wanted.node):
        alias, first = (f"{name}.params[{each!r}]" for each in pair)
        one, other = records.get(alias), records.get(first)
        if one is None or other is None or one.spec != other.spec:
            continue
        if [shard.box for shard in one.shards] == [shard.box for shard in other.shards]:
            found[alias] = "" if tensor_digest(one) == tensor_digest(other) else first
    return found


def saved_ties(node: Json) -> list[tuple[str, str]]:
    """The tensors of a model that have several names: pairs of another name and the first one; none of any other structure."""
    if node_class(node) != MODEL or not isinstance(node, dict):
        return []
    return [(each["tuple"][0], each["tuple"][1]) for each in node.get("static", {}).get("ties", {}).get("tuple", ())]


def _alike(node: Json, records: Sequence[TensorRecord], wanted: Described) -> bool:
    """Whether nothing differs: the usual case, decided without a list of 1e5 leaves."""
    return (
        node == wanted.node
        and len(records) == len(wanted.tensors)
        and all(
            record.dtype == spec.dtype and record.shape == spec.shape
            for record, spec in zip(records, wanted.tensors.values(), strict=True)
        )
    )


def specs_of_node(node: Json, name: str, tensors: list[LeafSpec]) -> dict[str, AnySpec]:
    """Path -> spec of each leaf of a structure. Scalars of all types count as one kind, because their values are loaded.

    Examples:
        >>> {path: str(spec) for path, spec in specs_of_node({"list": [{"t": 0}, 5]}, "e", [LeafSpec("int8", (2,))]).items()}
        {'e[0]': 'int8[2]', 'e[1]': 'scalar'}
    """
    return {
        leaf.path: _SCALAR if leaf.tensor is None else tensors[leaf.tensor] for leaf in places(node, name)
    }  # fmt: skip


def _leaf_drifts(
    have: Mapping[str, AnySpec], want: Mapping[str, AnySpec], findings: Findings
) -> tuple[dict[str, str], tuple[str, ...]]:
    cast: dict[str, str] = {}
    kept: list[str] = []
    for difference in diff_specs(have, want):
        findings.drift(
            difference.kind, difference.path, saved=difference.saved or "nothing", wanted=difference.wanted or "nothing"
        )
        if difference.kind == "dtype" and isinstance(difference.wanted, LeafSpec):
            cast[difference.path] = difference.wanted.dtype
        elif difference.kind == "missing":
            kept.append(difference.path)
        elif difference.kind == "unexpected":
            findings.ignored.add(difference.path)
    return cast, tuple(kept)


def _in_both_slots(path: str, want: Mapping[str, AnySpec]) -> bool:
    return path.startswith("optimizer.slots[") and path in want


def _optimizer_groups(node: Json, wanted: Json, findings: Findings) -> None:
    saved_names, wanted_names = _group_params(node), _group_params(wanted)
    for fqn in sorted(wanted_names - saved_names):
        findings.drift("missing", f"optimizer.groups: {fqn}", saved="nothing", wanted="a parameter of the optimizer")
    for fqn in sorted(saved_names - wanted_names):
        findings.drift("unexpected", f"optimizer.groups: {fqn}", saved="a parameter of the optimizer", wanted="nothing")
        findings.ignored.add(fqn)


def _group_params(node: Json) -> set[str]:
    return {fqn for group in group_params_of(node) for fqn in group}


def _whole_slots(node: Json, dims: Mapping[str, int], findings: Findings) -> None:
    """Note a problem if a parameter has some slots, but fewer than the others of its group. Without slots it never had a gradient."""
    slots: dict[str, frozenset[str]] = {}
    try:
        slots = {fqn: frozenset(held["dict"]) for fqn, held in node["fields"]["slots"]["leaves"].items()}
        groups = [group["static"]["params"]["tuple"] for group in node["fields"]["groups"]["tuple"]]
    except (KeyError, TypeError, AttributeError):
        findings.problems.append(
            Problem("CheckpointHostile", "optimizer", "slots by parameter and groups", "another structure",
                    "do not use this checkpoint; fall back to an older one", 17)
        )  # fmt: skip
        return
    for params in groups:
        # Slots may differ by shape: Adafactor has other slots for a vector than for a matrix, and Shampoo one for each dimension. Among
        # parameters with the same number of dimensions, a subset of another's slots is a loss.
        kinds: dict[int | None, set[frozenset[str]]] = defaultdict(set)
        for fqn in params:
            if slots.get(fqn):
                kinds[dims.get(fqn)].add(slots[fqn])
        odd = [
            f"{fqn} has {sorted(slots[fqn])}"
            for fqn in params
            if any(slots.get(fqn, kind) < kind for kind in kinds[dims.get(fqn)])
        ]
        if odd:
            most = max((kind for each in kinds.values() for kind in each), key=len)
            findings.problems.append(
                Problem("SpecMismatch", "optimizer.slots", f"slots such as {sorted(most)}, whole, for each parameter that has any", "; ".join(odd[:8]),
                        "the optimizer state is incomplete: use another checkpoint, or reset={'optimizer': why}", 20)
            )  # fmt: skip


def node_class(node: Json) -> str | None:
    """The class that a structure names, such as ``trainfold.Opaque``; None for a plain container."""
    return node.get("node") if isinstance(node, dict) else None
