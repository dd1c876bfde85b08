"""`united_contract`: the contract of a run whose model is spread over ranks by name: that of the whole, from what each part knows."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from trainfold.core.digest import digest_of
from trainfold.core.errors import RanksDisagree
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.state.notes import FROZEN_LIST, is_of_each_rank

_OPTIMIZER: Final = "optimizer"
_MODEL: Final = "attached.model."  # settings of modules, which only their stage has
PLACES: Final = "(places)"  # the last part of a key: the settings of each module of a stage, by name
FROZEN: Final = "attached.optimizer.frozen"
FROZEN_NAMES: Final = "attached.optimizer.(frozen)"
_NUMBERED: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST: Final = 256  # places in a model that get their own key
_LONG: Final = 64


class PartOfRun(NamedTuple):
    """What one part of a run says.

    Attributes:
        rank: the first of its ranks.
        contract: its contract, without what ranks may have of their own.
        nodes: component -> its structure, of the components that are spread.
    """

    rank: int
    contract: Mapping[str, Json]
    nodes: Mapping[str, Json]


def of_all_stages(contract: Mapping[str, Json]) -> dict[str, Json]:
    """Return what a rank's contract says of the whole run, without what ranks may have of their own, such as the device.

    Examples:
        >>> of_all_stages({"step.accumulate": 4, "environment.threads": 2, "attached.model.h.*": {"p": 0.1}})
        {'step.accumulate': 4, 'attached.model.h.*': {'p': 0.1}}
    """
    return {key: value for key, value in contract.items() if _is_of_stage(key) or not is_of_each_rank(key)}


def _is_of_stage(key: str) -> bool:
    return key.startswith(_MODEL) or key.endswith(f".{PLACES}") or key == FROZEN_NAMES


def contract_digest(contract: Mapping[str, Json]) -> str:
    """The digest by which ranks that say the same of the whole run are known."""
    return digest_of(canonical_json(of_all_stages(contract)))


def united_contract(parts: Sequence[PartOfRun], whole: Mapping[str, Json]) -> dict[str, Json]:
    """Return the contract of the whole.

    Every key must have one value, except that dicts are put together. The settings of a param group have the label of the whole group; a part
    that has none of its parameters says nothing of it.

    Args:
        parts: in the order of the stages.
        whole: component -> the structure of the whole, from `unite`.

    Raises:
        RanksDisagree: naming a key of which two parts say different things.

    Examples:
        >>> united_contract([PartOfRun(0, {"requires_grad": {"a": True}}, {}), PartOfRun(1, {"requires_grad": {"b": True}}, {})], {})
        {'requires_grad': {'a': True, 'b': True}}
    """
    found: dict[str, Json] = {}
    first: dict[str, int] = {}
    odd: set[str] = set()
    for part in parts:
        for key, value in _under_whole_labels(part, whole).items():
            if key not in found:
                found[key], first[key] = value, part.rank
                continue
            merged = _together(found[key], value)
            if merged is None and key.startswith(_MODEL):
                odd.add(key)  # a number in the module of a stage itself, such as its index
            elif merged is None:
                raise RanksDisagree(
                    f"contract[{key!r}]", expected=f"what rank {first[key]} has: {_short(found[key])}", found=f"on rank {part.rank}: {_short(value)}",
                    fix="make the settings equal on all stages",
                )  # fmt: skip
            else:
                found[key] = merged[0]
    return shown_as_whole({key: found[key] for key in sorted(found) if key not in odd})


def shown_as_whole(contract: Mapping[str, Json]) -> dict[str, Json]:
    """Return a contract with the settings of modules, and the frozen parameters, as a whole model has them.

    Examples:
        >>> shown_as_whole({"attached.model.(places)": {"h.3": {"p": 0.1}, "h.4": {"p": 0.1}}})
        {'attached.model.h.*': {'p': 0.1}}
    """
    found: dict[str, Json] = {}
    for key, value in contract.items():
        if key.endswith(f".{PLACES}") and isinstance(value, dict):
            named: dict[str, Any] = {place: value[place] for place in sorted(value, key=_by_number)}
            found |= settings_of_places(key.removesuffix(f".{PLACES}"), named)
        elif key == FROZEN_NAMES and isinstance(value, dict):
            found |= frozen_entries(sorted(value))
        else:
            found[key] = value
    return {key: found[key] for key in sorted(found)}


def shown_frozen(names: Sequence[str]) -> Json:
    """The names of frozen parameters in a contract; if there are many, the first of them and a digest of all.

    Examples:
        >>> shown_frozen(["bias"])
        ['bias']
    """
    if len(names) <= _LONG:
        return list(names)
    digest = digest_of("\n".join(names).encode("utf-8", "surrogatepass"))
    return [*names[:_LONG], f"and {len(names) - _LONG} more: {digest}"]


def frozen_entries(names: Sequence[str]) -> dict[str, Json]:
    """What a contract says of the frozen parameters: what is compared, and beside a digest the names, by which a rename knows them.

    Args:
        names: sorted.

    Examples:
        >>> frozen_entries(["bias"])
        {'attached.optimizer.frozen': ['bias']}
    """
    return {FROZEN: shown_frozen(names)} | ({} if len(names) <= _LONG else {FROZEN_LIST: list(names)})


def frozen_names(contract: Mapping[str, Json], likely: Iterable[Collection[str]]) -> list[str] | None:
    """The frozen parameters that a contract says, sorted; None if it has a digest of many that nothing fits.

    Args:
        contract: of a state.
        likely: sets of parameters that may be those, for contracts that do not list all.

    Examples:
        >>> frozen_names(frozen_entries([f"{n:02}" for n in range(80)]), [])[79], frozen_names({}, [])
        ('79', [])
    """
    said = contract.get(FROZEN, [])
    if isinstance(said, list) and len(said) <= _LONG:
        return [str(each) for each in said]
    listed = contract.get(FROZEN_LIST)
    possible = chain([map(str, listed)] if isinstance(listed, list) else [], likely)
    return next((names for each in possible if shown_frozen(names := sorted(each)) == said), None)


def settings_of_places(path: str, places: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Contract key -> the settings of modules whose names differ only in a number, which stands as ``*``.

    Args:
        path: the prefix of the keys.
        places: name of a module -> its settings, in the order of the model.

    Examples:
        >>> settings_of_places("m", {"h.0": {"p": 0.1}, "h.1": {"p": 0.2}})
        {'m.h.*': {'p': [0.1, 0.2]}}
    """
    alike: dict[str, list[Mapping[str, Json]]] = {}
    for place, settings in places.items():
        alike.setdefault(_NUMBERED.sub("*", place), []).append(settings)
    found: dict[str, Json] = {f"{path}.{place}": _of_alike(each) for place, each in sorted(alike.items())}
    if len(found) > _MOST:
        rest = dict(list(found.items())[_MOST:])
        found = {key: value for key, value in found.items() if key not in rest}
        found[f"{path}.(more)"] = f"{len(rest)} places, {digest_of(canonical_json(rest))}"
    return found


