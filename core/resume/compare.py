"""The comparison of what a checkpoint holds with what a run wants: components leaf by leaf, contracts key by key."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import attrs

from trainfold.core.errors import Problem, TrainfoldError
from trainfold.core.format.manifest import ComponentRecord, Manifest, TensorRecord
from trainfold.core.format.structure.describe import Described
from trainfold.core.format.structure.places import places
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.json_values import Json
from trainfold.core.layout.leaf_spec import AnySpec, LeafSpec, ScalarSpec, diff_specs
from trainfold.core.layout.world import World
from trainfold.core.optim.group_labels import relabelled
from trainfold.core.resume.drift import ENVIRONMENT, Drift, DriftAction, make_drift, verdict_of
from trainfold.core.state.contract import contract_of
from trainfold.core.state.contract_kinds import BASE_RATES, contract_kind, is_of_rank_zero
from trainfold.core.state.notes import NOTES, RATES
from trainfold.core.state.state import TrainState

_GROUPS = "optimizer.groups["
_OPTIMIZER = "trainfold.OptimizerState"
_OWNERS = frozenset({"trainfold.Opaque", "trainfold.OwnOptimizerState"})  # whose owner compares what is in it
_SCALAR = ScalarSpec("scalar")


class Findings:
    """What a comparison has found so far: drifts with their verdicts, problems, and leaves that are left out."""

    def __init__(self, policy: Mapping[str, DriftAction]) -> None:
        self.drifts: list[Drift] = []
        self.problems: list[Problem] = []
        self.ignored: set[str] = set()
        self._policy = policy

    def drift(
        self, kind: str, where: str, *, saved: object, wanted: object, cause: tuple[str, str] | None = None
    ) -> DriftAction:
        """Note a drift and return its verdict.

        One that follows from another, its cause (kind and place), is told by that one where that one is refused; and otherwise it
        has its verdict, unless the policy names its own kind.
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
    """Compare one component and say how it is taken.

    A component that the target lacks, and one whose structure belongs to its owner (`Opaque`), is adopted as it was
    saved. An optimizer's slots are adopted too, because they appear lazily; they are checked for wholeness.

    Args:
        name: the component.
        saved: what the checkpoint has.
        part: which of its structures.
        wanted: what the target has, or None.
        findings: where drifts and problems are noted.
        dims: FQN -> number of dimensions of each saved parameter.

    Returns:
        The verb, path -> dtype to cast to, and the paths that keep the target's values.
    """
    node = saved.nodes[part]
    if wanted is None or {_node_class(wanted.node), _node_class(node)} & _OWNERS:
        return "adopt", {}, ()
    if _alike(node, saved.tensors[part], wanted):
        if _node_class(node) == _OPTIMIZER:
            _whole_slots(node, dims, findings)
            return "adopt", {}, ()
        return "load", {}, ()
    have = specs_of_node(node, name, [record.spec for record in saved.tensors[part]])
    want = specs_of_node(wanted.node, name, list(wanted.tensors.values()))
    if _node_class(node) == _OPTIMIZER and _node_class(wanted.node) == _OPTIMIZER:
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
    if name == "optimizer" and _node_class(wanted.node) != _OPTIMIZER:
        shared = set(have) & set(want)  # a user's own optimizer may make its slots lazily too
        cast, kept = _leaf_drifts(
            {p: have[p] for p in have if p in shared}, {p: want[p] for p in want if p in shared}, findings
        )
        return "adopt", cast, kept
    if have and want and not set(have) & set(want):
        findings.problems.append(
            Problem("SpecMismatch", name, f"leaves such as {next(iter(want))}", f"only others, such as {next(iter(have))}",
                    "this is another model; load it with a transform or choose another checkpoint", 20)
        )  # fmt: skip
        return "load", {}, ()
    cast, kept = _leaf_drifts(have, want, findings)
    return "load", cast, kept


def _alike(node: Json, records: Sequence[TensorRecord], wanted: Described) -> bool:
    """Whether nothing at all differs, which is the usual case and needs no list of 1e5 leaves to see."""
    return (
        node == wanted.node
        and len(records) == len(wanted.tensors)
        and all(
            record.dtype == spec.dtype and record.shape == spec.shape
            for record, spec in zip(records, wanted.tensors.values(), strict=True)
        )
    )


def specs_of_node(node: Json, name: str, tensors: list[LeafSpec]) -> dict[str, AnySpec]:
    """Path -> spec of each leaf of a structure; scalars of all types count as one kind, because values are loaded.

    Examples:
        >>> {path: str(spec) for path, spec in specs_of_node({"list": [{"t": 0}, 5]}, "e", [LeafSpec("int8", (2,))]).items()}
        {'e[0]': 'int8[2]', 'e[1]': 'scalar'}
    """
    return {
        leaf.path: _SCALAR if leaf.tensor is None else tensors[leaf.tensor] for leaf in places(node, name)
    }  # fmt: skip


