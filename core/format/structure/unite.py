"""`unite`: the description of a component of which ranks hold parts by name, such as the stages of a pipeline: that of the whole model.

Each leaf keeps its name, and the ranks that hold it are its placement. So a checkpoint does not depend on the number of stages.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NoReturn, final

import attrs

from trainfold.core.errors import RanksDisagree
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.leaf_path import join

_BY_NAME: Final = frozenset({"trainfold.ModelState", "trainfold.OptimizerState", "trainfold.OwnOptimizerState"})
_WITH_NAMES: Final = _BY_NAME | {"trainfold.ParamGroup"}
NAMES_FIX: Final = (
    "give each tensor the name that it has in the whole model: cut the model with torch.distributed.pipelining.pipeline, or delete from it what other "
    "stages have; a ModuleList of layers counts from 0 on every stage. A weight that two stages share must be equal on both"
)


@final
@attrs.frozen
class United:
    """A component of all stages.

    Attributes:
        described: of the whole, the same on every rank.
        several: leaf path -> the ranks of each part that has it, where several have it: their values must be equal.
    """

    described: Described
    several: Mapping[str, tuple[tuple[int, ...], ...]]


def is_by_name(node: Json) -> bool:
    """Whether the names of a component's tensors may be spread over ranks: a module's, or an optimizer's.

    Examples:
        >>> is_by_name({"node": "trainfold.ModelState"}), is_by_name({"dict": {}})
        (True, False)
    """
    return isinstance(node, dict) and node.get("node") in _BY_NAME


def unite(name: str, parts: Sequence[tuple[Sequence[int], Described]], world_size: int) -> United:
    """Return the description of a component of which ranks hold parts.

    Laws: it does not depend on how the names are spread over parts, except for the placements. With one part it is that part.

    Args:
        name: the component.
        parts: the ranks of each part, and its description from `by_rule`.
        world_size: the number of ranks.

    Raises:
        RanksDisagree: naming the leaf and both ranks, if parts differ in what is not spread: a dtype or shape of one name, a
            hyperparameter, the number of param groups.
    """
    union = _Union(name, parts)
    node = union.merged(name, [(number, part.node) for number, (_, part) in enumerate(parts)])
    return United(Described(node, union.specs(world_size)), union.several)


class _Union:
    def __init__(self, name: str, parts: Sequence[tuple[Sequence[int], Described]]) -> None:
        self._name, self._parts = name, parts
        self._paths = [list(part.tensors) for _, part in parts]
        self._holders: dict[str, list[int]] = {}
        for number, paths in enumerate(self._paths):
            for path in paths:
                self._holders.setdefault(path, []).append(number)
        self._index = {path: index for index, path in enumerate(self._holders)}

    @property
    def several(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {
            path: tuple(tuple(self._parts[number][0]) for number in numbers)
            for path, numbers in self._holders.items()
            if len(numbers) > 1
        }

    def specs(self, world_size: int) -> dict[str, LeafSpec]:
        """The specs of all leaves, placed on the ranks that hold them; equal ones are one object."""
        found: dict[str, LeafSpec] = {}
        known: dict[tuple[int, ...], LeafSpec] = {}
        for path, numbers in self._holders.items():
            held = [self._parts[number][1].tensors[path] for number in numbers]
            key = (*numbers, *map(id, held))
            if key not in known:
                ranks = [rank for number in numbers for rank in self._parts[number][0]]
                known[key] = self._placed(path, numbers, held, sorted(ranks) if len(ranks) < world_size else None)
            found[path] = known[key]
        return found

    def _placed(self, path: str, numbers: list[int], held: list[LeafSpec], ranks: list[int] | None) -> LeafSpec:
        first = held[0]
        for number, spec in zip(numbers, held, strict=True):
            if (spec.dtype, spec.shape) != (first.dtype, first.shape):
                self._differ(path, first, spec, numbers[0], number)
            if spec.slices:
                self._differ(path, "a tensor that is whole, or cut by a rule over the ranks of its stage", f"slices {spec.slices}", None, number)  # fmt: skip
        if first.placement is not None or ranks is None:
            return first
        return attrs.evolve(first, placement=make_placement(make_mesh((len(ranks),), ranks=ranks), ()))

    def merged(self, path: str, held: list[tuple[int, Json]]) -> Json:
        """The node of all parts that have it, with the numbers of the whole's tensors."""
        number, first = held[0]
        if isinstance(first, list):
            for other, each in held[1:]:
                if not isinstance(each, list) or len(each) != len(first):
                    self._differ(path, f"{len(first)} items", _shown(each), number, other)
            return [
                self.merged(f"{path}[{index}]", [(other, each[index]) for other, each in held])
                for index in range(len(first))
            ]
        if not isinstance(first, dict):
            for other, each in held[1:]:
                if each is not first and (each != first or repr(each) != repr(first)):
                    self._differ(path, _shown(first), _shown(each), number, other)
            return first
        tags = [*first]
        for other, each in held[1:]:
            if not isinstance(each, dict) or [*each] != tags:
                self._differ(path, _shown(first), _shown(each), number, other)
        return self._tagged(path, tags[0], held)

    def _tagged(self, path: str, tag: str, held: list[tuple[int, Any]]) -> Json:
        number, first = held[0]
        if tag == "t":
            places = {self._paths[other][each["t"]]: other for other, each in held}
            if len(places) > 1:
                (one, mine), (two, theirs), *_ = places.items()
                self._differ(path, f"the tensor {one}", f"the tensor {two}", mine, theirs)
            return {**first, "t": self._index[next(iter(places))]}
        if tag == "node":
            return self._node(path, held)
        inner = [(other, each[tag]) for other, each in held]
        if tag == "leaves":
            return {"leaves": self._by_key(path, inner)}
        if tag == "dict":
            keys = [*inner[0][1]]
            for other, each in inner[1:]:
                if sorted(each) != sorted(keys):
                    self._differ(path, f"the keys {sorted(keys)}", f"{sorted(each)}", number, other)
            return {"dict": self._by_key(path, inner)}
        return {tag: self.merged(path, inner)}

    def _by_key(self, path: str, held: list[tuple[int, Any]]) -> dict[str, Json]:
        children: dict[str, list[tuple[int, Json]]] = {}
        for number, each in held:
            for key, child in each.items():
                children.setdefault(key, []).append((number, child))
        return {key: self.merged(join(path, dict, key), each) for key, each in children.items()}

    def _node(self, path: str, held: list[tuple[int, Any]]) -> Json:
        number, first = held[0]
        for other, each in held[1:]:
            if each["node"] != first["node"] or [*each["fields"]] != [*first["fields"]]:
                self._differ(path, first["node"], each["node"], number, other)
        fields: dict[str, Json] = {}
        for key in first["fields"]:
            inner = [(other, each["fields"][key]) for other, each in held]
            if key == "groups" and first["node"] == "trainfold.OptimizerState":
                self._check_groups(f"{path}.{key}", inner)
            fields[key] = self.merged(f"{path}.{key}", inner)
        found: dict[str, Json] = {"node": first["node"], "fields": fields}
        if "static" in first:
            of_names = first["node"] in _WITH_NAMES
            found["static"] = {
                key: _all_of([each["static"][key] for _, each in held])
                if of_names
                else self.merged(f"{path}.{key}", [(other, each["static"][key]) for other, each in held])
                for key in first["static"]
            }
        return found

    def _check_groups(self, path: str, held: list[tuple[int, Any]]) -> None:
        number, first = held[0]
        for other, each in held[1:]:
            if len(each["tuple"]) != len(first["tuple"]):
                self._differ(
                    path, f"{len(first['tuple'])} param groups", f"{len(each['tuple'])}", number, other,
                    fix="give the optimizer of each stage the param groups of the whole model in one order; one without parameters there is an empty list",
                )  # fmt: skip

    def _differ(  # noqa: PLR0913 - private
        self, path: str, expected: object, found: object, mine: int | None, theirs: int, *, fix: str = ""
    ) -> NoReturn:
        there = "" if mine is None else f" on rank {self._parts[mine][0][0]}"
        raise RanksDisagree(
            path, expected=f"{expected}{there}", found=f"{found} on rank {self._parts[theirs][0][0]}",
            fix=fix or ("make the settings equal on all stages" if ".groups[" in path else NAMES_FIX),
        )  # fmt: skip


def _all_of(tuples: Sequence[Any]) -> Json:
    """The tuples of names end to end, each name once."""
    if not all(isinstance(each, dict) and [*each] == ["tuple"] for each in tuples):
        return tuples[0]
    items = {canonical_json([item]): item for each in tuples for item in each["tuple"]}
    return {"tuple": list(items.values())}


def leaves_of_several(paths: Collection[str], several: Mapping[str, object]) -> list[str]:
    """The leaves of a rank that other parts have too, in the order of the whole.

    Examples:
        >>> leaves_of_several(["model.params['b']"], {"model.params['a']": ((0,), (1,)), "model.params['b']": ((0,), (1,))})
        ["model.params['b']"]
    """
    return [path for path in several if path in paths]


def _shown(value: object) -> str:
    return repr(value)[:80]
