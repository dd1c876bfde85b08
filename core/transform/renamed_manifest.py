"""`renamed_manifest`: the manifest of a checkpoint as it would be if the model had had other names, for a run whose code has renamed its modules."""

import re
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from typing import Any, Final, final

import attrs

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.manifest import ComponentRecord, Manifest, TensorRecord
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.united_contract import (
    FROZEN,
    FROZEN_NAMES,
    frozen_entries,
    frozen_names,
    group_params_of,
)
from trainfold.core.json_values import Json
from trainfold.core.state.contract_kinds import prefix_of_optimizer
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.notes import FROZEN_LIST, LINEAGE, TRAINED
from trainfold.core.transform.expression import SourceTensor
from trainfold.core.transform.naming import Rename
from trainfold.core.transform.transform import Composed, Table, Transform

_MODEL: Final = "trainfold.ModelState"
_OPTIMIZER: Final = "trainfold.OptimizerState"
_PATH: Final = re.compile(r"(?P<head>\w+\.(?:params|buffers|slots|masters))\[(?P<name>'.*?'|\".*?\")\](?P<rest>.*)")
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NAMES: Final = ("params", "with_grad")  # of an optimizer's structure, in its static part


@final
@attrs.frozen
class Renaming:
    """What has another name.

    Attributes:
        names: old name -> new name of each tensor of the model; also of those that keep theirs.
    """

    names: Mapping[str, str]

    @property
    def changed(self) -> int:
        """How many tensors get another name."""
        return sum(old != new for old, new in self.names.items())

    def modules(self) -> list[tuple[str, str]]:
        """The forms of modules that have another name, each with the new one, the longest first. In a form ``*`` stands for a number."""
        found: dict[str, set[str]] = {}
        for old, new in self.names.items():
            if old != new:
                a, b = old.split(".")[:-1], new.split(".")[:-1]
                while len(a) > 1 < len(b) and a[-1] == b[-1]:
                    a, b = a[:-1], b[:-1]
                found.setdefault(starred(".".join(a)), set()).add(starred(".".join(b)))
        sure = [(old, new.pop()) for old, new in found.items() if old and len(new) == 1]
        return sorted(sure, key=lambda pair: -len(pair[0]))


def renaming_of(transform: Transform, names: Iterable[str]) -> Renaming:
    """The new names that a transform gives.

    Args:
        transform: of `trainfold.transforms.rename` and what is composed of it.
        names: the names of a model.

    Raises:
        InvalidArgument: if it does something else than to give tensors other names.
        InvalidState: if two tensors would get one name, or the names that it gives would change again at the next start.

    Examples:
        >>> from trainfold.core.transform.naming import rename
        >>> renaming_of(rename("h.{i}.w", "blocks.{i}.w"), ["h.0.w", "out.w"]).names
        {'h.0.w': 'blocks.0.w', 'out.w': 'out.w'}
    """
    before = list(names)
    found = _renamed(transform, before)
    again = _renamed(transform, found.values())
    moved = next((name for name, new in again.items() if name != new), None)
    if moved is not None:
        raise InvalidState(
            "transform",
            expected="names that stay as they are when the rules are applied to them again, as at the next start",
            found=f"{moved} becomes {again[moved]}",
            fix="give the new module a name that no rule matches; of modules that change places, copy the checkpoint under a name in between first",
        )
    return Renaming(found)


def _renamed(transform: Transform, names: Iterable[str]) -> dict[str, str]:
    parts = transform.parts if isinstance(transform, Composed) else (transform,)
    other = next((each for each in parts if not isinstance(each, Rename)), None)
    if other is not None:
        raise InvalidArgument(
            "transform",
            expected="rules of rename alone: the state of the optimizer goes with the names, and is not cast, put together or taken apart",
            found=str(other),
            fix="begin another run with weights in other pieces: manager.restore(live, initial=trainfold.weights.Transformed(source, rules))",
        )
    table: Table = {name: SourceTensor(name, "float32", (1,)) for name in names}
    for each in parts:
        if isinstance(each, Rename) and each.old.among(table):  # a checkpoint may have the new names already
            table = each.on(table)
    return {each.name: new for new, each in table.items() if isinstance(each, SourceTensor)}


