"""What `trainfold diff` shows of the weights of two formats: the tensors that differ, and by how much."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainfold.adapters.cli.terminal.output import Answer, Different, Table
from trainfold.adapters.cli.terminal.reading import reading
from trainfold.backends.convert.compare_sources import ComparedTensor, ReadTable, compare_sources
from trainfold.backends.convert.conversion_run import like_of
from trainfold.backends.convert.opened_source import OpenedSource, has_keys, open_source
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.transform.apply import table_of
from trainfold.core.transform.conversion import is_of_hub, rules_for
from trainfold.core.transform.families.tied_heads import with_aliases
from trainfold.core.transform.transform import compose

_SHOWN = 100


def diff_formats(
    a: Path, b: Path, *, rules: str | None = None, like: Path | None = None, key: str | None = None
) -> Answer:
    """Compare the weights at two paths, of any two formats, bit by bit.

    Args:
        a: one of them.
        b: the other.
        rules: the family whose names are translated to those of the hub, where one side has these and the other has not; None if both have the same names.
        like: the ``config.json`` that rules need; None for the one of the side that is of a hub.
        key: under which the model is in what torch has written; None to look for it.

    Returns:
        Each tensor that differs; with `Different` if any does.

    Raises:
        InvalidArgument: for rules between two sides that have the same names.
        CheckpointError: the matching subclass, if something cannot be read.
    """
    is_of_one = key is not None and has_keys(a) != has_keys(b)
    one, other = (open_source(each, key=key if not is_of_one or has_keys(each) else None) for each in (a, b))
    tables: list[ReadTable] = []
    with ExitStack() as held:
        tables += [_table(each, side, rules, like, held) for each, side in ((one, other), (other, one))]
        total = sum(size_bytes(each.dtype, each.shape) for side in tables for each in side.table.values())
        with reading("comparing", total) as advance:
            found = list(compare_sources(*tables, advance=advance))
    tied = {
        name: first for side, another in (tables, tables[::-1]) for name, first in side.alone_by_a_tie(another).items()
    }
    differ = [each for each in found if not each.same]
    rows = [(each.name, _shown(each.a), _shown(each.b), _said(each)) for each in differ[:_SHOWN]]
    if len(differ) > _SHOWN:
        rows.append((f"... {len(differ) - _SHOWN} more", "", "", "see --json"))
    facts = (
        ("a", f"{a} ({one.format})"),
        ("b", f"{b} ({other.format})"),
        *(("tied", f"{name} to {first}, on one side alone; compared once") for name, first in tied.items()),
        ("same", f"{len(found) - len(differ)} of {len(found)} tensors"),
    )
    shown = [Table("Weights", ("", ""), facts)]
    if rows:
        shown.append(Table("Tensors that differ", ("name", "a", "b", "by how much"), tuple(rows)))
    error = None
    if differ:
        error = Different(f"{a} and {b}", expected="the same weights", found=f"{len(differ)} of {len(found)} tensors that differ",
                          fix="see the tables; --json has every tensor. Names of another library are translated with --rules")  # fmt: skip
    data = {
        "a": str(a), "b": str(b), "same": error is None, "compared": len(found), "tied": tied,
        "tensors": [_json(each) for each in differ],
    }  # fmt: skip
    return Answer(data, tuple(shown), error)


def _table(side: OpenedSource, other: OpenedSource, rules: str | None, like: Path | None, held: ExitStack) -> ReadTable:
    """What a side has, under the names of the hub if rules lead there."""
    weights = held.enter_context(opened_weights(side.model))
    table = with_aliases(table_of(compose(), weights.specs), weights.ties)
    if rules is None:
        return ReadTable(table, weights.read, weights.ties)
    if is_of_hub(side.format, other.format):
        return ReadTable(table, weights.read, weights.ties)
    _, config = like_of(other, like)
    found = rules_for(side.format, "hf", rules, config)
    assert found is not None, "a family was given"
    return ReadTable(found.on(table), weights.read)


def _shown(spec: object) -> str:
    return "absent" if spec is None else str(spec)


def _said(each: ComparedTensor) -> str:
    if each.a is None or each.b is None:
        return ""
    if each.distance is None:
        return "shapes differ" if each.a.shape != each.b.shape else "kinds of numbers differ"
    return f"{'after rounding: ' if each.is_rounded else ''}{each.distance}"


def _json(each: ComparedTensor) -> Mapping[str, Any]:
    apart = each.distance
    return {
        "name": each.name,
        "a": _shown(each.a),
        "b": _shown(each.b),
        "differing": None if apart is None else apart.differing,
        "total": None if apart is None else apart.total,
        "max_ulps": None if apart is None else apart.max_ulps,
        "max_abs": None if apart is None else apart.max_abs,
        "nans": None if apart is None else apart.nans,
    }
