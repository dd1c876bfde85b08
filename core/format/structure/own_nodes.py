"""The node classes of trainfold and their fields, as the format has them.

A table, so that a checkpoint can be checked where its classes are not imported, nor torch. A test compares it with the classes.
"""

from collections.abc import Collection, Mapping
from typing import Final

from trainfold.core.format.structure.kinds import (
    ANYTHING,
    BOOL,
    INT,
    NONE,
    TENSOR,
    TEXT,
    Kind,
    NodeKind,
    Nodes,
    either,
    fields_of,
    leaves_of,
    mapping_kind,
    node_of,
    tuple_of,
)

_SUM: Final = node_of("trainfold.ExactSum")


def _node(
    name: str, trees: Mapping[str, Kind], *, static: Mapping[str, Kind] | None = None, optional: Collection[str] = ()
) -> tuple[str, NodeKind]:
    full, others = f"trainfold.{name}", static or {}
    required = {*trees, *others} - set(optional)
    return full, fields_of(full, trees=trees, static=others, required=required)


def _each(names: str, kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


NODES: Final[Nodes] = dict(
    [
        _node(
            "TrainState",
            {
                "model": either(node_of("trainfold.ModelState"), NONE),
                "optimizer": ANYTHING,
                "scheduler": ANYTHING,
                "trainer": either(node_of("trainfold.Progress"), NONE),
                "dataset": ANYTHING,
                "rng": ANYTHING,
                "extra": mapping_kind(ANYTHING),
            },
            static={
                "contract": mapping_kind(ANYTHING),
                "origin": node_of("trainfold.Origin"),
                "stage": either(node_of("trainfold.Stage"), NONE),
            },
            optional=[
                "model",
                "optimizer",
                "scheduler",
                "trainer",
                "dataset",
                "rng",
                "extra",
                "contract",
                "origin",
                "stage",
            ],
        ),
        _node("Progress", _each("step epoch samples tokens", INT), optional=["step", "epoch", "samples", "tokens"]),
        _node(
            "ModelState",
            _each("params buffers", leaves_of(TENSOR)),
            static={"ties": tuple_of(tuple_of(TEXT, 2))},
            optional=["ties"],
        ),
        _node("ParamGroup", {"hyper": mapping_kind(ANYTHING)}, static={"params": tuple_of(TEXT)}),
        _node(
            "OptimizerState",
            {
                "kind": TEXT,
                "slots": leaves_of(mapping_kind(ANYTHING)),
                "groups": tuple_of(node_of("trainfold.ParamGroup")),
                "masters": either(leaves_of(TENSOR), NONE),
            },
            static={"with_grad": tuple_of(TEXT)},
            optional=["masters", "with_grad"],
        ),
        _node(
            "OwnOptimizerState",
            {
                "base": node_of("trainfold.OptimizerState"),
                **_each("own loose attributes", ANYTHING),
                "held": mapping_kind(ANYTHING),
            },
            optional=["own", "loose", "attributes", "held"],
        ),
        _node("Opaque", {"value": ANYTHING}),
        _node(
            "PerRank",
            {"value": ANYTHING},
            static=_each("share shares", either(INT, NONE)),
            optional=["share", "shares"],
        ),
        _node("OfRankZero", {"value": ANYTHING}),
        _node("Key", {"bits": INT}),
        _node("DataCursor", _each("epoch next_index length seed", INT)),
        _node("DistributedEvalCursor", _each("length global_batch_size next_index", INT)),
        _node(
            "Tally",
            {
                "accumulators": mapping_kind(ANYTHING),
                "batches": INT,
                "metrics": mapping_kind(TEXT),
                "complete": BOOL,
                "next_index": INT,
                "chunk": INT,
            },
            optional=["chunk"],
        ),
        _node("ExactSum", _each("limbs special", TENSOR)),
        _node("Total", {"sum": _SUM, "count": TENSOR}),
        _node("Quotient", _each("num den", _SUM)),
        _node("Moments", {"total": node_of("trainfold.Total"), "squares": tuple_of(_SUM, 3)}),
        _node("Extreme", _each("key seen special", TENSOR)),
        _node("Positions", _each("num den", _SUM)),
        _node("Reached", _each("accepted reached", TENSOR)),
        _node("Hits", _each("correct total outside special", TENSOR)),
        _node("Pairs", _each("counts outside", TENSOR)),
        _node("Bins", _each("counts special", TENSOR)),
    ]
)

# A component that is absent has no node, so None is not allowed here. The other components may be anything.
COMPONENTS: Final[Mapping[str, Kind]] = {
    "model": node_of("trainfold.ModelState"),
    "trainer": node_of("trainfold.Progress"),
}
