"""`Stretch`: what one process of a run did, from its start to its end; and the first difference between two of them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import attrs

from trainfold.core.rehearsal.entry import RecordedLine
from trainfold.core.rehearsal.number import relative_difference

ABSENT: Final = "absent"
_SEEDED: Final = (
    "python",
    "numpy",
)  # streams that start anywhere unless they are seeded; those of torch start with a constant
Texts = tuple[str, ...]


@final
@attrs.frozen
class SavedStep:
    """A checkpoint as its manifest describes it.

    Attributes:
        components: component -> fingerprint.
        leaves: leaf path -> its kind and digest, or its value.
    """

    components: Mapping[str, str]
    leaves: Mapping[str, str]


@final
@attrs.frozen
class Stretch:
    """What one process of a run did.

    Attributes:
        number: which start of the run it is, from 1.
        resumed_at: the step of the checkpoint that it resumed from; 0 for a fresh start.
        is_resumed: whether it resumed from a checkpoint.
        is_cut: whether it was killed, so that it may end anywhere.
        last_step: the last optimizer step that it counted.
        values: step -> name of a recorded value -> its texts, in the order in which they were recorded.
        saved: (manager, step) -> the checkpoint.
    """

    number: int
    resumed_at: int
    is_resumed: bool
    is_cut: bool
    last_step: int
    values: Mapping[int, Mapping[str, Texts]]
    saved: Mapping[tuple[str, int], SavedStep]


@final
@attrs.frozen
class RunDifference:
    """One difference between a process and the run that it is compared with.

    Attributes:
        step: for a value, the optimizer step that was under way; for a component, the last one done.
        kind: ``value``, ``component`` or ``end``.
        name: of the value or component.
        expected: what the other run has.
        found: what this process has.
        leaves: of a component: (leaf, expected, found) of each leaf that differs.
        number: which start the process is.
        resumed_at: the step that it resumed from.
    """

    step: int
    kind: str
    name: str
    expected: str
    found: str
    number: int
    resumed_at: int
    leaves: tuple[tuple[str, str, str], ...] = ()


@final
@attrs.frozen
class Restless:
    """The differences between two runs of a program although both train the same.

    Attributes:
        streams: the prefix of the paths of a stream's leaves -> the name of the stream, which the program does not seed.
        values: names of recorded values that the training does not depend on, such as a time.
    """

    streams: Mapping[str, str]
    values: frozenset[str]

    @property
    def paths(self) -> tuple[str, ...]:
        """The prefixes of the paths of leaves that are not compared."""
        return tuple(self.streams)


NOTHING: Final = Restless({}, frozenset())


def stretch_of(
    entries: Iterable[RecordedLine], saved: Mapping[tuple[str, int], SavedStep], *, number: int, is_cut: bool
) -> Stretch:
    """What a process did, from its record.

    Examples:
        >>> record = [RecordedLine("start", 5, 1, 0.0, {"resumed_from": "step-00000005"}),
        ...           RecordedLine("values", 6, 1, 0.1, {"values": {"loss": "0x1p-1"}}), RecordedLine("step", 6, 1, 0.2)]
        >>> found = stretch_of(record, {}, number=2, is_cut=True)
        >>> found.resumed_at, found.last_step, found.values
        (5, 6, {6: {'loss': ('0x1p-1',)}})
    """
    resumed, last = None, 0
    values: dict[int, dict[str, Texts]] = {}
    for entry in entries:
        if entry.kind == "start" and entry.data.get("resumed_from") is not None and resumed is None:
            resumed = entry.step
        elif entry.kind == "values":
            of_step = values.setdefault(entry.step, {})
            for name, text in entry.data["values"].items():
                of_step[name] = (*of_step.get(name, ()), text)
        elif entry.kind in ("step", "saved"):
            if entry.kind == "step" and not last and resumed is None and entry.step > 1:
                resumed = entry.step - 1  # without a manager
            last = max(last, entry.step)
    at = resumed or 0
    return Stretch(number, at, resumed is not None, is_cut, max(last, at), values, saved)


def differences(one: Stretch, other: Stretch, *, leaving_out: Restless = NOTHING) -> tuple[RunDifference, ...]:
    """Every difference between a process and a whole run, in the order of events.

    Only what both can have is compared: steps that the process did itself, and checkpoints that both have. The first
    step after a resume and the last one before a kill may have only some of their values.

    Args:
        one: the whole run.
        other: the process.
        leaving_out: what is not compared.
    """
    values = [each for each in _of_values(one, other) if each.name not in leaving_out.values]
    found = [*values, *_of_components(one, other, leaving_out.paths)]
    went_on = not one.is_cut and other.last_step > one.last_step
    stopped = not other.is_cut and other.last_step < one.last_step
    if went_on or stopped:
        end = min(one.last_step, other.last_step)
        here = (other.number, other.resumed_at)
        found = [each for each in found if each.step <= end]  # later ones only follow from the different end
        found.append(RunDifference(end, "end", "number of steps", f"{one.last_step}", f"{other.last_step}", *here))
    order = {"component": 0, "value": 1, "end": 2}
    # a component of step k is saved before the values of step k + 1 are recorded
    return tuple(sorted(found, key=lambda each: (each.step - (each.kind == "value"), order[each.kind])))


def restless_parts(noise: Sequence[RunDifference]) -> Restless | None:
    """The parts of a program that do not repeat, provided that everything trained does.

    A recorded value is one of them if no component differs: its cause has not reached the training.

    Args:
        noise: what differs between two runs that were not killed.

    Returns:
        The parts; None if anything else differs, because then the program does not repeat itself.

    Examples:
        >>> words = ("rng.value['python']['words']", "a", "b")
        >>> stream, secs = RunDifference(5, "component", "rng", "a", "b", 1, 0, (words,)), RunDifference(5, "value", "secs", "a", "b", 1, 0)
        >>> found = restless_parts([secs, stream])
        >>> found.streams, sorted(found.values)
        ({"rng.value['python']": 'python'}, ['secs'])
        >>> restless_parts([secs, RunDifference(5, "component", "model", "a", "b", 1, 0)]) is None
        True
    """
    found: dict[str, str] = {}
    for each in noise:
        if each.kind == "value":
            continue
        if each.kind != "component" or each.name not in ("rng", "dataset") or not each.leaves:
            return None
        for path, *_ in each.leaves:
            stream = next((name for name in _SEEDED if f"['{name}']" in path), None)
            if stream is None:
                return None
            found[path[: path.index(f"['{stream}']") + len(f"['{stream}']")]] = stream
    return Restless(found, frozenset(each.name for each in noise if each.kind == "value"))


def compared(one: Stretch, other: Stretch, *, leaving_out: Restless = NOTHING) -> tuple[int, int]:
    """How many checkpoints and how many values of a process were compared with a whole run."""
    shared = [values for step, values in other.values.items() if step in one.values]
    texts = [texts for values in shared for name, texts in values.items() if name not in leaving_out.values]
    return len(one.saved.keys() & other.saved.keys()), sum(map(len, texts))


def _of_values(one: Stretch, other: Stretch) -> Iterable[RunDifference]:
    last_of_one, last = max(one.values, default=0), max(other.values, default=0)
    end = min([last_of_one] * one.is_cut + [last] * other.is_cut, default=max(last_of_one, last))
    for step in sorted({*one.values, *other.values}):
        if not other.resumed_at < step <= end:
            continue
        mine, theirs = one.values.get(step, {}), other.values.get(step, {})
        for name in {**mine, **theirs}:
            expected, found = mine.get(name, ()), theirs.get(name, ())
            is_first = step == other.resumed_at + 1
            is_torn = (step == last and other.is_cut) or (step == last_of_one and one.is_cut)
            expected, found = _aligned(expected, found, is_first=is_first, is_torn=is_torn)
            for a, b in itertools.zip_longest(expected, found, fillvalue=ABSENT):
                if a != b:
                    yield RunDifference(step, "value", name, a, b, other.number, other.resumed_at)
                    break


def _of_components(one: Stretch, other: Stretch, leaving_out: tuple[str, ...]) -> Iterable[RunDifference]:
    for key in sorted(one.saved.keys() & other.saved.keys(), key=lambda key: (key[1], key[0])):
        mine, theirs = one.saved[key], other.saved[key]
        for name in {**mine.components, **theirs.components}:
            expected, found = mine.components.get(name, ABSENT), theirs.components.get(name, ABSENT)
            if expected == found:
                continue
            here = {path: None for path in (*mine.leaves, *theirs.leaves) if _belongs(path, name)}
            pairs = ((path, mine.leaves.get(path, ABSENT), theirs.leaves.get(path, ABSENT)) for path in here)
            unlike = tuple(pair for pair in pairs if pair[1] != pair[2])
            leaves = tuple(pair for pair in unlike if not pair[0].startswith(leaving_out))
            if unlike and not leaves:
                continue
            yield RunDifference(key[1], "component", name, expected, found, other.number, other.resumed_at, leaves)


def _belongs(path: str, component: str) -> bool:
    rest = path.removeprefix(component)
    return path.startswith(component) and not (rest[:1].isalnum() or rest.startswith("_"))


def _aligned(expected: Texts, found: Texts, *, is_first: bool, is_torn: bool) -> tuple[Texts, Texts]:
    """The parts of the values of a step that both processes should have.

    Args:
        expected: those of the whole run.
        found: those of the process.
        is_first: whether it is the first step after a resume: values recorded after the count of the step before it were
            recorded before the save.
        is_torn: whether one of the processes died in this step.
    """
    length = min(len(expected), len(found))
    if is_first and is_torn:
        starts = range(len(expected) - len(found) + 1)
        return (found, found) if any(expected[at : at + len(found)] == found for at in starts) else (expected[:length], found[:length])  # fmt: skip
    if is_torn:
        return expected[:length], found[:length]
    return (_tail(expected, len(found)), found) if is_first else (expected, found)


def _tail(texts: Texts, length: int) -> Texts:
    return texts[max(0, len(texts) - length) :]


@final
@attrs.frozen
class Again:
    """A value that a resumed process computed again, next to the value that the killed process had computed before.

    Attributes:
        step: the step.
        name: of the value.
        before: the value of the killed process.
        after: the value of the resumed process.
        apart: how far apart they are, relative to the larger one.
        number: which start the resumed process is.
    """

    step: int
    name: str
    before: str
    after: str
    apart: float
    number: int


def computed_again(stretches: Sequence[Stretch]) -> tuple[Again, ...]:
    """Every value that two processes of one killed run have, in order: the killed one had trained past its checkpoint.

    Examples:
        >>> killed = Stretch(1, 0, False, True, 3, {3: {"loss": ("0x1p+0",)}}, {})
        >>> resumed = Stretch(2, 2, True, False, 4, {3: {"loss": ("0x1.8p+0",)}, 4: {"loss": ("0x1p+1",)}}, {})
        >>> [(each.step, round(each.apart, 3)) for each in computed_again([killed, resumed])]
        [(3, 0.333)]
    """
    found: list[Again] = []
    latest: dict[int, Mapping[str, Texts]] = {}
    for stretch in stretches:
        for step, values in sorted(stretch.values.items()):
            if stretch.is_resumed:
                for name, texts in values.items():
                    before = latest.get(step, {}).get(name, ())
                    before = _tail(before, len(texts)) if step == stretch.resumed_at + 1 else before
                    pairs = zip(before, texts, strict=False)
                    found.extend(Again(step, name, a, b, relative_difference(a, b), stretch.number) for a, b in pairs)
            latest[step] = values
    return tuple(found)
