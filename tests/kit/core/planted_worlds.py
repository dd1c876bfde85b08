"""A model of training into which one cause is planted, and what two such runs leave: logs, saved states, and replays."""

from collections.abc import Callable
from hashlib import sha256

import attrs

from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.known_states import SavedState, of_states
from trainfold.core.flight.causes.known_steps import of_steps
from trainfold.core.flight.flight import Flight, flight_of
from trainfold.core.flight.step_difference import first_step_apart
from trainfold.core.flight.step_record import StateDigest, StepRecord

STEPS = 8
STREAMS = ("torch", "numpy", "noise")


@attrs.frozen
class Program:
    """What both runs do: whether they draw, from which stream, and whether results depend on it and on a buffer; ``strays`` are streams that begin elsewhere in each run."""

    draws: tuple[str, ...] = ("torch",)
    shuffles: bool = True
    uses_buffer: bool = True
    strays: tuple[str, ...] = ()
    other_threads: bool = False  # recorded, and without an effect
    unsaves_buffer: bool = False  # no checkpoint has it; each lists it
    rates_follow: bool = False  # those of another optimizer, from the loss


@attrs.frozen
class Plant:
    """One cause in one run, from a step on; ``kind`` says how."""

    cause: str
    at: int = 1
    kind: str = ""


def digest(*parts: object) -> bytes:
    return sha256(repr(parts).encode()).digest()


@attrs.frozen
class Ran:
    """What a run did: the steps, the digests of its states, and all of its saved states."""

    records: dict[int, StepRecord]
    digests: dict[int, tuple[StateDigest, ...]]
    saved: dict[int, SavedState]


def run(program: Program, plant: Plant | None, *, is_second: bool) -> Ran:
    """Train for some steps, as the plant has it."""
    cause, kind = ("", "") if plant is None else (plant.cause, plant.kind)

    def planted(name: str, step: int, *kinds: str) -> bool:
        return plant is not None and cause == name and step == plant.at and (not kinds or kind in kinds)

    seeds = {
        name: int(cause == "seed" and kind == name) + 2 * (is_second and name in program.strays) for name in STREAMS
    }
    counts = dict.fromkeys(STREAMS, 0)
    weights, flips, buffer, grads, rate, position, kernel, threads = digest("w"), 0, digest("b"), digest(), 1, 0, 0, 0
    if cause == "seed" and kind == "torch":
        weights = digest("w", seeds["torch"]) if program.shuffles else weights
    began, updates = ["1"], 0
    settings = {"lr": "2" if cause == "setting" and kind == "contract" else "1"}
    rate = int(settings["lr"])
    threads_shown = 1 + (cause == "environment" or (program.other_threads and is_second))
    records, digests, saved = {}, {}, {}
    for step in range(1, STEPS + 1):
        position += 4 if planted("position", step) else 0
        counts["torch"] += planted("streams", step, "torch")
        counts["numpy"] += planted("streams", step, "numpy")
        counts["noise"] += planted("streams", step, "noise")
        flips += planted("bit", step, "before")
        buffer = digest() if planted("buffer", step, "before") else buffer
        kernel += planted("arithmetic", step)
        threads += planted("environment", step)
        batch = digest("batch", position, seeds["torch"] if program.shuffles else 0, planted("batch", step))
        drawn = [(name, seeds[name], counts[name]) for name in program.draws]
        for name in program.draws:
            counts[name] += 1
        loss = digest(
            weights,
            flips,
            buffer if program.uses_buffer else "",
            batch,
            drawn,
            kernel,
            threads,
            planted("chance", step),
        )
        grads = digest(grads, loss)
        if planted("setting", step, "loop"):
            rate = 2
        used = 2 if planted("setting", step, "once", "put back") else rate
        if program.rates_follow or planted("setting", step, "put back"):
            began = [*began, loss.hex()][:3]
        if cause == "component":
            used = step  # a schedule that the other run has not
        is_done = not planted("update", step)
        updates += is_done
        weights, flips = digest(weights, flips, loss, used) if is_done else weights, int(planted("bit", step, "after"))
        buffer = digest() if planted("buffer", step, "after") else digest(buffer, batch)
        position += 4
        host = digest("numpy", seeds["numpy"], counts["numpy"])[:4]
        torch = digest("torch", seeds["torch"], counts["torch"])[:8]
        records[step] = StepRecord(step, 0, position, loss[:8], grads[:8], batch[:8], torch, host, is_whole=True)
        if planted("streams", step, "evaluation", "evaluation with a buffer"):
            counts["torch"] += 1  # after the line of the step, and before its state is saved
            buffer = digest() if kind == "evaluation with a buffer" else buffer
            torch = digest("torch", seeds["torch"], counts["torch"])[:8]
        of_model, of_optimizer = (
            digest(weights, flips, b"" if program.unsaves_buffer else buffer),
            digest(grads, rate, updates),
        )
        digests[step] = (StateDigest(step, "model", of_model[:16]), StateDigest(step, "optimizer", of_optimizer[:16]))
        leaves = {
            "model.params['w']": weights.hex() + str(flips),
            **({} if program.unsaves_buffer else {"model.buffers['n']": buffer.hex()}),
            "optimizer.slots['w']": grads.hex(),
            "optimizer.slots['w']['step']": str(updates),
            "optimizer.groups[0].hyper['lr']": str(rate),
            "dataset.value['samples']": str(position),
            "dataset.value['order']": str(seeds["torch"]) if program.shuffles else "",
            "rng.value['seed']": str(seeds["torch"]),
            "rng.value['torch']": torch.hex(),
            "rng.value['numpy']": host.hex(),
            "noise.value['kind']": "generator",
            "noise.value['state']": f"{seeds['noise']} {counts['noise']}",
        }
        names = {"model", "optimizer", "rng", "dataset", "noise", *(["scheduler"] if cause == "component" else [])}
        unsaved = ("n",) if program.unsaves_buffer else ()
        rates = {"first rates of other.param_groups[0]": str(began)} if len(began) > 1 else {}
        saved[step] = SavedState(step, leaves, settings, {"threads": str(threads_shown)}, frozenset(names), unsaved=unsaved, rates=rates)  # fmt: skip
    return Ran(records, digests, saved)