def compare_contract(  # noqa: PLR0913 (every one is named where it is called)
    manifest: Manifest,
    wanted: Mapping[str, Json],
    *,
    components: Mapping[str, Described],
    left_out: Container[str],
    world: World,
    versions: Mapping[str, str],
    findings: Findings,
) -> None:
    """Compare the resume contracts, worlds and versions; every difference is noted (V08).

    What describes a component that is not resumed, such as the learning rate of an optimizer that starts anew, may differ.
    What an old checkpoint does not say is read from its components where they prove it (V09). What each rank may have of its own,
    such as its environment and the length of its share, is saved by rank 0, which alone compares it.
    """
    saved, alone = _relabelled({**_proved_by_components(manifest), **manifest.contract}, manifest, components)
    saved = {**_of_late_groups(manifest, saved, wanted), **saved}
    known = sorted({*saved, *wanted} - NOTES - {RATES})
    keys = [key for key in known if _component_of(key) not in left_out and not _is_in(key, alone)]
    keys = [key for key in keys if world.rank == 0 or not is_of_rank_zero(key)]
    follows = _consequences(saved, wanted, keys)
    causes = _causes(saved, wanted, keys, left_out)
    if SCHEDULER_GONE in causes.values():
        findings.drift(*SCHEDULER_GONE, saved=saved["scheduler.kind"], wanted="none")
    for key in sorted(keys, key=lambda key: (key != "optimizer.kind", key in causes)):
        if key not in follows:
            _compare_key(key, saved, wanted, findings, causes.get(key))
    if manifest.world_size != world.size:
        findings.drift("world", "world_size", saved=manifest.world_size, wanted=world.size)
    for library, version in versions.items():
        if manifest.versions.get(library) != version:
            findings.drift("versions", library, saved=manifest.versions.get(library), wanted=version)


def _compare_key(
    key: str,
    saved: Mapping[str, Json],
    wanted: Mapping[str, Json],
    findings: Findings,
    cause: tuple[str, str] | None,
) -> None:
    have, want = saved.get(key, _ABSENT), wanted.get(key, _ABSENT)
    if have is _ABSENT or want is _ABSENT:
        owner = _owner_of(key)
        is_derived = owner in _DERIVED or owner.startswith(_ATTACHED)
        if is_derived and _has(saved, owner) and _has(wanted, owner):
            findings.drift(contract_kind(key), key, saved=have, wanted=want, cause=cause)
        elif (
            not is_derived and owner != ENVIRONMENT
        ):  # a state without a model has no device, an old checkpoint nothing
            findings.drift("unproven" if have is _ABSENT else "uncompared", key, saved=have, wanted=want)
    elif not _same(have, want):
        findings.drift(contract_kind(key), key, saved=have, wanted=want, cause=cause)


def _relabelled(
    saved: dict[str, Json], manifest: Manifest, components: Mapping[str, Described]
) -> tuple[dict[str, Json], tuple[str, ...]]:
    """The saved contract with the group labels of the run, for those optimizers whose parameters are others, which is told."""
    alone: set[str] = set()
    for name, wanted in components.items():
        record = manifest.component(name)
        if record is None or _node_class(record.nodes[0]) != _OPTIMIZER or _node_class(wanted.node) != _OPTIMIZER:
            continue
        have, want = _groups_of(record.nodes[0]), _groups_of(wanted.node)
        if {each for group in have for each in group} != {each for group in want for each in group}:
            prefix = f"{name}." if name == "optimizer" else f"{_ATTACHED}{name}."
            saved, more = relabelled(saved, prefix, have, want)
            alone |= more
    return saved, tuple(alone)


def _is_in(key: str, alone: tuple[str, ...]) -> bool:
    """Whether a key is of a group that one side alone has; its base rate is told all the same, for the scheduler has it too."""
    return key.startswith(alone) and not key.endswith(".initial_lr")


def _consequences(saved: Mapping[str, Json], wanted: Mapping[str, Json], keys: Iterable[str]) -> set[str]:
    """The keys that differ because another one does: a person is told the cause alone, whose verdict is theirs too.

    Another class of scheduler has other settings and leaves other things in the groups; and what a scheduler makes of its public
    settings has a private name.
    """
    differing = [key for key in keys if saved.get(key, _ABSENT) != wanted.get(key, _ABSENT)]
    if "dataset_size" in differing:
        return {key for key in differing if key.startswith(f"{_ATTACHED}loader.")} | _consequences(
            saved, wanted, [key for key in keys if key != "dataset_size"]
        )
    settings = [key for key in differing if contract_kind(key) in {"scheduler", "schedule_function"}]
    if "scheduler.kind" in differing and "scheduler.kind" in saved and "scheduler.kind" in wanted:
        live = [key for key in differing if ".groups[" in key and "live" in (saved.get(key), wanted.get(key))]
        half = [key for key in settings if ".groups[" in key and (key not in saved or key not in wanted)]
        return {*live, *half, *(key for key in settings if ".groups[" not in key)}
    peaks = {key.rpartition(".")[0] for key in settings if key.endswith(".max_lr") and ".groups[" in key}
    bases = {key for key in settings if key.endswith((".initial_lr", ".min_lr")) and key.rpartition(".")[0] in peaks}
    public = {key.rpartition(".")[0] for key in settings if not key.rpartition(".")[2].startswith("_")}
    return bases | {
        key for key in settings if key.rpartition(".")[2].startswith("_") and key.rpartition(".")[0] in public
    }


