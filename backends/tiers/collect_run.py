"""`plan_collect` and `collect_run`: put a run together whose files lie in folders of several nodes; complete checkpoints only."""

from collections.abc import Callable, Sequence

import attrs

from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.protocol import Store
from trainfold.backends.tiers.carried_copy import carried_out
from trainfold.backends.tiers.compare_runs import Steps, planned_copy, unless_empty
from trainfold.backends.tiers.node_folders import NodeFolders
from trainfold.core.errors import CheckpointDamaged, InvalidArgument, TrainfoldError
from trainfold.core.format.file_names import step_of
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.json_values import shown


def plan_collect(nodes: Sequence[Run], target: Run, *, steps: Steps = "all") -> CopyPlan:
    """Plan to put a run together: reads manifests and sizes, and writes nothing.

    Args:
        nodes: the folders, each with some files of the run under the names that they have in it. Of each checkpoint one has the manifest.
        target: where the checkpoints go: a place for a new run, or one that holds the same run; it may be one of the nodes.
        steps: ``"all"`` for each complete checkpoint, ``"newest"``, or the steps.

    Returns:
        What is done, and what each incomplete checkpoint lacks. It prints.

    Raises:
        InvalidArgument: for an invalid argument.
        CheckpointError: the matching subclass, if a folder has nothing, or files of another run, or none has the ``run.json``.

    Examples:
        >>> from trainfold import Progress, TrainState, save
        >>> from trainfold.stores import MemoryStore
        >>> run, other = MemoryStore(), MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=1)), run)
        >>> other.write("step-00000002/notes.txt", [b"1"], size_bytes=1)
        >>> plan = plan_collect([run, other], MemoryStore())
        >>> [each.name for each in plan.checkpoints], dict(plan.left_out)
        (['step-00000001'], {'step-00000002': 'incomplete: lacks manifest.json, whole, in any of the folders'})
    """
    folders, store = _opened(nodes, target)
    return _planned(folders, store, steps)


def collect_run(
    nodes: Sequence[Run], target: Run, *, steps: Steps = "all", advance: Callable[[int], object] = lambda _: None
) -> CopyPlan:
    """Put a run together whose files lie in folders of several nodes, such as copies of their disks.

    A checkpoint is there when each file that its manifest names was found in some folder, with its size and its digest: by one commit, as in `copy_run`. A collection that was cut off, or killed, is
    continued by the same call. A file that proves damaged is taken from the next folder that has it.

    Args:
        nodes: see `plan_collect`.
        target: see `plan_collect`.
        steps: see `plan_collect`.
        advance: gets the number of bytes that are done, as they pass; from several threads.

    Returns:
        The plan that was carried out.

    Raises:
        InvalidArgument, CheckpointError: as `plan_collect` does.
        CommitConflict: if folders have different manifests of a step, or the target has another checkpoint of it; then nothing is collected.
        RunEmpty: if no checkpoint is complete.
        CheckpointDamaged: if no folder has the right bytes of a file. The other checkpoints are collected all the same.
        RunLocked, SaveFailed: as `copy_run` does.

    Examples:
        >>> from trainfold import Progress, TrainState, load, save
        >>> from trainfold.stores import MemoryStore
        >>> run, other, whole = MemoryStore(), MemoryStore(), MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=1)), run)
        >>> other.write("run.json", [run.read("run.json")], size_bytes=run.size("run.json"))
        >>> _ = collect_run([other, run], whole)
        >>> load(whole, like=TrainState(trainer=Progress())).trainer.step
        1
    """
    folders, store = _opened(nodes, target)

    def again(error: TrainfoldError) -> bool:
        return isinstance(error, CheckpointDamaged) and folders.another_for(error.where)

    return carried_out(lambda: _planned(folders, store, steps), folders, store, again=again, advance=advance)


def _planned(folders: NodeFolders, target: Store, steps: Steps) -> CopyPlan:
    plan = planned_copy(folders, target, steps=steps)
    going = {each.name for each in plan.checkpoints}
    lacking = {name: texts for name in folders.steps() if name not in going and (texts := folders.lacking(name))}
    asked = folders.steps() if isinstance(steps, str) else [name for name in folders.steps() if step_of(name) in steps]
    left_out = {**plan.left_out, **{name: f"incomplete: lacks {', '.join(texts)}" for name, texts in lacking.items()}}
    left_out |= {name: str(problem) for name, problem in folders.unread.items()}
    left_out |= {f"{name}/": text for name, text in folders.later.items() if name in going}
    meant = {*asked, *going}  # with those to whose files one of these refers
    refused = (*(problem for name, problem in folders.conflicts.items() if name in meant), *plan.refused)
    plan = unless_empty(attrs.evolve(plan, left_out=left_out, refused=refused), fix="name the folders of all nodes")
    newest = max(meant, key=lambda name: step_of(name) or 0, default="")
    # what folders of lost disks lack is expected, the newest as the others; what is there and cannot be read now is not
    return attrs.evolve(plan, left_out={**left_out, **folders.unlike}, newest_lost=folders.unread.get(newest))


def _opened(nodes: Sequence[Run], target: Run) -> tuple[NodeFolders, Store]:
    if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not nodes:
        raise InvalidArgument(
            "collect.nodes", expected="folders", found=shown(nodes), fix="name the folder of each node"
        )
    return NodeFolders([open_store(each) for each in nodes]), open_store(target)
