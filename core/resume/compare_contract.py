"""The comparison of the contract of a checkpoint with that of a run, key by key."""

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from trainfold.core.errors import TrainfoldError
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.united_contract import group_params_of
from trainfold.core.json_values import Json
from trainfold.core.layout.world import World
from trainfold.core.optim.group_labels import relabelled
from trainfold.core.resume.compare import OPTIMIZER, OWNERS, Findings, node_class
from trainfold.core.resume.drift import ENVIRONMENT
from trainfold.core.state.contract_kinds import (
    BASE_RATES,
    OF_LATER,
    OF_MESH,
    OUTSIDE,
    contract_kind,
    is_of_rank_zero,
    prefix_of_optimizer,
)
from trainfold.core.state.notes import CONVERTED, NOTES, RATES

_GROUPS: Final = "optimizer.groups["


def compare_contract(  # noqa: PLR0913 (every one is named where it is called)
    manifest: Manifest,
    wanted: Mapping[str, Json],
    *,
    components: Mapping[str, Described],
    left_out: Container[str],
    rated: Container[str] = (),
    world: World,
    versions: Mapping[str, str],
    findings: Findings,
) -> None:
    """Compare the resume contracts, worlds and versions, and note every difference.

    Keys that describe a component that is not resumed (``left_out``), such as the betas of an optimizer that is reset, may differ, but not the
    base rates of one that continues at the saved rates (``rated``). Keys that an old checkpoint does not have are read from its components if
    these prove them. Keys that may differ between ranks, such as the environment and the length of a rank's share, are saved by rank 0, and
    only rank 0 compares them.
    """
    saved, alone = _relabelled({**_proved_by_components(manifest), **manifest.contract}, manifest, components)
    saved = {**_of_late_groups(manifest, saved, wanted), **saved}
    known = sorted({*saved, *wanted} - NOTES - {RATES, CONVERTED})
    keys = [key for key in known if _is_compared(key, _component_of(key), left_out, rated) and not _is_in(key, alone)]
    keys = [key for key in keys if world.rank == 0 or not is_of_rank_zero(key)]
    if manifest.world_size != world.size:  # another number of ranks has another mesh
        keys = [key for key in keys if not key.endswith(OF_MESH)]
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
        if key.endswith(OF_LATER):
            return
        owner = _owner_of(key)
        is_derived = owner in _DERIVED or owner.startswith(_ATTACHED)
        if is_derived and _has(saved, owner) and _has(wanted, owner):
            findings.drift(contract_kind(key), key, saved=have, wanted=want, cause=cause)
        # old checkpoints, and states without a model, have no environment
        elif not is_derived and owner != ENVIRONMENT:
            kind = "unproven" if have is _ABSENT else "uncompared"
            findings.drift(OUTSIDE if contract_kind(key) == OUTSIDE else kind, key, saved=have, wanted=want)
    elif not _same(have, want):
        findings.drift(contract_kind(key), key, saved=have, wanted=want, cause=cause)


def _relabelled(
    saved: dict[str, Json], manifest: Manifest, components: Mapping[str, Described]
) -> tuple[dict[str, Json], tuple[str, ...]]:
    """The saved contract under the group labels of the run, if an optimizer has other parameters; and the groups that one side lacks.

    The other parameters are a drift of the component.
    """
    alone: set[str] = set()
    for name, wanted in components.items():
        record = manifest.component(name)
        if record is None or node_class(record.nodes[0]) != OPTIMIZER or node_class(wanted.node) != OPTIMIZER:
            continue
        have, want = group_params_of(record.nodes[0]), group_params_of(wanted.node)
        if {each for group in have for each in group} != {each for group in want for each in group}:
            saved, more = relabelled(saved, f"{prefix_of_optimizer(name)}.", have, want)
            alone |= more
    return saved, tuple(alone)