def renamed_manifest(manifest: Manifest, transform: Transform) -> tuple[Manifest, Renaming]:
    """The manifest with other names of the model: in its tensors, in copies of it under ``extra``, in optimizers, and in the contract. Where the bytes are stays as it is.

    Args:
        manifest: of a checkpoint.
        transform: see `renaming_of`. Rules that find nothing do nothing, so a checkpoint that has the new names already is left as it is.

    Returns:
        The manifest, and what has another name.

    Raises:
        InvalidArgument: as `renaming_of`.
        InvalidState: as `renaming_of`.
    """
    model = manifest.component("model")
    if model is None:
        return manifest, Renaming({})
    names = _names_in(model.nodes[0])
    renaming = renaming_of(transform, names)
    if not renaming.changed:
        return manifest, renaming
    copies = {
        each.name
        for each in manifest.components
        if _class_of(each.nodes[0]) == _MODEL
        and _names_of(each.nodes[0], "params") >= _names_of(model.nodes[0], "params")
    }
    components = tuple(
        _component(each, renaming) if each.name in copies or _class_of(each.nodes[0]) == _OPTIMIZER else each
        for each in manifest.components
    )
    every = {each.name: renaming.names for each in manifest.components}
    contract = _contract(manifest, every, copies, renaming.modules())
    return attrs.evolve(manifest, components=components, contract=contract, written=manifest), renaming


def with_kept_names(manifest: Manifest, wanted: Mapping[str, Described]) -> tuple[Manifest, int]:
    """The manifest of a checkpoint from before a user's own ``module`` kept its name, with the names that the run has (ADR-0056).

    Every part that could be the prefix of a wrapper was left out then. A component gets the names of the run only if these, without such parts,
    are the ones that it has, all of them and each once; so nothing is guessed.

    Args:
        manifest: of a checkpoint.
        wanted: the components of the run.

    Returns:
        The manifest, and how many tensors of its modules have other names; the same manifest if that is 0.
    """
    names = {
        each.name: found
        for each in manifest.components
        if each.name in wanted and (found := _kept(_tensors_in(each.nodes[0]), _tensors_in(wanted[each.name].node)))
    }
    if not names:
        return manifest, 0
    components = tuple(
        _component(each, Renaming(names[each.name])) if each.name in names else each for each in manifest.components
    )
    contract = _contract(manifest, names)  # settings of modules are still under the short names
    changed = {
        name
        for each in components
        if each.name in names and _class_of(each.nodes[0]) == _MODEL
        for name in names[each.name].items()
    }
    return attrs.evolve(manifest, components=components, contract=contract, written=manifest), len(changed)


