"""Replicas: digests prove that replicated state is equal on all ranks, and the first difference is named."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.errors import RanksDisagree
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.stage import Stage
from trainfold.core.state.notes import is_of_each_rank

_PARTS: Final = " in parts "  # no name of a component has spaces
_NAMED: Final = "settings of "
_BUFFERS: Final = ".buffers['"
_TRAINED: Final = (".params['", ".slots['", ".masters['")
_STATISTICS: Final = (
    "batch statistics, such as BatchNorm's, differ under DistributedDataParallel: attach the wrapper itself, with broadcast_buffers on, and save with "
    "a CheckpointManager; or convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm; or send those of rank 0 before each save: "
    "for buffer in {}.buffers(): torch.distributed.broadcast(buffer, 0); or declare whose they are: attach(..., sharing={{'{}.buffers': 'each_rank'}}) or 'rank_0'"
)
_VALUES: Final = (
    "keep replicas equal: wrap the model in DistributedDataParallel, and start all ranks with the same values. Declare what differs on purpose: "
    "attach(..., sharing={'name': 'each_rank'}), or PerRank in a state. Where each rank has a stage of a pipeline, attach the PipelineStage objects: attach(stages, optimizer). Save other parameters that differ in one run for each rank: CheckpointManager(f'{run}/{rank}', collectives=trainfold.SingleProcess())"
)
_OWN: Final = (
    "return in get_extra_state, or state_dict, of the module what all ranks have, a count by summing it over them; and attach an object that holds what each rank "
    "has of its own: attach(..., extra={'seen': seen}, sharing={'seen': 'each_rank'})"
)
_SETTINGS: Final = "start the same script with the same settings on all ranks"

Leaves = Mapping[str, Mapping[str, str]]
Level = Literal["none", "quick", "tensor", "full"]
LEVELS: Final[Mapping[str, Level]] = {"none": "none", "quick": "quick", "tensor": "tensor", "full": "full"}
TURNS: Final = 16  # this many saves compare every byte once, at the level "quick"
SMALL_BYTES: Final = 2**14  # tensors up to this size are compared whole at every save


@final
@attrs.frozen
class Proof:
    """How much of the replicated state a save compares.

    Attributes:
        level: ``none``: only structures and contracts; ``quick``: everything once, and then a part of every tensor at each save; ``tensor``:
            everything at each save; ``full``: also everything after each restore.
        turn: which of the `TURNS` parts of each tensor to compare, in [0, TURNS); None for all.
    """

    level: Level = "tensor"
    turn: int | None = None


def level_of(name: str) -> Level:
    """A level by its name, one of `LEVELS`.

    Examples:
        >>> level_of("quick")
        'quick'
    """
    return LEVELS[name]


def proof_of(level: Level, *, saves: int) -> Proof:
    """What a save compares, given the number of saves since the last full comparison.

    Examples:
        >>> proof_of("quick", saves=0).turn, proof_of("quick", saves=1).turn, proof_of("quick", saves=17).turn
        (None, 0, 0)
    """
    return Proof(level, (saves - 1) % TURNS if level == "quick" and saves else None)


def is_buffer(path: str) -> bool:
    """Whether a leaf is a buffer of a module.

    Examples:
        >>> is_buffer("model.buffers['bn.running_mean']"), is_buffer("model.params['bn.weight']")
        (True, False)
    """
    return _BUFFERS in path


def is_trained(path: str) -> bool:
    """Whether equal gradients keep a leaf equal on all ranks: a parameter, or an optimizer's slot for it.

    Examples:
        >>> is_trained("ema.params['w']"), is_trained("optimizer.slots['w']['exp_avg']"), is_trained("queue.value['keys']")
        (True, True, False)
    """
    return any(part in path for part in _TRAINED)


def absent_optional(ranks: Sequence[Collection[str]], optional: Sequence[frozenset[str]]) -> frozenset[str]:
    """The components that every rank calls optional and that at least one rank lacks; a save leaves them out.

    Args:
        ranks: the components of each rank.
        optional: what each rank calls optional.

    Examples:
        >>> sorted(absent_optional([{"model", "ema"}, {"model"}], [frozenset({"ema"})] * 2))
        ['ema']
    """
    return frozenset(name for name in frozenset.intersection(*optional) if not all(name in each for each in ranks))


def summary(leaves: Leaves, contract: Mapping[str, Json], settings: Mapping[str, Mapping[str, Json]]) -> dict[str, str]:
    """The digests exchanged by the ranks: one for each component, one for the contract, and one for the settings of each attached object.

    Args:
        leaves: component -> leaf path -> digest.
        contract: what must be equal at a resume.
        settings: name, from `of_stages` -> the settings that ranks must have alike.
    """
    shared = {key: value for key, value in contract.items() if not is_of_each_rank(key)}
    lines = {name: "\n".join(f"{path} {digest}" for path, digest in each.items()) for name, each in leaves.items()}
    digests = {name: digest_of(text.encode("utf-8", "surrogatepass")) for name, text in lines.items()}
    found = {settings_name(name): digest_of(canonical_json(dict(each))) for name, each in settings.items()}
    return {**digests, "contract": digest_of(canonical_json(shared)), **found}


def first_in_doubt(summaries: Sequence[Mapping[str, str]]) -> str | None:
    """The first component, or ``contract``, whose digest differs between ranks.

    Examples:
        >>> first_in_doubt([{"model": "a", "contract": "c"}, {"model": "b", "contract": "c"}])
        'model'
    """
    names = dict.fromkeys(name for each in summaries for name in each)
    return next(
        (
            name
            for name in names
            if len(
                {
                    each.get(name)
                    for each in summaries
                    if name in each or not (is_of_parts(name) or component_of_settings(name))
                }
            )
            > 1
        ),
        None,
    )


def parts_name(component: str, boxes: Mapping[str, object]) -> str:
    """The name in a summary for the parts of tensors that several ranks hold; ranks with other parts have another name.

    Args:
        component: of the tensors.
        boxes: leaf path -> the slice that this rank holds.

    Examples:
        >>> is_of_parts(parts_name("model", {"w": ((0, 2),)})), is_of_parts("model")
        (True, False)
    """
    return f"{component}{_PARTS}{digest_of(repr(dict(boxes)).encode())}"


def component_of_parts(name: str) -> str:
    """The component of a name in a summary, of parts or not.

    Examples:
        >>> component_of_parts(parts_name("model", {"w": ((0, 2),)})), component_of_parts("model")
        ('model', 'model')
    """
    return name.partition(_PARTS)[0]


def is_of_parts(name: str) -> bool:
    """Whether a name in a summary is for parts of tensors, which only some ranks hold."""
    return _PARTS in name


def parts_differ(held: Sequence[Mapping[str, str] | None]) -> RanksDisagree:
    """The error for ranks that hold the same parts with other values.

    Args:
        held: for each rank, leaf path -> digest; None for a rank that holds other parts.
    """
    mine = [(rank, leaves) for rank, leaves in enumerate(held) if leaves is not None]
    first, wanted = mine[0]
    rank, paths = next(
        (rank, odd) for rank, leaves in mine if (odd := [path for path in wanted if leaves.get(path) != wanted[path]])
    )
    more = f", and of {len(paths) - 1} more" if len(paths) > 1 else ""
    return RanksDisagree(
        paths[0],
        expected=f"the bits of rank {first}, which holds the same part of it",
        found=f"others on rank {rank}{more}",
        fix=_VALUES,
    )


def of_stages(component: str, stage: Stage | None) -> str:
    """The name of a component's settings; those of stages differ, so each part of a pipeline has a name of its own.

    Examples:
        >>> from trainfold.core.layout.stage import make_stage
        >>> of_stages("model", None), of_stages("model", make_stage([1], 2))
        ('model', 'model of stage 1 of 2')
    """
    return component if stage is None else f"{component} of {stage}"


def settings_name(component: str) -> str:
    """The name in a summary for the settings of a component, from `of_stages`; ranks that do not compare them have none.

    Examples:
        >>> component_of_settings(settings_name("model")), component_of_settings("model")
        ('model', None)
    """
    return f"{_NAMED}{component}"


def component_of_settings(name: str) -> str | None:
    """The component, from `of_stages`, whose settings have a name in a summary; None if it is a name of something else."""
    return name.removeprefix(_NAMED) if name.startswith(_NAMED) else None


def settings_differ(component: str, held: Sequence[Mapping[str, Json] | None]) -> RanksDisagree:
    """The error for ranks that have attached an object with other settings.

    Args:
        component: of the object, from `of_stages`.
        held: for each rank, its settings; None for a rank that does not compare them.

    Examples:
        >>> settings_differ("model", [{"attached.model.p": 0.1}, {"attached.model.p": 0.2}]).found
        'on rank 1: 0.2'
    """
    (first, mine), *others = [(rank, each) for rank, each in enumerate(held) if each is not None]
    rank, key, there = next(
        (rank, key, each)
        for rank, each in others
        for key in dict.fromkeys((*mine, *each))
        if _text(mine, key) != _text(each, key)
    )
    declared = f"{component.partition(' ')[0]}.settings"
    return contracts_differ(
        key,
        (first, mine),
        (rank, there),
        fix=f"{_SETTINGS}; or declare that ranks have their own: attach(..., sharing={{'{declared}': 'each_rank'}})",
    )


def contracts_differ(
    key: str, mine: tuple[int, Mapping[str, Json]], theirs: tuple[int, Mapping[str, Json]], *, fix: str = _SETTINGS
) -> RanksDisagree:
    """The error for two ranks whose contracts differ.

    Args:
        key: of the contract.
        mine: a rank and its contract.
        theirs: another rank and its contract.
        fix: what to do.

    Examples:
        >>> print(contracts_differ("batch_size", (0, {"batch_size": 8}), (2, {})))
        contract['batch_size']: expected what rank 0 has: 8, found on rank 2: 'nothing'; start the same script with the same settings on all ranks
    """
    (first, one), (rank, other) = mine, theirs
    return RanksDisagree(
        f"contract[{key!r}]",
        expected=f"what rank {first} has: {_short(one.get(key, 'nothing'))}",
        found=f"on rank {rank}: {_short(other.get(key, 'nothing'))}",
        fix=fix,
    )


def differing(mine: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """The leaves, or keys of the contract, that differ from those of a first rank, in its order.

    Examples:
        >>> differing({"a": 1, "b": 3, "environment.threads": 1, "unsaved": {"model.p": "a number"}}, {"a": 1, "b": 2, "environment.threads": 2})
        ['b']
    """
    names = dict.fromkeys((*first, *mine))
    return [name for name in names if not is_of_each_rank(name) and _text(mine, name) != _text(first, name)]


def _text(held: Mapping[str, Any], name: str) -> bytes:
    return canonical_json([held[name]]) if name in held else b""


def replicas_differ(name: str, found: Sequence[tuple[int, str, str]], first: str) -> RanksDisagree:
    """The error that every rank raises.

    Args:
        name: the component, or ``contract``.
        found: for each rank, how many leaves or keys differ from those of rank 0, the first of them, and its value in words.
        first: what rank 0 has there, in words.
    """
    rank, (count, path, value) = next((rank, each) for rank, each in enumerate(found) if each[0])
    more = f", and {count - 1} more of {name}" if count > 1 else ""
    if name == "contract":
        return RanksDisagree(f"contract[{path!r}]", expected=f"what rank 0 has: {first}", found=f"on rank {rank}: {value}{more}", fix=_SETTINGS)  # fmt: skip
    return RanksDisagree(
        path,
        expected="the bits of rank 0, because one rank writes what all have",
        found=f"others on rank {rank}{more}",
        fix=_STATISTICS.format(name, name) if is_buffer(path) else _OWN if _is_own(path) else _VALUES,
    )


def _is_own(path: str) -> bool:
    """Whether a leaf is of what a module returns itself beside its tensors, which cannot be declared."""
    return path.partition(".value")[0].endswith(("_extra_state", "_own_state"))


def first_disagreement(name: str, one: Described, other: Described) -> tuple[str, str, str]:
    """The first leaf that two ranks describe differently, with both descriptions."""
    if not is_same(one.node, other.node):
        return _first_node(name, one.node, other.node)
    mine, theirs = (
        {path: f"a tensor of {spec.dtype} {[*spec.shape]}" for path, spec in each.tensors.items()}
        for each in (one, other)
    )
    paths = [path for path in {**mine, **theirs} if mine.get(path) != theirs.get(path)]
    if not paths:  # the same tensors in another order
        return name, _short([*mine]), _short([*theirs])
    return paths[0], mine.get(paths[0], "nothing"), theirs.get(paths[0], "nothing")


def _first_node(path: str, one: Json, other: Json, tag: str = "") -> tuple[str, str, str]:
    """`first_disagreement` of two nodes, in the form of `trainfold.core.format.structure.rebuild`; ``tag`` is the tag above them."""
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        for key in one:
            if not is_same(one[key], other[key]):
                step = {"dict": f"[{key!r}]", "leaves": f"[{key!r}]", "fields": f".{key}", "static": f".{key}"}.get(tag)
                return _first_node(path + (step or ""), one[key], other[key], "" if step else key)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if not is_same(mine, theirs):
                return _first_node(f"{path}[{index}]" if tag in ("list", "tuple") else path, mine, theirs)
    return path, _short(one), _short(other)


def is_same(one: Json, other: Json) -> bool:
    """Whether two nodes are bitwise the same; ``==`` alone takes 0.0 for -0.0, and 1 for True."""
    return one is other or (one == other and repr(one) == repr(other))


def _short(value: object, limit: int = 80) -> str:
    return repr(value)[:limit]


def structures_differ(where: str, mine: object, theirs: object, rank: int) -> RanksDisagree:
    """The error for a component whose structure differs between ranks.

    Args:
        where: the first leaf that differs.
        mine: what rank 0 has there.
        theirs: what the other rank has there.
        rank: the other rank.
    """
    return RanksDisagree(
        where,
        expected=f"what rank 0 has: {mine}",
        found=f"on rank {rank}: {theirs}",
        fix=_OWN
        if _is_own(where)
        else "make it equal on all ranks, a count by summing it over them; or declare a component under extra= with attach(..., sharing={'name': 'each_rank'}); or attach the PipelineStage objects of a pipeline, and not their modules",
    )
