"""The laws, as functions that a user calls on their own step, state and store; each raises `LawBroken` at the first leaf.

Every law works on copies: the caller's state is unchanged afterwards, also with a donating step.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.protocol import Store
from trainfold.core import tree
from trainfold.core.data.cursor import DataCursor
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import InvalidArgument, ResumeRefused, StateDonated
from trainfold.core.format.codec import is_tensor_leaf, leaf_digest
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.components import components_of, merge, select
from trainfold.core.state.fqn import named_tensors
from trainfold.core.state.state import OptimizerState, Progress, TrainState
from trainfold.properties.differences import (
    LawBroken,
    check_same,
    clone,
    first_beyond,
    first_difference,
    tensor_difference,
)
from trainfold.properties.metrics.metric_laws import batch_invariant
from trainfold.properties.resume_law import Step, detour, made_by, resumes_exactly, try_step
from trainfold.properties.traces import module_facts, random_states

__all__ = [
    "LawBroken",
    "accumulates",
    "batch_invariant",
    "check_same",
    "clone",
    "donates_equally",
    "equals_mutable",
    "first_difference",
    "is_pure",
    "leaves_no_trace",
    "made_by",
    "reads_each_sample_once",
    "resumes_exactly",
    "round_trips",
    "selects",
    "survives_crashes",
]

Tensors: TypeAlias = Mapping[str, torch.Tensor] | torch.nn.Module


def is_pure(step: Step, state: TrainState, batch: Any) -> None:
    """Purity: a step changes no bit of its input, the batch or the global random states, and does the same twice.

    The random states are torch's, numpy's and Python's. A detour finds what a step keeps outside of the state: the next step
    runs, then some steps from another state, then the next step again; eight steps in all. With one batch this cannot find
    what a step keeps of its batches alone; `resumes_exactly` can.

    Args:
        step: a step that does not donate.
        state: any state.
        batch: any batch.

    Raises:
        LawBroken: naming the first leaf that changed.
    """
    before, data, noise = clone(state), copy.deepcopy(batch), random_states()
    first, _ = step(state, batch)
    kept = clone(first)
    check_same("purity", before, state, "the step changed its input")
    _check_random_states("purity", noise, "the step moved the global random state")
    _check_same_batch(data, batch)
    second, _ = step(state, batch)
    check_same("purity", kept, second, "the same step gave another result the second time")
    check_same("purity", kept, first, "the second step changed the result of the first")
    then = try_step(step, kept, batch)
    with suppress(Exception):  # a next step, or one from another state, need not be possible
        detour(step, state, [batch] * 3)
    again = "gave another result the second time, after others in between"
    if then is not None:
        check_same("purity", then, step(clone(kept), batch)[0], f"the step after this one {again}")
    check_same("purity", kept, step(clone(state), batch)[0], f"the same step {again}")


def donates_equally(step: Step, donating: Step, state: TrainState, batches: Sequence[Any]) -> None:
    """Donation: a donating step gives the same bits as one that does not donate, at every step of a run; and it does donate.

    Afterwards its input state is dead: reading a leaf of it raises `StateDonated`. A state without `Leaves`, which cannot be
    dead, was donated if the next state is in its storage; a state without tensors has nothing to donate.

    Raises:
        LawBroken: naming the first leaf that differs, and the step; or a state that was not donated.
    """
    kept, given = clone(state), clone(state)
    for i, batch in enumerate(batches):
        kept, _ = step(kept, batch)
        places, before = _storages(given), given
        given, _ = donating(given, batch)
        check_same("donation", kept, given, f"after step {i + 1}")
        has_leaves = before.model is not None or isinstance(before.optimizer, OptimizerState)
        if not _is_dead(before) and places and (has_leaves or not places & _storages(given)):
            raise LawBroken("donation", "state", f"the input state of step {i + 1} is still alive")


def equals_mutable(step: Step, state: TrainState, loop: Callable[[Any], Tensors], batches: Sequence[Any]) -> None:
    """Mutable equivalence: k pure steps have the parameters of k steps of a hand-written loop, bit for bit.

    Args:
        step: any step.
        state: the state that equals the loop's start.
        loop: does one optimizer step of the mutable loop with a batch, and returns its module; or FQN -> tensor, with every
            parameter, and with buffers if they are to be compared.
        batches: the batches.

    Raises:
        LawBroken: naming the first tensor that differs, that the loop did not return, or that the state does not have; and
            the step.
    """
    now = clone(state)
    for i, batch in enumerate(batches):
        now, _ = step(now, batch)
        theirs = _by_name(loop(batch))
        mine = _by_name(now)
        ties = dict(now.model.ties) if now.model is not None else {}
        params = now.model.params if now.model is not None else {}
        for name in [*params, *(name for name in theirs if name not in params)]:
            part = "params" if name in params or name in ties else "buffers"
            leaf, own = f"model.{part}[{name!r}]", ties.get(name, name)
            if own not in mine or name not in theirs:
                lacks = "the loop did not return it" if own in mine else "the loop returned it, and the state has none"
                raise LawBroken("mutable equivalence", leaf, f"{lacks}; after step {i + 1}")
            if first := tensor_difference(mine[own], theirs[name].detach()):
                raise LawBroken("mutable equivalence", leaf, f"{first}; after step {i + 1}")


def accumulates(steps: Sequence[Step], state: TrainState, batch: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Accumulation: steps that split a batch differently give the same parameters, optimizer and counters.

    Buffers may differ, because the statistics of a BatchNorm depend on the microbatches.

    Args:
        steps: two or more steps that differ only in the split; the others are compared with the first.
        state: any state with a model.
        batch: the whole batch.
        rtol: relative tolerance of the parameters and the optimizer; 0 requires equal bits, which holds if the sums are
            representable. The counters of the trainer are always compared exactly.
        atol: absolute tolerance of the same.

    Raises:
        InvalidArgument: if there is nothing to compare: fewer than two steps, or no model.
        LawBroken: naming the first leaf that differs, or that only one of two states has, and the split.
    """
    if len(steps) < 2:
        raise InvalidArgument(
            "accumulates.steps",
            expected="two or more",
            found=len(steps),
            fix="pass a step for each split, such as 1 and 4",
        )
    if state.model is None:
        raise InvalidArgument(
            "accumulates.state",
            expected="a model",
            found="none",
            fix="make the state with `init_state`, or add a model to it",
        )
    reference, *others = (step(clone(state), batch)[0] for step in steps)
    for i, other in enumerate(others, start=1):
        for components, tolerances in (
            (("model.params", "optimizer"), {"rtol": rtol, "atol": atol}),
            (("trainer",), {}),
        ):
            found = first_beyond(reference, other, components, **tolerances)
            if found is not None:
                raise LawBroken("accumulation", found[0], f"{found[1]}; split {i}")


