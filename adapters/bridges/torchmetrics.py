"""`TorchMetric`: wraps a ``torchmetrics.Metric`` as a trainfold metric; its states become accumulators of int64 tensors."""

import threading
from collections.abc import Callable
from typing import Any, final

import attrs
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.evaluate.tensor_packing import pack, unpack
from trainfold.core.json_values import shown
from trainfold.core.printable import with_article

_REDUCTIONS = {f"dim_zero_{name}": name for name in ("sum", "min", "max", "cat")}
_MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
_ITEMS = "items"
_PLAIN = (bool, int, float, str, type(None))
_COMMON = {"training", "compute_on_cpu", "compute_with_cache", "dist_sync_fn", "dist_sync_on_step", "process_group", "sync_on_compute"}  # fmt: skip


@final
@attrs.frozen(repr=False)
class TorchMetric:
    """A metric of torchmetrics in a suite: its states are merged over ranks through trainfold's collectives, in rank order.

    ``observe`` writes the states into a template, calls its ``update(*outputs)`` and reads the states back; ``merge`` joins each
    state by its own ``dist_reduce_fx`` ("sum", "min", "max", "cat", or None for a list); ``result`` is ``compute()`` as plain
    numbers, lists and dicts, and None if nothing was seen. torchmetrics' own synchronisation is turned off.

    Every rank gets the same bits, the number of collective calls is fixed, ranks without data take part, and the accumulator can
    be saved in a checkpoint in the middle of an evaluation. The result is **not** exact: a float32 sum still depends on the
    batch size, on the order of samples and on the number of ranks, and stops growing when it is large; a "cat" state has its
    samples in the order of the ranks, and needs the memory and the traffic of all of them. Only integer counts are exact here
    too. Use a metric of `trainfold.metrics` if there is one.

    These are refused at construction: a "mean", because a mean of ranks' means gives a rank with one batch the weight of one
    with a thousand; your own function, and None for a tensor, because both join all ranks at once and cannot join two; and
    metrics that contain other metrics (wrappers, collections, sums of metrics): pass each of these to the suite by itself.
    State that ``update`` keeps outside of ``add_state`` is not seen.

    Args:
        make: returns a new, equal metric of torchmetrics at each call, such as ``torchmetrics.MeanSquaredError`` or
            ``lambda: BinaryAUROC(thresholds=100)``. It is moved to the device of the outputs.

    Raises:
        InvalidArgument: if ``make`` returns something else, or a metric whose states cannot be merged.

    Examples:
        >>> import torchmetrics
        >>> metric = TorchMetric(torchmetrics.MeanSquaredError)
        >>> one = metric.observe(metric.zero(), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        >>> other = metric.observe(metric.zero(), torch.tensor([3.0]), torch.tensor([0.0]))
        >>> metric.result(metric.merge(one, other)), metric.result(metric.zero())
        (4.666666507720947, None)
    """

    make: Callable[[], Any]
    _templates: threading.local = attrs.field(init=False, eq=False, factory=threading.local)

    def __attrs_post_init__(self) -> None:
        self._template()

    def __repr__(self) -> str:
        """The metric and its settings, without addresses, so that ranks can compare it."""
        metric = self._template()
        settings = {name: value for name, value in vars(metric).items() if name[0] != "_" and name not in _COMMON}
        shown_settings = [f"{name}={value!r}" for name, value in sorted(settings.items()) if isinstance(value, _PLAIN)]
        return f"TorchMetric({type(metric).__name__}({', '.join(shown_settings)}))"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.make,))

    def zero(self) -> Any:
        """The metric's default states."""
        return _taken(self._emptied())

    def observe(self, acc: Any, /, *outputs: Any, **named: Any) -> Any:
        """The states after ``update(*outputs, **named)``, or ``acc`` if the tensors have no elements; no argument is changed."""
        tensors = [each for each in (*outputs, *named.values()) if isinstance(each, torch.Tensor)]
        if tensors and not any(each.numel() for each in tensors):
            return acc
        template = self._loaded(acc, tensors[0].device if tensors else None)
        template.update(*outputs, **named)
        taken = _taken(template)
        self._emptied()
        return taken

    def merge(self, one: Any, other: Any, /) -> Any:
        """Each state joined by its ``dist_reduce_fx``, ``one`` first; an empty accumulator changes nothing."""
        if not one["seen"]:
            return other
        if not other["seen"]:
            return one
        states = {}
        for name, how in _reductions(self._template()).items():
            (header, words), (other_header, other_words) = one["states"][name], other["states"][name]
            header, other_header, other_words = header.cpu(), other_header.cpu(), other_words.to(words.device)
            if how == _ITEMS:
                states[name] = (torch.cat([header, other_header]), torch.cat([words, other_words]))
                continue
            found, more = unpack(header, words, name), unpack(other_header, other_words, name)
            joined = _joined(found + more) if how == "cat" else [_combined(name, how, found[0], more[0])]
            states[name] = pack(joined, name)
        return {"seen": torch.tensor(1), "states": states}

    def result(self, acc: Any, /) -> Any:
        """What ``compute()`` returns, as plain Python; None if nothing was seen."""
        if not acc["seen"]:
            return None
        template = self._loaded(acc, None)
        value = _plain(template.compute())
        self._emptied()
        return value

    def _template(self) -> Any:
        """One metric for each thread, so that ranks that are threads can share a suite."""
        found = getattr(self._templates, "metric", None)
        if found is None:
            found = _checked(self.make()).clone()  # the caller may use the metric itself
            found.sync_on_compute = found._to_sync = False  # noqa: SLF001 - read once, at construction
            self._templates.metric = found
        return found

    def _emptied(self) -> Any:
        template = self._template()
        for name, default in template._defaults.items():  # noqa: SLF001 - a failed update may have left anything in it
            if isinstance(default, list):
                setattr(template, name, [])
        template.reset()
        return template

    def _loaded(self, acc: Any, device: torch.device | None) -> Any:
        template = self._emptied()
        found = {name: unpack(header, words, name) for name, (header, words) in acc["states"].items()}
        device = device or next((tensors[0].device for tensors in found.values() if tensors), template.device)
        if template.device != device:
            template.to(device)
        for name, how in _reductions(template).items():
            tensors = [tensor.to(device) for tensor in found[name]]
            setattr(template, name, tensors if how in {"cat", _ITEMS} else tensors[0])
        template._update_count = int(acc["seen"])  # noqa: SLF001 - compute warns if it is 0
        return template