def _is_compared(key: str, owner: str, left_out: Container[str], rated: Container[str]) -> bool:
    return owner not in left_out or (owner in rated and ".groups[" in key and key.rpartition(".")[2] in BASE_RATES)


def _is_in(key: str, alone: tuple[str, ...]) -> bool:
    """Whether a key belongs to a group that only one side has. Its base rate is compared all the same: the scheduler has it too."""
    return key.startswith(alone) and not key.endswith(".initial_lr")


def _consequences(saved: Mapping[str, Json], wanted: Mapping[str, Json], keys: Iterable[str]) -> set[str]:
    """The keys that differ only because another key does. Only the cause is reported, and its verdict holds for them too.

    Another class of scheduler has other settings and leaves other values in the groups. Private attributes of a scheduler follow from its
    public settings.
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
    """Key -> the kind and the place of the drift that it follows from, if that drift is reported.

    Another class of optimizer has other hyperparameters. A scheduler that was added or removed leaves its base rates in the groups, and
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
        is_reported = is_new == ("scheduler" in left_out)  # an added scheduler is not saved; a removed one is
        for key in differing if is_reported else ():
            if ".groups[" in key and (
                "live" in (saved.get(key), wanted.get(key)) or key.rpartition(".")[2] in BASE_RATES
            ):
                found[key] = cause
    return found


def _proved_by_components(manifest: Manifest) -> dict[str, Json]:
    """Keys that the contract leaves out and that the saved components prove, such as the horizon of a schedule."""
    records = [manifest.component(name) for name in ("optimizer", "scheduler", "dataset")]
    return _contract_of(
        {
            record.name: record.nodes[0]
            for record in records
            if record is not None
            and not _has(manifest.contract, f"{record.name}.")
            and node_class(record.nodes[0]) not in OWNERS
        }
    )


def _contract_of(nodes: Mapping[str, Json]) -> dict[str, Json]:
    """The contract that saved components prove, by name. Hardly any checkpoint needs it, so torch is imported here."""
    if not nodes:
        return {}
    from trainfold.core.format.structure.rebuild import rebuild
    from trainfold.core.state.contract import contract_of
    from trainfold.core.state.state import TrainState

    held: dict[str, Any] = {}
    for name, node in nodes.items():
        with suppress(TrainfoldError):  # a user's class that cannot be built without its tensors proves nothing
            held[name] = rebuild(node, name, lambda *_: None)
    return contract_of(TrainState(**held))


def _of_late_groups(manifest: Manifest, saved: Mapping[str, Json], wanted: Mapping[str, Json]) -> dict[str, Json]:
    """The hyperparameters of groups that were added after the attach, and that this run has at its attach.

    A contract holds what the script passed at the attach, so these groups are not in it; the saved optimizer has them. Rates that a
    scheduler moves are not compared.
    """
    labels = {_label(key) for key in wanted if key.startswith(_GROUPS)} - {_label(key) for key in saved}
    record = manifest.component("optimizer")
    if not labels or record is None or not _has(saved, _GROUPS):
        return {}
    with suppress(TrainfoldError):
        held = _contract_of({"optimizer": record.nodes[0]})
        return {
            key: "live" if wanted.get(key) == "live" else value
            for key, value in held.items()
            if _label(key) in labels and key.startswith(_GROUPS)
        }
    return {}


def _label(key: str) -> str:
    return key.rpartition(".")[0]


def _owner_of(key: str) -> str:
    """``"optimizer."``, or ``"attached.ema."`` for a setting of an attached object."""
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
_ATTACHED = "attached."  # and from the objects of a live run, which older checkpoints do not have


def _has(contract: Mapping[str, Json], owner: str) -> bool:
    # ``loader[name].`` where there are several
    return any(key.startswith((owner, f"{owner[:-1]}[")) for key in contract)


def _same(have: Json, want: Json) -> bool:
    return bool(have == want) and isinstance(have, bool) == isinstance(want, bool)
