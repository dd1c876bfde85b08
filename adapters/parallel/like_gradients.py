"""Whether the ranks that train one model have gradients of the same parameters, and the same where nothing sums them."""

from collections.abc import Collection, Iterable, Sequence

import torch

from trainfold.adapters.parallel.pipelines.pipeline import PipelineParallelism
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import InvalidState, RanksDisagree, place
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.state.names.wrapper_names import name_in
from trainfold.core.step.reduce import unequal_gradients

_FIX = "run a backward on every rank before live.check, and clear gradients only after the optimizer's step"


def unlike(marks: Sequence[int], trained: Iterable[torch.nn.Parameter], ranks: Parallelism) -> RanksDisagree | None:
    """Return the error for ranks of which some have no gradient, gradients of other parameters, or no weight; None if all are alike, as nearly always.

    Args:
        marks: by share of the data: twice that of its gradients from `mark_of`, and one more with a weight.
        trained: the parameters.
        ranks: how they train. Where other ranks may have other parameters, only those without any gradient count.
    """
    unweighted, marks = [rank for rank, mark in enumerate(marks) if not mark % 2], [mark // 2 for mark in marks]
    bare = [rank for rank, mark in enumerate(marks) if not mark]
    is_known = isinstance(ranks, TorchParallelism | PipelineParallelism)
    others = [rank for rank, mark in enumerate(marks) if is_known and mark not in (0, marks[0])]
    where, fix = "live.check", _FIX
    if isinstance(ranks, PipelineParallelism):
        where = f"live.check of {ranks.stages_text}"
        if marks and len(bare) == len(marks) and any(each.requires_grad for each in trained):
            return RanksDisagree(where, expected="gradients, as on other stages", found="none", fix=_FIX)
    if bare and len(bare) < len(marks):
        found, expected = f"none on {_ranks(bare, marks, ranks)}", "gradients on every rank"
    elif others:
        found = f"those of other parameters on {_ranks(others, marks, ranks)} than on the first"
        expected = "gradients of the same parameters on every rank"
    elif 0 < len(unweighted) < len(marks):
        where, fix, others = f"{where}: weight", "pass weight=0 on a rank without samples", unweighted
        found, expected = f"none on {_ranks(unweighted, marks, ranks)}", "one on every rank, or on none"
    else:
        return None
    error = RanksDisagree(where, expected=expected, found=found, fix=fix)
    odd, is_rank = bare or others, ranks.coordinates.world.size == len(marks)
    place(error, rank=odd[0] if is_rank and len(odd) == 1 else None)
    return error


def unsummed(
    trained: Iterable[torch.nn.Parameter], ranks: Parallelism, modules: Iterable[torch.nn.Module]
) -> RanksDisagree | None:
    """Return the error for gradients that differ between ranks because nothing sums them: each rank would find another norm, and clip by it.

    Args:
        trained: the parameters.
        ranks: how they train; all of them call.
        modules: that have names for them.
    """
    alone = ranks.unsummed(trained) if isinstance(ranks, TorchParallelism | PipelineParallelism) else []
    odd = {id(alone[place]) for place in unequal_gradients([each.grad for each in alone], ranks)} if alone else set()
    if not odd:
        return None
    return RanksDisagree(
        _gradient_of(odd, modules),
        expected="the same on every rank, because neither fully_shard nor DistributedDataParallel sums it",
        found=f"other values on some ranks{_and_more(odd)}",
        fix="average it over the ranks before live.check, with torch.distributed.all_reduce; or take the parameter out of ignored_params, or wrap its "
        "module when it is not frozen any more",
    )


def check_known(
    found: Iterable[torch.nn.Parameter], trained: Iterable[torch.nn.Parameter], modules: Iterable[torch.nn.Module]
) -> None:
    """Raise if an optimizer steps parameters that ``DistributedDataParallel`` does not know.

    Args:
        found: such parameters, from `unreduced`.
        trained: what optimizers step.
        modules: that have names for them.

    Raises:
        InvalidState: naming the first of them.
    """
    stepped = set(map(id, trained))
    odd = {id(each) for each in found if each.requires_grad and id(each) in stepped}
    if odd:
        raise InvalidState(
            _gradient_of(odd, modules),
            expected="one that DistributedDataParallel sums, because an optimizer steps the parameter",
            found=f"a parameter that was frozen, or not there, when its module was wrapped{_and_more(odd)}: each rank trains it apart",
            fix='unfreeze it before DistributedDataParallel wraps the module; to do so during a run, stop, and resume with it unfrozen: "Unfreeze layers" in docs/how-to/change-a-run.md',
        )


def _ranks(which: Sequence[int], marks: Sequence[int], ranks: Parallelism) -> str:
    noun = "rank" if ranks.coordinates.world.size == len(marks) else "share"
    return f"{noun} {', '.join(map(str, which))} of {len(marks)}"


def _gradient_of(odd: Collection[int], modules: Iterable[torch.nn.Module]) -> str:
    """The gradient of the first of some parameters, in words."""
    every = [(name_in(module, name), each) for module in modules for name, each in module.named_parameters()]
    names = [name for name, each in every if id(each) in odd]
    return f"the gradient of {names[0] if names else 'a parameter of an optimizer'}"


def _and_more(odd: Collection[int]) -> str:
    return f", and of {len(odd) - 1} more" if len(odd) > 1 else ""
