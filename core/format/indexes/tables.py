"""Reads the table of the tensors of a structure: `table_of_rows` that of version 2, a row for each, and `table_of_kinds` that of version 3, the kind of each."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import MAX_DIMENSIONS
from trainfold.core.format.strict_json import fields, hostile, int_of, list_of, sized, text_of
from trainfold.core.format.structure.places import places
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.placement import Placement

ReadTable: TypeAlias = Callable[[Json, Json, str, list[Placement], str], list[dict[str, Any]]]
"""Returns the checked tensors of a table, with no shards yet.

Its arguments are the table; the structure; the name of the component; the layouts of the root; and its path, for errors.
"""


def table_of_rows(rows: Json, _node: Json, _name: str, layouts: list[Placement], where: str) -> list[dict[str, Any]]:
    """The tensors of a table of version 2.

    Raises:
        CheckpointHostile: naming the tensor.
    """
    table = []
    for row in list_of(rows, where):
        path, *kind = sized(row, 4, where)
        place = f"{where}: {text_of(path, where)[:200]}"
        table.append({"path": path, **_kind(kind, layouts, place), "shards": []})
    return table


def table_of_kinds(value: Json, node: Json, name: str, layouts: list[Placement], where: str) -> list[dict[str, Any]]:
    """The tensors of a table of version 3: ``kinds`` are the dtypes, shapes and layouts that there are, and ``of`` has the kind of each tensor.

    The path of a tensor is that of its first place in the structure.

    Raises:
        CheckpointHostile: naming the component.
    """
    fields(value, {"kinds", "of"}, where, exact=True)
    kinds = [_kind(sized(row, 3, where), layouts, where) for row in list_of(value["kinds"], where)]
    numbers = list_of(value["of"], where)
    if any(type(number) is not int or not 0 <= number < len(kinds) for number in numbers):
        raise hostile(f"{where}: {name[:40]}", f"kinds below {len(kinds)}", shown(numbers[:8]))
    paths: dict[int, str] = {}
    try:
        for leaf in places(node, name):
            if leaf.tensor is not None:
                paths.setdefault(leaf.tensor, leaf.path)
    except CheckpointHostile as error:
        raise hostile(f"{where}: {error.where}", error.expected, error.found) from error
    # `check_structures` refuses one without a place
    named = [(paths.get(index, ""), kinds[number]) for index, number in enumerate(numbers)]
    return [{"path": path, **kind, "shards": []} for path, kind in named]


def _kind(values: list[Any], layouts: list[Placement], where: str) -> Mapping[str, Any]:
    """What tensors of one dtype, shape and layout have in common."""
    dtype, shape, layout = values
    if not isinstance(dtype, str) or dtype not in STORED:
        raise hostile(where, "a known dtype", shown(dtype))
    sizes = tuple(int_of(size, where) for size in list_of(shape, where))
    if len(sizes) > MAX_DIMENSIONS:
        raise hostile(where, f"at most {MAX_DIMENSIONS} dimensions", len(sizes))
    if layout is not None and (type(layout) is not int or not 0 <= layout < len(layouts)):
        raise hostile(where, f"a layout below {len(layouts)}", shown(layout))
    rule = None if layout is None else layouts[layout]
    if rule is not None and len(rule.cuts) > len(sizes):
        raise hostile(where, f"a tensor of at least {len(rule.cuts)} dimensions", f"the shape {shown(shape)}")
    box = layout, sizes, dtype  # what a box by rule depends on; the rule itself is slow to hash
    return {"dtype": dtype, "sizes": sizes, "layout": rule, "box": box}
