"""The audit: compares two looks at a run to find state that changes with training and that no component saves.

A look is a mapping of facts: path -> what is there. This module compares two looks and writes the warning.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias, final

import attrs

UNSAVED: Final = "unsaved"  # the key of the contract for it; never compared
SHOWN: Final = 12
LISTED: Final = 64

NOTHING: Final = "nothing"
NUMBER: Final = "a number"
TEXT: Final = "a text"
TENSOR: Final = "a tensor"
BUFFER: Final = "a non-persistent buffer"
LENGTH: Final = "a list"
GENERATOR: Final = "a random generator"
MODE: Final = "a mode (train or eval)"
ORDER: Final = "an order or weights"  # a list or a tensor in an object that gives an order
CARRIED: Final = "a tensor with a grad_fn that the next forward reads"
_CONSTANT: Final = frozenset({NOTHING})
_SIZED: Final = frozenset({TENSOR, BUFFER})
_EMPTY: Final = frozenset({(LENGTH, "0"), (ORDER, "empty")})
_PLACE: Final = re.compile(r"(\[[^\[\]]*\])+$")

_CURES: Final[Mapping[str, str]] = {
    BUFFER: "register_buffer(name, tensor) without persistent=False",
    TENSOR: "register_buffer(name, tensor) in a module; or the state_dict() of its object",
    CARRIED: "register_buffer(name, tensor) in the module, and keep tensor.detach() in it",
    ORDER: "extra={'name': (get, set)}, a function that returns it and one that restores it",
    NUMBER: "a buffer of a module; the state_dict() of its object; or extra={'name': (get, set)}, a function that returns it and one that restores it",
    TEXT: "extra={'name': (get, set)}, a function that returns it and one that restores it",
    LENGTH: "extra={'name': (get, set)}, a function that returns the list and one that restores it",
    GENERATOR: "extra={'name': (get, set)}, functions that read and write its state",
    MODE: "set it before each step, as a function of live.progress.step",
}
_BY_DATA: Final = (
    "extra={'data': dataset}, if the object has state_dict and load_state_dict (a plain DataLoader does not call them); or draw "
    "from the global streams or from the index"
)
_BY_SAMPLER: Final = "give the sampler set_epoch(epoch), and make it from the epoch and a seed"
# a resume inside an epoch starts the sampler again, which must then start from the same values
_BY_PLACE: Final[Mapping[tuple[str, str], str]] = {
    **{(" of a dataset or a collate", kind): _BY_DATA for kind in (TENSOR, NUMBER, TEXT, LENGTH, GENERATOR)},
    **{(" of a sampler", kind): _BY_SAMPLER for kind in (TENSOR, NUMBER, TEXT, LENGTH)},
    (" of a sampler", GENERATOR): "call it self.generator, if it is a torch.Generator: it is saved with the loader's position; or draw from the global streams",
    (" of a sampler", ORDER): "shuffle a copy in __iter__, or make it from the epoch and a seed, as with set_epoch(epoch); weights that follow the "
    "training: change them at the end of an epoch, and save them: extra={'name': (get, set)}",
}  # fmt: skip
_SAMPLER: Final = re.compile(r"loader(\[[^\[\]]*\])?\.(batch_)?sampler")


@final
@attrs.frozen
class Fact:
    """The finding of a look at one position of a run.

    Attributes:
        kind: one of the kinds above.
        value: a text that is equal for equal values: of a number, or the digest of a tensor.
        owner: the path of the object that holds it.
        shape: the shape of a tensor.
    """

    kind: str
    value: str
    owner: str = ""
    shape: tuple[int, ...] = ()


Facts: TypeAlias = Mapping[str, Fact]


def appeared(before: Facts, now: Facts) -> list[str]:
    """Return the paths of values that were absent, None or empty, and are there now.

    Examples:
        >>> appeared({"model.a": Fact(NOTHING, "None")}, {"model.a": Fact(NUMBER, "1"), "model.b": Fact(NOTHING, "None")})
        ['model.a']
    """
    return [path for path, fact in now.items() if fact.kind != NOTHING and _is_nothing(before.get(path))]


def changed(before: Facts, now: Facts) -> dict[str, Fact]:
    """Return the values that have changed and are not caches.

    A cache is filled on demand, and is a function of its inputs. So these are not changes:

    - a value that was absent, None or empty, and is there now; the next look sees whether it changes;
    - a tensor of another shape, such as one that grows with the longest sequence so far;
    - a number or a length that is a size of such a tensor in the same object.

    A tensor with a graph that the next forward reads is not a cache, and is a change as soon as it is there.

    Args:
        before: an earlier look.
        now: this look.

    Returns:
        Path -> the fact of this look.

    Examples:
        >>> before = {"model.p": Fact(NUMBER, "0.1"), "model.cache": Fact(NOTHING, "None"), "model.n": Fact(NUMBER, "4")}
        >>> now = {"model.p": Fact(NUMBER, "0.3"), "model.cache": Fact(TENSOR, "xxh3:1", shape=(9,)), "model.n": Fact(NUMBER, "9")}
        >>> list(changed(before, now))
        ['model.p']
    """
    found = {
        path: fact
        for path, fact in now.items()
        if fact.kind == CARRIED or (path in before and _differs(before[path], fact))
    }
    grown: dict[str, set[str]] = {}
    for path, fact in now.items():
        if fact.kind in _SIZED and (path not in before or before[path].shape != fact.shape):
            grown.setdefault(fact.owner, set()).update(map(str, fact.shape))
    return {
        path: fact
        for path, fact in found.items()
        if fact.kind not in (NUMBER, LENGTH) or fact.value not in grown.get(fact.owner, ())
    }


def _differs(before: Fact, now: Fact) -> bool:
    if before.value == now.value or now.kind in _CONSTANT or _is_nothing(before):
        return False
    return not (before.kind in _SIZED and now.kind in _SIZED and before.shape != now.shape)


def _is_nothing(fact: Fact | None) -> bool:
    return fact is None or fact.kind in _CONSTANT or (fact.kind, fact.value) in _EMPTY


def attribute_of(path: str) -> str:
    """Return the attribute that an entry of a container belongs to.

    Examples:
        >>> attribute_of("model.counts['cat'][3]"), attribute_of("model.blocks[0].p")
        ('model.counts', 'model.blocks[0].p')
    """
    return _PLACE.sub("", path)


def attributes_of(found: Mapping[str, Fact], *, accepted: Collection[str] = ()) -> dict[str, str]:
    """Return attribute -> its content, for each changed attribute that the script has not accepted.

    Args:
        found: the result of `changed`.
        accepted: attributes that need not be saved; each also covers everything inside it.

    Examples:
        >>> attributes_of({"model.log[0]": Fact(NUMBER, "1"), "model.p": Fact(NUMBER, "2")}, accepted=["model.log"])
        {'model.p': 'a number'}
    """
    named: dict[str, str] = {}
    for path, fact in found.items():
        if not any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in accepted):
            named.setdefault(path if fact.kind == GENERATOR else attribute_of(path), fact.kind)
    return named


def listed(named: Mapping[str, str]) -> dict[str, str]:
    """Return the entry for a manifest: the first attributes, and how many more there are.

    Examples:
        >>> listed({"model.p": "a number"})
        {'model.p': 'a number'}
    """
    first = dict(list(named.items())[:LISTED])
    return first if len(named) <= LISTED else {**first, "...": f"and {len(named) - LISTED} more"}


def hidden_state_text(named: Mapping[str, str], *, step: int) -> str:
    """Return the warning: each attribute by name, and how to save it.

    Args:
        named: attribute -> what it holds.
        step: the step at which it was found.

    Examples:
        >>> print(hidden_state_text({"model.drop.p": "a number"}, step=20))
        1 attribute changes with training and is saved by no component; a resume from step 20 would reset it:
          model.drop.p: a number
        To save a number: a buffer of a module; the state_dict() of its object; or extra={'name': (get, set)}, a function that returns it and one that restores it.
        What need not be saved, such as a log: attach(..., unsaved=['model.drop.p']).
    """
    several = "attributes change with training and are" if len(named) > 1 else "attribute changes with training and is"
    them = "them" if len(named) > 1 else "it"
    lines = [
        f"{len(named)} {several} saved by no component; a resume from step {step} would reset {them}:",
        *_lines(named),
        *_cures(named),
        f"What need not be saved, such as a log: attach(..., unsaved={list(named)[:1]}).",
    ]
    return "\n".join(lines)


def unsaved_of(contract: Mapping[str, object]) -> dict[str, str]:
    """Return the unsaved state that the contract of a checkpoint lists; empty for a malformed entry.

    Examples:
        >>> unsaved_of({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'model.p': 'a number'}
    """
    noted = contract.get(UNSAVED)
    return {str(path): str(what) for path, what in noted.items()} if isinstance(noted, Mapping) else {}


def not_restored(contract: Mapping[str, object], loaded: Collection[str]) -> dict[str, str]:
    """Return the unsaved state that a checkpoint lists, as far as it belongs to the loaded components.

    Args:
        contract: the contract of the checkpoint.
        loaded: the names of the components.

    Examples:
        >>> contract = {"unsaved": {"model.p": "a number", "loader.dataset.rng": "a random generator"}}
        >>> not_restored(contract, ["model", "trainer"])
        {'model.p': 'a number'}
    """
    return {path: what for path, what in unsaved_of(contract).items() if component_of(path) in (*loaded, "...")}


def not_restored_text(named: Mapping[str, str], *, checkpoint: str) -> str:
    """Return the warning for a resume from a checkpoint that lacks state.

    Args:
        named: attribute -> what it holds; not empty.
        checkpoint: the checkpoint that the run resumes from.

    Examples:
        >>> print(not_restored_text({"model.p": "a number"}, checkpoint="step-00000020"))
        step-00000020 lacks state that changes with training; it starts from the values of this script, unless the script restores it:
          model.p: a number
        To save a number: a buffer of a module; the state_dict() of its object; or extra={'name': (get, set)}, a function that returns it and one that restores it.
    """
    head = (
        f"{checkpoint} lacks state that changes with training; it starts from the values of this script, "
        "unless the script restores it:"
    )
    return "\n".join([head, *_lines(named), *_cures(named)])


def component_of(path: str) -> str:
    """Return the component that an attribute belongs to.

    Examples:
        >>> component_of("model.drop.p"), component_of("scheduler[0].n"), component_of("loader.dataset.rng")
        ('model', 'scheduler', 'dataset')
    """
    root = path if path == "..." else re.split(r"[.\[]", path, maxsplit=1)[0]
    return "dataset" if root == "loader" else root


def _cures(named: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of state, and for each place that needs another cure."""
    places = dict.fromkeys((_place_of(path, kind), kind) for path, kind in named.items())
    known = [(place, kind, _BY_PLACE.get((place, kind), _CURES.get(kind))) for place, kind in places]
    return [f"To save {kind}{place}: {cure}." for place, kind, cure in sorted(known, key=_in_order) if cure]


def _in_order(cure: tuple[str, str, str | None]) -> tuple[str, int]:
    kinds = list(_CURES)
    return cure[0], kinds.index(cure[1]) if cure[1] in kinds else len(kinds)


def _place_of(path: str, kind: str) -> str:
    place = (
        " of a sampler" if _SAMPLER.match(path) else " of a dataset or a collate" if path.startswith("loader") else ""
    )
    return place if (place, kind) in _BY_PLACE else ""


def _lines(named: Mapping[str, str]) -> list[str]:
    lines = [f"  {path}: {what}" for path, what in list(named.items())[:SHOWN]]
    return lines if len(named) <= SHOWN else [*lines, f"  and {len(named) - SHOWN} more"]
