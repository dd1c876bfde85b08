"""`attach`: makes the mutable objects of a training loop a `Live` run."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from trainfold.adapters.live.attached_objects import AttachedObjects
from trainfold.adapters.live.live import Live
from trainfold.adapters.live.module_parts import as_module
from trainfold.adapters.live.optional import optional_given
from trainfold.adapters.live.run_watch import RunWatch
from trainfold.adapters.loaders.choose import feeds_of
from trainfold.adapters.outside.outside_weights import OutsideWeights
from trainfold.adapters.parallel.end_together import Uneven
from trainfold.adapters.parallel.pipelines.pipeline import PipelineStage, stages_given
from trainfold.adapters.parallel.sharing import Shared
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.weights.source import WeightSource


def attach(  # noqa: PLR0913 - keywords
    model: torch.nn.Module | Sequence[torch.nn.Module] | PipelineStage | Sequence[PipelineStage],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    components: Sequence[str] | None = None,
    strict: bool = False,
    unsaved: Collection[str] = (),
    optional: Collection[str] = (),
    sharing: Mapping[str, Shared] | None = None,
    parallelism: Parallelism | None = None,
    uneven: Uneven = "refuse",
    weights: WeightSource | None = None,
) -> Live:
    """Make the mutable objects of a loop a run that can be saved and resumed.

    Args:
        model: the module; wrapped (DDP, compile), sharded (``fully_shard``) or not. Or a list of modules that are parts of one model,
            such as a generator and a discriminator: each tensor has its name in its part, and no two may have the same. Or the
            ``PipelineStage`` objects that this rank runs: the ranks save one model, in which each tensor has the name that it has in its stage.
        optimizer: made from the parameters of ``model``.
        scheduler: an object with ``state_dict`` and ``load_state_dict``; or a list, tuple or dict of them.
        loader: a ``DataLoader`` over a map-style dataset, or one with its own state; then iterate over ``live.batches()``.
            Several by name, in a dict: iterate over ``live.batches(name)``.
        extra: the run's other components by name: modules, optimizers, random generators, anything with ``state_dict`` and
            ``load_state_dict``, or a pair of functions ``(get, set)`` for a tree.
        components: which components are saved and restored, by managers and by `Live.restore`; None for all. A manager may select fewer. Where
            ``model`` is left out of a run that continues, ``weights`` says where it comes from. `Live.capture` still returns all.
        strict: refuse a save (`HiddenStateRefused`) instead of warning (`HiddenState`) if the attached objects hold state
            that changes with training and that no component saves.
        unsaved: such state that need not be saved, by the names that the warning lists, such as ``"model.history"``.
        optional: names under ``extra`` that the run can do without. If one cannot be saved or restored, a warning
            (`OptionalLeftOut`) names it, and it is left out. Any other failure fails the save or the load, on every rank.
        sharing: what ranks do not have alike: a component under ``extra``, ``"model.buffers"``, ``"model.settings"``, or one buffer by its leaf path ->
            ``"rank_0"``: its value on rank 0 counts; ``"each_rank"``: every rank has its own; ``"each_share"``: so has every share of
            the data (components only); ``"replicated"``, as without a declaration.
        parallelism: how the ranks train this model, for `Live.microbatch` and `Live.check`; None for what ``DistributedDataParallel`` or
            ``fully_shard`` has set up, and one process without them.
        uneven: what happens on several ranks with batches that not every rank has: ``"refuse"`` raises on all of them, before the first batch
            where the numbers of batches are known; ``"drop"`` ends each epoch on all ranks with the shortest share, leaves the rest out,
            and warns how much that is.
        weights: where the model's weights come from, if not from checkpoints: a `WeightSource`, such as one of ``trainfold.weights``. No checkpoint
            has the model then; with ``trainfold.weights.Frozen(source)`` it has all but the frozen parameters. The source is asked where the run
            begins and at each resume, by ``manager.restore(live)``.

    Returns:
        The live run.

    Raises:
        InvalidArgument: for an object whose state cannot be known, or an optimizer whose scheduler is certainly not
            attached. If that is not certain, a warning names it after a resume that has restarted it.
        UnknownComponent: for a name in ``components`` that is neither built in nor under ``extra``.
        InvalidState: if the optimizer holds a tensor that the model does not have, or the model has no values yet.
        UnsupportedLeaf: for a hyperparameter that is not plain, because a resume could not compare it.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> live.progress
        Progress(step=0, epoch=0, samples=0, tokens=0)
        >>> list(live.capture().model.params)
        ['weight', 'bias']
    """
    stages = stages_given(model)
    module = as_module([each.submod for each in stages] if len(stages) > 1 else stages[0].submod if stages else model)
    objects = AttachedObjects(module, optimizer, scheduler, extra or {}, stages=stages, sharing=sharing,
                              parallelism=parallelism, uneven=uneven)  # fmt: skip
    feed = None if loader is None else feeds_of(loader)
    watch = RunWatch(objects, loader, unsaved=unsaved, is_strict=strict)
    outside = None if weights is None else OutsideWeights(weights, module, objects.stage)
    return Live(objects, feed, watch, optional_given(optional, objects.extra), outside, components=components)
