"""`Metric`: what a metric is: a commutative monoid whose elements are pytrees of int64 tensors (Q01, Q02)."""

from typing import Any, Protocol, runtime_checkable

__all__ = ["Metric"]


@runtime_checkable
class Metric(Protocol):
    """A way to measure that no batch size, order or number of ranks can change. Any object with these methods is one.

    A metric is a value without state of its own; what was seen is in accumulators. Their leaves are all int64 tensors, so that
    they can be added up over ranks, saved in a checkpoint and compared to the bit. A leaf named ``special``, int64[..., 3],
    counts the terms that were NaN, infinity, minus infinity; an evaluation reports them.

    A class attribute ``additive = True`` promises more: accumulators have the structure of ``zero()``, and their leaves, the shorter ones padded with zeros at the end of
    each dimension, can be added up as integers, and ``merge(zero(), sum)`` is what merging them one by one gives. Then ranks
    need one all-reduce. Without it (or with False) accumulators are gathered and merged.

    Laws, which `trainfold.properties.contracts.check_metric` checks for your own: ``merge`` is commutative and associative and
    ``zero()`` is its neutral element, all to the bit; observing a batch is observing its parts and merging; no argument is changed;
    where nothing counted the result is None, and a NaN that changed something shows, in the result or in ``special``.
    """

    def zero(self) -> Any:
        """The accumulator of nothing; its ``result`` is None."""
        ...

    def observe(self, acc: Any, /, *outputs: Any, **named: Any) -> Any:
        """The accumulator with one more batch; outputs are tensors on any device, which nobody waits for, or numbers."""
        ...

    def merge(self, one: Any, other: Any, /) -> Any:
        """The accumulator of all that two of them have seen, on the CPU: this is where a device is waited for."""
        ...

    def result(self, acc: Any, /) -> Any:
        """The number, or a list or dict of numbers, rounded once; None is absent: nothing was seen, or a denominator is 0."""
        ...