def _of_alike(each: Sequence[Mapping[str, Json]]) -> Json:
    """The settings of several modules: one value if they are equal, and otherwise all values in their order."""
    merged: dict[str, Json] = {}
    for name in sorted({name for one in each for name in one}):
        values = [one.get(name) for one in each]
        if all(value == values[0] for value in values):
            merged[name] = values[0]
        else:
            merged[name] = (
                values if len(values) <= _LONG else f"{len(values)} values, {digest_of(canonical_json(values))}"
            )
    return merged


def _by_number(place: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in place.split(".")]


def group_params_of(node: Json) -> list[list[str]]:
    """The parameters of each group of an optimizer's structure; none if it has another form."""
    try:
        return [list(map(str, group["static"]["params"]["tuple"])) for group in node["fields"]["groups"]["tuple"]]
    except (KeyError, TypeError):
        return []


def _together(one: Json, other: Json) -> tuple[Json] | None:
    """Both values in one, in a tuple; None if they contradict each other."""
    if isinstance(one, dict) and isinstance(other, dict):
        merged = {**one}
        for key, value in other.items():
            inner = _together(one[key], value) if key in one else (value,)
            if inner is None:
                return None
            merged[key] = inner[0]
        return (merged,)
    return (one,) if canonical_json([one]) == canonical_json([other]) else None


def _under_whole_labels(part: PartOfRun, whole: Mapping[str, Json]) -> dict[str, Json]:
    found = dict(part.contract)
    for name, node in part.nodes.items():
        prefix = f"{'' if name == _OPTIMIZER else 'attached.'}{name}.groups["
        labels = {
            f"{prefix}{min(mine, default='')!r}].": f"{prefix}{min(theirs)!r}]." if mine else None
            for mine, theirs in zip(_groups(node), _groups(whole.get(name)), strict=False)
        }
        for key in [key for key in found if key.startswith(prefix)] if labels else ():
            old = next((each for each in labels if key.startswith(each)), None)
            if old is not None:
                value, new = found.pop(key), labels[old]
                if new is not None:
                    found[new + key.removeprefix(old)] = value
    return found


def _groups(node: Json) -> list[list[str]]:
    if isinstance(node, dict) and node.get("node") == "trainfold.OwnOptimizerState":
        fields = node.get("fields")
        return group_params_of(fields.get("base")) if isinstance(fields, dict) else []
    return group_params_of(node)


def _short(value: object) -> str:
    return repr(value)[:80]