SCHEDULER_GONE: Final = ("scheduler", "scheduler")


def _causes(
    saved: Mapping[str, Json], wanted: Mapping[str, Json], keys: Iterable[str], left_out: Container[str]
) -> dict[str, tuple[str, str]]:
    """Key -> the kind and the place of what it follows from, where that is told.

    Another class of optimizer has other hyperparameters. A scheduler that is new, or gone, leaves its base rates in the groups, and
    moves the rate.
    """
    found: dict[str, tuple[str, str]] = {}
    differing = [key for key in keys if not _same(saved.get(key, _ABSENT), wanted.get(key, _ABSENT))]
    for key in differing if "optimizer.kind" in differing else ():
        if key.startswith("optimizer.groups[") and key.rpartition(".")[2] not in BASE_RATES:
            found[key] = ("optimizer", "optimizer.kind")
    kinds = [each.get("scheduler.kind") for each in (saved, wanted)]
    if [isinstance(each, list) for each in kinds] in ([True, False], [False, True]) and kinds.count(None) == 1:
        is_new = kinds[0] is None
        cause = ("missing_component", "scheduler") if is_new else SCHEDULER_GONE
        for key in (
            differing if is_new == ("scheduler" in left_out) else ()
        ):  # a new one is not saved, one that is gone is
            if ".groups[" in key and (
                "live" in (saved.get(key), wanted.get(key)) or key.rpartition(".")[2] in BASE_RATES
            ):
                found[key] = cause
    return found


def _proved_by_components(manifest: Manifest) -> dict[str, Json]:
    """What the contract leaves out and the saved components say themselves, such as the horizon of a schedule."""
    held: dict[str, Any] = {}
    for name in ("optimizer", "scheduler", "dataset"):
        record = manifest.component(name)
        if record is None or _has(manifest.contract, f"{name}."):
            continue
        with suppress(TrainfoldError):  # a user's own class that cannot be made without its tensors says nothing here
            held[name] = rebuild(record.nodes[0], name, lambda *_: None)
    return contract_of(TrainState(**held))


def _of_late_groups(manifest: Manifest, saved: Mapping[str, Json], wanted: Mapping[str, Json]) -> dict[str, Json]:
    """The hyperparameters of groups that were added after the attach, and that the run has now when it is attached (B10).

    A contract has what the script gave at the attach, so it says nothing of them; the saved optimizer does. What a scheduler moves
    is not compared.
    """
    labels = {_label(key) for key in wanted if key.startswith(_GROUPS)} - {_label(key) for key in saved}
    record = manifest.component("optimizer")
    if not labels or record is None or not _has(saved, _GROUPS):
        return {}
    with suppress(TrainfoldError):
        held = contract_of(TrainState(optimizer=rebuild(record.nodes[0], "optimizer", lambda *_: None)))
        return {
            key: "live" if wanted.get(key) == "live" else value
            for key, value in held.items()
            if _label(key) in labels and key.startswith(_GROUPS)
        }
    return {}


def _label(key: str) -> str:
    return key.rpartition(".")[0]


def _owner_of(key: str) -> str:
    """``"optimizer."``; or ``"attached.ema."``, for what a live run says of one of its objects."""
    return ".".join(key.partition("[")[0].split(".")[: 2 if key.startswith(_ATTACHED) else 1]) + "."


def _component_of(key: str) -> str:
    owner = _owner_of(key).removeprefix(_ATTACHED)[:-1]
    return _DESCRIBES.get(owner, owner)


class _Absent:
    def __str__(self) -> str:
        return "nothing"


_ABSENT: Any = _Absent()
_DESCRIBES = {"step": "trainer", "loader": "dataset", "batch_size": "dataset", "dataset_size": "dataset"}
_DERIVED = frozenset({"optimizer.", "scheduler.", "dataset.", "step."})  # owners whose keys come from the state itself
_ATTACHED = "attached."  # and those from the objects of a live run, of which older checkpoints say nothing


def _has(contract: Mapping[str, Json], owner: str) -> bool:
    return any(key.startswith((owner, f"{owner[:-1]}[")) for key in contract)  # several loaders have names


def _same(have: Json, want: Json) -> bool:
    return bool(have == want) and isinstance(have, bool) == isinstance(want, bool)


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


def _node_class(node: Json) -> str | None:
    return node.get("node") if isinstance(node, dict) else None


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
    return {fqn for group in _groups_of(node) for fqn in group}


def _groups_of(node: Json) -> list[list[str]]:
    try:
        return [list(map(str, group["static"]["params"]["tuple"])) for group in node["fields"]["groups"]["tuple"]]
    except (KeyError, TypeError):
        return []


def _whole_slots(node: Json, dims: Mapping[str, int], findings: Findings) -> None:
    """A parameter without slots never had a gradient; one with fewer slots than its group's others is corrupt (B10)."""
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
        # They need not be alike, as Adafactor keeps other slots for a vector than for a matrix and Shampoo one for each
        # dimension; among parameters of as many dimensions, a part of what another has is a loss.
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