def _taken(template: Any) -> Any:
    """The states of a template as an accumulator."""
    states = {}
    for name, how in _reductions(template).items():
        value = getattr(template, name)
        tensors = list(value) if isinstance(value, list | tuple) else [value]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(f"TorchMetric.{name}", expected="a state of tensors", found=shown(tensor),
                                      fix="leave this metric out: no accumulator can hold its state")  # fmt: skip
        states[name] = pack(_joined(tensors) if how == "cat" else tensors, name)
    return {"seen": torch.tensor(int(template.update_called)), "states": states}


def _combined(name: str, how: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.shape != other.shape:
        raise InvalidArgument(f"TorchMetric: the state {name!r}", expected=f"the shape {list(one.shape)} on every rank",
                              found=list(other.shape), fix="pass the metric its number of classes or outputs")  # fmt: skip
    return _MERGES[how](one, other)


def _joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a "cat" state as one, as torchmetrics joins them before sending."""
    return [torch.cat([each.reshape(1) if each.ndim == 0 else each for each in tensors])] if tensors else []


def _reductions(template: Any) -> dict[str, str]:
    """How each state is merged: sum, min, max, cat, or items (a list whose tensors stay apart)."""
    defaults, reductions = template._defaults, template._reductions  # noqa: SLF001 - they have no public names
    return {name: _reduction(name, how, defaults[name]) for name, how in reductions.items()}


def _reduction(name: str, how: Any, default: Any) -> str:
    """The kind of a ``dist_reduce_fx``, found by the name of the function, so that torchmetrics is not imported here."""
    if how is None and isinstance(default, list):
        return _ITEMS
    found = _REDUCTIONS.get(getattr(how, "__name__", ""))
    if (
        found is not None
        and how.__module__.startswith("torchmetrics.")
        and (found == "cat") == isinstance(default, list)
    ):
        return found
    called = "None" if how is None else getattr(how, "__name__", repr(how)).removeprefix("dim_zero_")
    raise InvalidArgument(
        f"TorchMetric: the state {name!r}",
        expected="a dist_reduce_fx of 'sum', 'min' or 'max' for a tensor, 'cat' or None for a list",
        found=f"{called} for {with_article(type(default).__name__)}",
        fix="keep a sum and a count instead, and divide in compute(); or use a metric of trainfold.metrics",
    )


def _checked(metric: Any) -> Any:
    wanted = ("add_state", "metric_state", "update", "compute", "reset", "update_called", "_reductions")
    if not all(hasattr(metric, name) for name in wanted):
        raise InvalidArgument("TorchMetric.make", expected="a function that returns a torchmetrics.Metric",
                              found=f"one that returns {shown(metric)}",
                              fix="wrap each metric by itself, as in TorchMetric(torchmetrics.MeanSquaredError)")  # fmt: skip
    inner = [
        type(each).__name__ for each in metric.modules() if each is not metric and hasattr(type(each), "add_state")
    ]
    if inner or not metric.metric_state:
        raise InvalidArgument("TorchMetric.make", expected="a metric that keeps its own states",
                              found=f"{with_article(type(metric).__name__)} around {inner or 'no state at all'}",
                              fix="wrap the metrics in it by themselves")  # fmt: skip
    _reductions(metric)
    return metric


def _plain(value: Any) -> Any:
    """A computed value without tensors.

    Examples:
        >>> _plain({"map": torch.tensor(0.5), "curve": (torch.tensor([1, 2]), None)})
        {'map': 0.5, 'curve': [[1, 2], None]}
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