def round_trips(state: TrainState, *, store: Store | Callable[[], Store] = MemoryStore) -> None:
    """Round trip: ``load(save(s)) == s`` for every bit of every leaf, and tied leaves are tied again.

    Raises:
        LawBroken: naming the first leaf that differs.
    """
    place = store() if callable(store) else store
    before = clone(state)
    save(state, place)
    check_same("round trip", before, state, "saving changed the state")
    loaded = load(place, like=state)
    check_same("round trip", state, loaded, "after load(save(state))")
    if [type(leaf) for leaf in tree.leaves(state)] != [type(leaf) for leaf in tree.leaves(loaded)]:
        raise LawBroken("round trip", "state", "a leaf came back as another type")
    if tree.structure(components_of(state)) != tree.structure(components_of(loaded)):
        raise LawBroken("round trip", "state", "the tree came back with another structure")


def selects(state: TrainState, components: Sequence[str]) -> None:
    """Selection: ``select`` partitions, and merging the parts gives the whole.

    Raises:
        LawBroken: if a component is in both parts or in neither, or a leaf differs.
    """
    rest = [name for name in components_of(state) if name not in components]
    one, other = select(state, components), select(state, rest)
    shared = set(components_of(one)) & set(components_of(other))
    if shared:
        raise LawBroken("selection", min(shared), "is in both parts")
    check_same("selection", state, merge(one, other), f"merging {list(components)} with the rest")
    check_same("selection", state, merge(other, one), f"merging the rest with {list(components)}")


def reads_each_sample_once(cursor: DataCursor, plan: Sequence[tuple[int, int]]) -> None:
    """Cursor: however world and batch sizes change, an epoch reads each sample exactly once.

    Args:
        cursor: at the start of an epoch.
        plan: (world size, global batch size) pairs, used in turn, again and again, until the epoch ends.

    Raises:
        LawBroken: naming a sample that is missing or read twice.
    """
    epoch, seen, turn = cursor.epoch, [0] * cursor.length, 0
    while cursor.epoch == epoch:
        world_size, size = plan[turn % len(plan)]
        indices = [int(index) for index in cursor.batch(size)]
        for rank in range(world_size):
            for index in shard_of(indices, rank, world_size):
                seen[index] += 1
        cursor, turn = cursor.advance(len(indices)), turn + 1
    wrong = [index for index, count in enumerate(seen) if count != 1]
    if wrong:
        raise LawBroken("cursor", f"sample {wrong[0]}", f"read {seen[wrong[0]]} times in epoch {epoch}")


