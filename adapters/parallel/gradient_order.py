"""`GradientOrder`: the order in which DistributedDataParallel sums gradients. From three ranks on, the bits of the sums depend on it (ADR-0034).

DDP lays gradients end to end: until its first backward in the order of its parameters, and then in the order in which that backward made them. A sum of three
terms is rounded otherwise at another place. So a checkpoint has the order, and a run that resumes takes it before its first step.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch

from trainfold.adapters.parallel.ddp_wrappers import ddp_wrappers
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.layout.stage import Stage

_LOG: Final = logging.getLogger("trainfold")
_DIST: Any = torch.distributed  # much of what is used here is not public
_LEAST_RANKS: Final = 3  # the sum of two numbers has one order
_REBUILT: Final = "rebuilt_per_bucket_param_indices"
_LATE: Final = (
    "the first backward of this process has fixed their order; restore before it, when DDP has wrapped the module"
)
_OTHERWISE: Final = "sums of gradients are rounded otherwise than in the run that was saved"
# of a wrapper with a static graph after its first backward: it takes its order after the second one
_UNKNOWN: Final = ""


@final
class GradientOrder:
    """The order of each DDP wrapper of the attached modules, whether it is attached or stands around one that is.

    Args:
        attached: returns component -> object.
        stage: the stages of a pipeline that this rank has; None for the whole model.

    Attributes:
        unknown: wrappers whose order can change and is not known yet; None before they were looked for. `stepped` is for them only.
    """

    def __init__(self, attached: Callable[[], Mapping[str, object]], stage: Stage | None = None) -> None:
        self._attached = attached
        self._of = "" if stage is None else f" of {stage}"
        self._orders: dict[str, str] = {}
        self._fixed: set[str] = set()  # wrappers that do not change their order any more
        self._saved: dict[str, str] = {}  # the orders of the checkpoint
        self.unknown: dict[str, Any] | None = None

    def attach(self) -> None:
        """Look for wrappers again, because an object was attached later."""
        self.unknown = None

    def stepped(self) -> None:
        """Let each wrapper take its order now, after its first backward, and not in its next forward: a save between the two has to know it.

        All ranks call, because DDP compares the order between them.
        """
        for name, wrapper in list(self._wrappers().items()):
            wrapper.reducer._rebuild_buckets()  # noqa: SLF001
            self._note(name, wrapper)
        self._warn_of_others()

    @property
    def changes(self) -> bool:
        """Whether a wrapper takes another order at a backward that is still to come, so that the same step has other bits the second time."""
        return bool(self._wrappers())

    def contract(self) -> dict[str, str]:
        """The order of each wrapper: its component, and its number there -> the indices of its parameters."""
        return dict(self._orders)

    def take(self, saved: Mapping[str, str]) -> None:
        """Take the order that a checkpoint has. All ranks call.

        Args:
            saved: from `contract`.
        """
        self._saved = dict(saved)
        self.unknown = None  # a wrapper may have been made since the attach
        for name, wrapper in list(self._wrappers().items()) if saved else ():  # else the first step looks for them
            if name in saved:
                parameters, are_sparse = wrapper._build_params_for_reducer()  # noqa: SLF001
                order = [int(each) for each in saved[name].split()]
                if saved[name] != _UNKNOWN and sorted(order) != list(range(len(parameters))):
                    del self._saved[name]  # it is another model
                elif (problem := _problem(wrapper, saved[name], are_sparse)) is not None:
                    log_for_all("%s: %s: %s", name, _OTHERWISE, problem)
                    del self._saved[name]
                elif wrapper.static_graph:
                    _make_in(order, wrapper, parameters, are_sparse)
                    self._orders[name] = saved[name]  # until its second backward shows it
                else:
                    _replay(wrapper, order, parameters, are_sparse)
                    self._note(name, wrapper)
        self._warn_of_others()
        self.unknown = self.unknown or None  # of one that is made later nothing is known yet

    def _wrappers(self) -> dict[str, Any]:
        """The wrappers whose order can change and is not known yet."""
        if self.unknown is None:
            modules = {name: each for name, each in self._attached().items() if isinstance(each, torch.nn.Module)}
            found = {
                f"{component}[{number}]{self._of}": each
                for component, wrappers in ddp_wrappers(modules, least_ranks=_LEAST_RANKS).items()
                for number, each in enumerate(wrappers)
            }
            self.unknown = {
                name: each for name, each in found.items() if name not in self._fixed and _is_reordered(each)
            }
        return self.unknown

    def _note(self, name: str, wrapper: Any) -> None:
        wrapper.logger.set_runtime_stats_and_log()
        found = wrapper._get_ddp_logging_data()  # noqa: SLF001
        if found.get(_REBUILT):
            self._orders[name] = " ".join(re.findall(r"\d+", found[_REBUILT]))
            self._fixed.add(name)
            self._wrappers().pop(name, None)
        elif wrapper.static_graph and wrapper._static_graph_delay_allreduce_enqueued:  # noqa: SLF001 (in its first backward)
            self._orders.setdefault(name, _UNKNOWN)

    def _warn_of_others(self) -> None:
        """Warn once of wrappers that have taken another order than the checkpoint has."""
        odd = [name for name, order in self._saved.items() if order and (self._orders.get(name) or order) != order]
        for name in odd:
            del self._saved[name]
        if odd:
            log_for_all("%s: %s: %s", ", ".join(odd), _OTHERWISE, _LATE)


def _is_reordered(wrapper: Any) -> bool:
    """Whether DDP takes another order after the first backward, and the bits depend on it."""
    keeps = wrapper.find_unused_parameters and not wrapper.static_graph
    joins = getattr(getattr(wrapper, "_join_config", None), "enable", False)
    is_plain = hasattr(wrapper, "reducer") and not getattr(wrapper, "_use_python_reducer", False)
    return is_plain and not keeps and not joins and wrapper.process_group.size() >= _LEAST_RANKS


def _problem(wrapper: Any, saved: str, are_sparse: list[bool]) -> str | None:
    """Why the order cannot be set; None if it can."""
    if saved == _UNKNOWN:
        return "it was saved before the second backward, after which DDP takes its order with static_graph=True; resume from another checkpoint"
    if wrapper.mixed_precision is not None:
        return "the order cannot be set under DDP's own mixed_precision; pass find_unused_parameters=True, which keeps one order"
    return _problem_of_static(wrapper, are_sparse) if wrapper.static_graph else None


def _problem_of_static(wrapper: Any, are_sparse: list[bool]) -> str | None:
    if wrapper._static_graph_delay_allreduce_enqueued:  # noqa: SLF001
        return _LATE
    if any(are_sparse):
        return "with static_graph=True the order of sparse gradients cannot be set; leave static_graph out"
    if wrapper._get_ddp_logging_data().get("comm_hook") and not wrapper._comm_hooks:  # noqa: SLF001
        return "with static_graph=True and a built-in communication hook the order cannot be set; register the hook after the restore"
    return None


@final
class _Fire(torch.autograd.Function):
    """Its backward reports to DDP that gradients are ready, in an order. The parameters have no part in it, so none of their hooks is called."""

    @staticmethod
    def forward(ctx: Any, zero: torch.Tensor, reducer: Any, order: list[int]) -> torch.Tensor:
        """Keep the order."""
        ctx.reducer, ctx.order = reducer, order
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None]:
        """Fire."""
        for each in ctx.order:
            ctx.reducer._autograd_hook(each)  # noqa: SLF001
        return None, None, None


def _replay(wrapper: Any, order: list[int], parameters: list[torch.nn.Parameter], are_sparse: list[bool]) -> None:
    """A backward of zeros in which gradients become ready in an order, after which DDP takes it; gradients are as before at its end."""
    kept = [each.grad for each in parameters]
    for each, is_sparse in zip(parameters, are_sparse, strict=True):
        each.grad = _no_rows_of(each) if is_sparse else None
    with torch.enable_grad():
        wrapper.reducer.prepare_for_forward()
        wrapper.reducer.prepare_for_backward([])
        start = torch.zeros((), device=parameters[0].device, requires_grad=True)
        _Fire.apply(start, wrapper.reducer, order).backward()  # type: ignore[no-untyped-call]
        wrapper.reducer._rebuild_buckets()  # noqa: SLF001
    for each, grad in zip(parameters, kept, strict=True):
        each.grad = grad


def _no_rows_of(table: torch.Tensor) -> torch.Tensor:
    """The gradient of an embedding of which no row was read."""
    rows = torch.empty(0, *table.shape[1:], dtype=table.dtype, device=table.device)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64, device=table.device), rows, table.shape)


def _make_in(order: list[int], wrapper: Any, parameters: list[torch.nn.Parameter], are_sparse: list[bool]) -> None:
    """Let a wrapper of a static graph make its reducer again, with buckets in an order.

    In its first backward it counts how often each gradient becomes ready, so that one of zeros would be wrong. It makes its buckets
    again after the second one: in the same order, because the graph is static.
    """
    most = wrapper.bucket_bytes_cap
    first = _DIST._DEFAULT_FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else most  # noqa: SLF001
    limits = getattr(wrapper, "bucket_bytes_cap_list", None) or [first, most]  # torch 2.13 has the list
    buckets, sizes = _DIST._compute_bucket_assignment_by_size(  # noqa: SLF001
        [parameters[each] for each in order], limits, are_sparse, order
    )
    usual = _DIST.Reducer

    def ordered(given: Any, made: Any, made_sizes: Any, *options: Any) -> Any:
        return usual(given, *((buckets, sizes) if given is parameters else (made, made_sizes)), *options)

    wrapper._remove_autograd_hooks()  # noqa: SLF001
    _DIST.Reducer = ordered
    try:
        names = wrapper._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
        wrapper._ddp_init_helper(parameters, are_sparse, names, wrapper.static_graph)  # noqa: SLF001
    finally:
        _DIST.Reducer = usual
    wrapper.reducer._set_static_graph()  # noqa: SLF001
    wrapper.logger._set_static_graph()  # noqa: SLF001
    for hook, state in wrapper._comm_hooks:  # noqa: SLF001
        wrapper.logger._set_comm_hook_name(hook.__qualname__)  # noqa: SLF001
        _DIST._register_comm_hook(wrapper.reducer, state, hook)  # noqa: SLF001
