"""`made_contract`: what the contract of a state says of its param groups, modules and frozen parameters, after a transform of the model."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, final

import attrs

from trainfold.core.errors import InvalidState
from trainfold.core.format.structure.united_contract import FROZEN, frozen_entries, frozen_names
from trainfold.core.json_values import Json
from trainfold.core.state.notes import FROZEN_LIST, LINEAGE, ORDERS, TRAINED
from trainfold.core.state.state import OptimizerState, TrainState
from trainfold.core.transform.renamed_manifest import Renaming, renamed_module, starred
from trainfold.core.transform.states.made_model import MadeModel

_GROUPS: Final = "optimizer.groups["
_MODEL: Final = "attached.model."
_OUTSIDE: Final = "weights.outside"


@final
@attrs.frozen
class FrozenParams:
    """Which parameters a run does not train.

    Attributes:
        attached: those that were frozen when the run was attached; None if the contract has a digest of them alone, that fits none of the sets that are likely.
        since: parameter -> whether it is trained, of those of which that has changed since.
    """

    attached: frozenset[str] | None
    since: Mapping[str, bool]

    def is_trained(self, name: str) -> bool | None:
        """Whether a parameter is trained; None if it is not known."""
        if name in self.since:
            return self.since[name]
        return None if self.attached is None else name not in self.attached


def frozen_of(state: TrainState) -> FrozenParams:
    """What the contract of a state says of its frozen parameters.

    Args:
        state: with a whole model.
    """
    noted = state.contract.get(TRAINED, {})
    since = {path.removeprefix("model."): each for path, each in noted.items() if path.startswith("model.")}
    names = frozen_names(state.contract, _likely(state))
    params = () if state.model is None else state.model.params
    return FrozenParams(
        frozenset(names) if names is not None and all(name in params for name in names) else None, since
    )


def _likely(state: TrainState) -> Iterable[Collection[str]]:
    """The parameters that the optimizer does not have, those without a gradient, and those without slots."""
    params = set() if state.model is None else {*state.model.params}
    found = state.optimizer
    if isinstance(found, OptimizerState):
        yield params - {name for group in found.groups for name in group.params}
        yield params - {*found.with_grad}
        yield params - {*found.slots}
        yield params


def check_trained_alike(frozen: FrozenParams, made: MadeModel, results: Iterable[str]) -> None:
    """Check that a result has no part that is trained beside one that is frozen.

    Raises:
        InvalidState: naming the result and both parts.
    """
    for name in results:
        sources = made.sources[name]
        told = {each: frozen.is_trained(each) for each in sources}
        words = {True: "trained", False: "frozen", None: "not known, because there are too many frozen ones to list"}
        other = next((each for each in sources if told[each] != told[sources[0]]), None)
        if other is not None or (len(sources) > 1 and None in told.values()):
            other = sources[1] if other is None else other
            raise InvalidState(
                f"optimizer: {name}", expected="parts that are all trained or all frozen",
                found=f"{sources[0]} is {words[told[sources[0]]]}, {other} is {words[told[other]]}",
                fix="leave out the rule for it; or leave the optimizer out: state.evolve(optimizer=None)")  # fmt: skip


def made_contract(state: TrainState, made: MadeModel, after: Any, frozen: FrozenParams) -> dict[str, Json]:
    """The contract, with the names of the results.

    Settings of modules that are no more are left out, and so is the order of the sums of a DDP wrapper whose parameters are others.

    Args:
        state: before.
        made: of its model.
        after: its optimizer, of the results.
        frozen: of the state.
    """
    labels = _labels(state.optimizer, after)
    settings = {key: each for key, each in state.contract.items() if key.startswith(_MODEL) and isinstance(each, dict)}
    found: dict[str, Json] = _of_modules(settings, made)
    for key, value in state.contract.items():
        if key == FROZEN:
            found |= _frozen(made, frozen, is_kept=after is not None)
        elif key == FROZEN_LIST:
            continue
        elif key == TRAINED:
            found[key] = _trained(value, made, frozen)
        elif key == LINEAGE:
            found[key] = _lineage(value, made.places)
        elif not (
            key in settings
            or (key == _OUTSIDE and _outside_is_changed(state, made))
            or (key == ORDERS and made.changed)
        ):
            named = (
                {_relabelled(each, labels): one for each, one in value.items()} if isinstance(value, dict) else value
            )
            found[_relabelled(key, labels)] = named
    return {key: found[key] for key in sorted(found)}


def _of_modules(settings: Mapping[str, Json], made: MadeModel) -> dict[str, Json]:
    """Settings of modules: of those that have another name under that name, and of those whose tensors are now in others none."""
    modules = Renaming(made.renamed).modules()
    gone = {*map(_module_of, made.shapes)} - {
        *map(_module_of, (*made.sources, *made.ties, *made.places.keys() - made.shapes.keys()))
    }
    paths = {renamed_module(key.removeprefix(_MODEL), modules): each for key, each in settings.items()}
    return {_MODEL + path: each for path, each in paths.items() if path not in gone}


def frozen_outside(state: TrainState, made: MadeModel) -> frozenset[str]:
    """The parameters whose values come from outside; none if one of them has another name, because that source has none of its name: a checkpoint has all values then."""
    return frozenset() if _outside_is_changed(state, made) else state.origin.frozen


def _outside_is_changed(state: TrainState, made: MadeModel) -> bool:
    return any(name in made.changed or made.sources.get(name) != (name,) for name in state.origin.frozen)


def _labels(before: Any, after: Any) -> dict[str, str]:
    """The prefix of the keys of each param group, which has the name of its first parameter, and the new one."""
    if not isinstance(before, OptimizerState) or not isinstance(after, OptimizerState):
        return {}
    pairs = zip(before.groups, after.groups, strict=True)
    return {f"{_GROUPS}{min(old.params)!r}]": f"{_GROUPS}{min(new.params)!r}]" for old, new in pairs if old.params and new.params}  # fmt: skip


def _relabelled(key: str, labels: Mapping[str, str]) -> str:
    label = key[: key.find("]") + 1]
    return labels[label] + key.removeprefix(label) if label in labels else key


def _frozen(made: MadeModel, frozen: FrozenParams, *, is_kept: bool) -> dict[str, Json]:
    """What the contract says of the frozen results; nothing if it cannot be said."""
    if frozen.attached is None:
        return {}
    found = []
    for name, sources in made.sources.items():
        count = sum(each in frozen.attached for each in sources)
        if 0 < count < len(sources) and not is_kept:
            return {}
        if count == len(sources) or (count and not frozen.is_trained(sources[0])):
            found.append(name)
    return frozen_entries(sorted(found))


def _trained(value: Json, made: MadeModel, frozen: FrozenParams) -> Json:
    others = {path: each for path, each in value.items() if not path.startswith("model.")} if isinstance(value, dict) else {}  # fmt: skip
    changed = {name: sources for name, sources in made.sources.items() if any(each in frozen.since for each in sources)}
    return {**others, **{f"model.{name}": bool(frozen.is_trained(sources[0])) for name, sources in changed.items()}}


def _lineage(value: Json, new: Mapping[str, list[str]]) -> Json:
    forms: dict[str, list[str]] = {}
    for old, names in new.items():
        forms.setdefault(starred(old), []).extend(map(starred, names))
    forms |= new
    if not isinstance(value, list):
        return value
    pairs = [each for each in value if isinstance(each, list) and len(each) == 2 and isinstance(each[1], list)]
    return [[source, [*dict.fromkeys(name for old in each for name in forms.get(str(old), [str(old)]))]] for source, each in pairs]  # fmt: skip


def _module_of(name: str) -> str:
    return starred(name.rpartition(".")[0])