def survives_crashes(states: Sequence[TrainState]) -> int:
    """Crash: on every disk that a crash may leave, a load finds the newest acknowledged checkpoint or a newer whole one.

    This saves the states one after the other into a `MemoryStore` that logs its effects. Then it takes every prefix of these
    effects, with and without what was not synced, and with the last write torn, loads there, and saves once more.

    Args:
        states: states with ascending steps.

    Returns:
        How many disks were checked.

    Raises:
        LawBroken: naming the effect after which the promise was broken.
    """
    store = MemoryStore()
    acknowledged: list[tuple[int, TrainState]] = []
    for state in states:
        save(state, store)
        acknowledged.append((len(store.effects), state))
    by_step: dict[int, list[Mapping[str, str]]] = defaultdict(list)
    for state in states:
        by_step[state.trainer.step if state.trainer is not None else -1].append(fingerprint(state))
    disks = 0
    for done in range(len(store.effects) + 1):
        promised = max((s.trainer.step for count, s in acknowledged if count <= done and s.trainer), default=None)
        for keep in (True, False):
            for torn in (True, False):
                disk = store.after_crash(done, keep_unsynced=keep, torn_write=torn)
                _recover(disk, states[-1], promised, by_step, f"after effect {done} (kept {keep}, torn {torn})")
                disks += 1
    return disks


def leaves_no_trace(
    state: TrainState | Callable[[], TrainState],
    *,
    store: Store | Callable[[], Store] = MemoryStore,
    model: torch.nn.Module | None = None,
) -> None:
    """Side-effect freedom: saving and loading leave the state and the global random states as they were.

    Args:
        state: a state; or a function that captures one from live objects, such as ``live.capture``, which must not leave a trace either.
        store: where to save, or a function that makes an empty place.
        model: the live module, if there is one: its parameters, buffers, gradients, ``requires_grad`` and modes are compared.

    Raises:
        LawBroken: naming what changed.

    Examples:
        >>> from trainfold import Progress
        >>> leaves_no_trace(TrainState(trainer=Progress()), model=torch.nn.Dropout())
    """
    law, place = "side-effect freedom", store() if callable(store) else store
    noise, module = random_states(), {} if model is None else module_facts(model)
    captured = state() if callable(state) else state
    before = clone(captured)
    save(captured, place)
    load(place, like=captured)
    check_same(law, before, captured, "after a save and a load")
    _check_random_states(law, noise, "a save or a load moved the global random state")
    now = {} if model is None else module_facts(model)
    for leaf in [*module, *(leaf for leaf in now if leaf not in module)]:
        one, other = module.get(leaf), now.get(leaf)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if first := tensor_difference(one, other):
                raise LawBroken(law, leaf, f"{first}; after a save and a load")
        elif one is not other:
            raise LawBroken(law, leaf, f"{_shown(one)} against {_shown(other)}; after a save and a load")


def _recover(
    disk: MemoryStore, like: TrainState, promised: int | None, by_step: Mapping[int, list[Mapping[str, str]]], when: str
) -> None:
    try:
        found = _load_quietly(disk, like)
    except ResumeRefused as error:
        if promised is not None:
            raise LawBroken("crash", when, f"step {promised} was acknowledged, and now: {error}") from error
    else:
        step = found.trainer.step if found.trainer is not None else -1
        if promised is not None and step < promised:
            raise LawBroken("crash", when, f"step {promised} was acknowledged, and step {step} was found")
        if fingerprint(found) not in by_step.get(step, []):
            raise LawBroken("crash", when, f"step {step} was found with other bits than were saved")
    again = like.evolve(trainer=Progress(like.trainer.step + 1 if like.trainer is not None else 0))
    save(again, disk)
    if fingerprint(_load_quietly(disk, like)) != fingerprint(again):
        raise LawBroken("crash", when, "a save after the recovery is not found")


def _load_quietly(disk: MemoryStore, like: TrainState) -> TrainState:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)  # a torn directory is what a crash is expected to leave
        return load(disk, like=like)


def _check_random_states(law: str, before: Mapping[str, Any], broken: str) -> None:
    for library, now in random_states().items():
        if before[library] != now:
            raise LawBroken(law, library, broken)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _by_name(tensors: Tensors | TrainState) -> dict[str, torch.Tensor]:
    """Name -> parameter or buffer, of a module, a state or a mapping."""
    if isinstance(tensors, torch.nn.Module):
        named = named_tensors(tensors)
        return {**named.params, **named.buffers}
    if isinstance(tensors, TrainState):
        return {**tensors.model.params, **tensors.model.buffers} if tensors.model is not None else {}
    return dict(tensors)


def _storages(state: TrainState) -> set[int]:
    leaves = [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}


def _is_dead(state: TrainState) -> bool:
    try:
        tree.leaves(state)
    except StateDonated:
        return True
    return False


def _check_same_batch(before: Any, after: Any) -> None:
    for (path, one), (_, other) in zip(
        tree.named_leaves(before, "batch"), tree.named_leaves(after, "batch"), strict=True
    ):
        if is_tensor_leaf(one) and leaf_digest(one) != leaf_digest(other):
            raise LawBroken("purity", path, "the step changed its batch")