def _kept(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Saved name -> name of the run; empty if they are equal, or if anything else than parts that may be of wrappers differs."""
    full = {canonical_name(name): name for name in wanted}
    is_sure = full.keys() == set(saved) and len(full) == len(set(wanted)) and any(a != b for a, b in full.items())
    return full if is_sure else {}


def _tensors_in(node: Json) -> list[str]:
    """The names of the tensors of a model, or of the parameters of an optimizer; none for anything else."""
    if _class_of(node) == _MODEL:
        return _names_in(node)
    return [name for group in group_params_of(node) for name in group]


def _component(each: ComponentRecord, renaming: Renaming) -> ComponentRecord:
    return attrs.evolve(
        each,
        nodes=tuple(_node(node, renaming.names) for node in each.nodes),
        tensors=tuple(tuple(_record(one, renaming.names) for one in table) for table in each.tensors),
    )


def _record(record: TensorRecord, names: Mapping[str, str]) -> TensorRecord:
    found = _PATH.fullmatch(record.path)
    old = "" if found is None else found["name"][1:-1]
    if found is None or names.get(old, old) == old:
        return record
    return attrs.evolve(record, path=f"{found['head']}[{names[old]!r}]{found['rest']}")


def _node(node: Json, names: Mapping[str, str]) -> Json:
    """A structure of a model or an optimizer under the new names."""
    if isinstance(node, list):
        return [_node(each, names) for each in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Json] = {}
    for key, value in node.items():
        if key == "leaves" and isinstance(value, dict):
            found[key] = {names.get(name, name): each for name, each in value.items()}
        elif key == "static" and isinstance(value, dict):
            found[key] = {name: _static(name, each, names) for name, each in value.items()}
        else:
            found[key] = _node(value, names)
    return found


def _static(key: str, value: Json, names: Mapping[str, str]) -> Json:
    if not isinstance(value, dict) or not isinstance(value.get("tuple"), list):
        return value
    items: list[Any] = value["tuple"]
    if key in _NAMES:
        return {"tuple": [names.get(each, each) for each in items]}
    return {"tuple": [_static("params", each, names) for each in items]} if key == "ties" else value


def _contract(
    manifest: Manifest,
    renamed: Mapping[str, Mapping[str, str]],
    copies: Collection[str] = (),
    modules: Iterable[tuple[str, str]] = (),
) -> dict[str, Json]:
    """The contract, with what each component has under other names; another component may have the same names and keep them."""
    found: dict[str, Json] = {}
    labels = _labels(manifest, renamed)
    for key, value in manifest.contract.items():
        is_of_part = key.startswith("attached.") and key not in (FROZEN, FROZEN_NAMES)
        names = renamed.get(key.split(".")[1] if is_of_part else "model", {})
        label = next((old for old in labels if key.startswith(f"{old}.")), None)
        of = next((name for name in copies if key.startswith(f"attached.{name}.")), None)
        if label is not None:
            found[labels[label] + key.removeprefix(label)] = value
        elif of is not None and isinstance(value, dict):
            prefix = f"attached.{of}."
            found[prefix + renamed_module(key.removeprefix(prefix), modules)] = value
        elif key == FROZEN:
            every = frozen_names(manifest.contract, _maybe_frozen(manifest)) if names else None
            found |= {key: value} if every is None else frozen_entries(sorted(names.get(each, each) for each in every))
        elif key == FROZEN_LIST:
            found.setdefault(key, value)
        elif key == LINEAGE:
            found[key] = _lineage(value, names)
        elif key == TRAINED and isinstance(value, dict):
            new = {f"{of}.{old}": f"{of}.{name}" for of in copies for old, name in names.items()}
            found[key] = {new.get(path, path): each for path, each in value.items()}
        elif isinstance(value, dict) and value and value.keys() <= names.keys():
            found[key] = {names[name]: each for name, each in value.items()}
        else:
            found[key] = value
    return {key: found[key] for key in sorted(found)}


def _maybe_frozen(manifest: Manifest) -> Iterator[Collection[str]]:
    """The parameters of the model that its optimizer does not have, those that have no gradient, and those that have no slots."""
    model, optimizer = manifest.component("model"), manifest.component("optimizer")
    if model is not None and optimizer is not None:
        params, node = _names_of(model.nodes[0], "params"), optimizer.nodes[0]
        yield params - {name for group in group_params_of(node) for name in group}
        static = node.get("static", {}) if isinstance(node, dict) else {}
        yield params - {*static.get("with_grad", {}).get("tuple", ())}
        yield params - _names_of(node, "slots")


def _labels(manifest: Manifest, renamed: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The prefix of the keys of each param group, which has the name of its first parameter, and the new one."""
    found = {}
    for each in manifest.components:
        names = renamed.get(each.name, {})
        for group in filter(None, group_params_of(each.nodes[0])):
            prefix = f"{prefix_of_optimizer(each.name)}.groups["
            found[f"{prefix}{min(group)!r}]"] = f"{prefix}{min(names.get(name, name) for name in group)!r}]"
    return found


def renamed_module(path: str, modules: Iterable[tuple[str, str]]) -> str:
    """The new name of a module, or of one that is inside of a module with a new name."""
    for old, new in modules:
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def _lineage(value: Json, names: Mapping[str, str]) -> Json:
    forms = {starred(old): starred(new) for old, new in names.items()} | dict(names)
    if not isinstance(value, list):
        return value
    pairs = [each for each in value if isinstance(each, list) and len(each) == 2 and isinstance(each[1], list)]
    return [[source, [forms.get(name, name) for name in each]] for source, each in pairs]


def _names_in(node: Json) -> list[str]:
    ties = node.get("static", {}).get("ties", {}).get("tuple", ()) if isinstance(node, dict) else ()
    aliases = [each["tuple"][0] for each in ties]
    return [*_names_of(node, "params"), *_names_of(node, "buffers"), *aliases]


def _names_of(node: Any, part: str) -> KeysView[str]:
    leaves = node.get("fields", {}).get(part, {}).get("leaves", {}) if isinstance(node, dict) else {}
    return dict.fromkeys(leaves).keys()


def _class_of(node: Json) -> str | None:
    return str(node.get("node")) if isinstance(node, dict) else None


def starred(name: str) -> str:
    """The form of a name: ``*`` stands for a number.

    Examples:
        >>> starred("h.3.w")
        'h.*.w'
    """
    return _NUMBER.sub("*", name)