@attrs.frozen
class Kept:
    """What of it is there to be seen in both runs, or in one of them.

    Attributes:
        fields: of each record.
        lines: the steps of which each has one.
        states: with digests of states.
        saved: the steps of the checkpoints of each.
        leaves: whether a leaf is saved.
        has_environment: whether it is recorded.
        elements: how many elements of a leaf differ, if it does.
        has_whole_digests: whether the digest of a batch covers every byte; if not, that of another batch may be the same.
        unrecorded: the steps of whose batches the second log alone has no digest.
    """

    fields: frozenset[str] = frozenset({"loss", "norm", "batch", "streams", "host_streams"})
    lines: tuple[frozenset[int], frozenset[int]] = (frozenset(range(1, STEPS + 1)),) * 2
    states: frozenset[int] = frozenset(range(1, STEPS + 1))
    saved: tuple[frozenset[int], frozenset[int]] = (frozenset(range(1, STEPS + 1)),) * 2
    leaves: Callable[[str], bool] = lambda _: True
    has_environment: bool = True
    elements: int = 9
    has_whole_digests: bool = True
    unrecorded: frozenset[int] = frozenset()


def evidence(ran: tuple[Ran, Ran], kept: Kept) -> Evidence:
    """What is known of two runs by what is kept of them."""
    logs = logs_of(ran, kept)
    saved = [
        {at: _saved(each.saved[at], kept) for at in sorted(steps)} for each, steps in zip(ran, kept.saved, strict=True)
    ]
    found = first_step_apart(*logs)
    known = Evidence()
    if all(saved):
        first = tuple(next(iter(each.values())) for each in saved)
        pairs = [(saved[0][at], saved[1][at]) for at in sorted(saved[0].keys() & saved[1].keys())]
        known = of_states(first, pairs, None if found is None else found.step)
        sizes = {True: 1.0, False: None}
        known = attrs.evolve(known, leaves=tuple(attrs.evolve(leaf, differing=kept.elements, size=sizes[leaf.path.endswith("['step']")]) for leaf in known.leaves))  # fmt: skip
    known = attrs.evolve(known, difference=found)
    return of_steps(*({0: log} if log.steps else {} for log in logs), known)


def logs_of(ran: tuple[Ran, Ran], kept: Kept) -> list[Flight]:
    """The logs of two runs, as far as they are kept."""
    unrecorded = frozenset[int](), kept.unrecorded
    return [_log(each, kept, *of) for each, of in zip(ran, zip(kept.lines, unrecorded, strict=True), strict=True)]


def _log(ran: Ran, kept: Kept, lines: frozenset[int], unrecorded: frozenset[int]) -> Flight:
    hidden: dict[str, object] = {
        name: None for name in ("loss", "norm", "batch", "streams", "host_streams") if name not in kept.fields
    }
    if not kept.has_whole_digests and "batch" in kept.fields:
        hidden = {**hidden, "batch": bytes(8), "is_whole": False}
    steps = [attrs.evolve(record, **hidden) for step, record in ran.records.items() if step in lines]
    steps = [attrs.evolve(each, batch=None, is_whole=False) if each.step in unrecorded else each for each in steps]
    return flight_of([*steps, *(line for step in lines & kept.states for line in ran.digests[step])])


def _saved(state: SavedState, kept: Kept) -> SavedState:
    leaves = {path: text for path, text in state.leaves.items() if kept.leaves(path)}
    environment = state.environment if kept.has_environment else {}
    has = [any(path.startswith(name) for path in leaves) for name in ("model", "optimizer")]
    return attrs.evolve(state, leaves=leaves, environment=environment, is_partial=not all(has))
