"""The contract of a metric: `check_metric` checks an implementation of `Metric`, and names every rule that it breaks."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.metric import Metric
from trainfold.properties.batches import OutputsOf, need_rows
from trainfold.properties.differences import ContractBroken
from trainfold.properties.metrics.metric_rules import METRIC_RULES, Rule, make_case

__all__ = ["check_metric"]

_FEWEST = 3  # two do not show whether merging is associative


def check_metric(
    make_metric: Callable[[], Metric],
    samples: Sequence[Any],
    *,
    outputs_of: OutputsOf | None = None,
    nothing: Sequence[Any] = (),
    except_for: Collection[str] = (),
) -> None:
    """Check that a metric keeps the contract of `Metric`, to the bit.

    Batches are observed, merged and cut in many ways, emptied, poisoned with NaN, and moved to the device ``meta``, which has no
    values to wait for. A fault that shows only with other batches, or only when accumulators on a real device are merged, is not
    found.

    Args:
        make_metric: makes the metric; called more than once, to find out what a metric keeps outside of its accumulators.
        samples: three or more batches; the more they differ, the more is found. Each is the argument of ``observe`` after the
            accumulator, or a tuple of several. Dimension 0 of tensors, also of those in dicts and lists, is that of samples, and
            batches are cut along it. A sample that contains a number is not cut, because the number for a part is not known.
            At least one sample must have two rows and be possible to cut.
        outputs_of: maps a sample, or a part of one, to the arguments of ``observe``: for outputs that cannot be cut themselves.
        nothing: batches in which nothing counts, such as one with a mask of zeros: their result must be None.
        except_for: names of rules that the metric breaks on purpose, as they stand in the message.

    Raises:
        ContractBroken: naming every broken rule, and the leaf and the bits that differ.
        InvalidArgument: for fewer than three samples, for samples that cannot be cut, and for unknown names of rules.

    Examples:
        >>> import torch
        >>> from trainfold.metrics import Mean, Ratio
        >>> batches = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.5, 1e30]), torch.tensor([-1e30])]
        >>> check_metric(Mean, batches)
        >>> check_metric(Ratio, batches, outputs_of=lambda losses: (losses.double().sum(), len(losses)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        trainfold.properties.differences.ContractBroken: 1 of 15 rules are broken:
          a split batch is its parts: sample 1 as a whole and cut at 1, merged differ in a bit: ...
    """
    if len(samples) < _FEWEST:
        raise InvalidArgument("samples", expected="three or more", found=len(samples), fix="pass batches that differ")
    need_rows("samples", list(samples))
    rules = _rules_but(except_for)
    try:
        case = make_case(make_metric, tuple(samples), outputs_of=outputs_of or _as_it_is, nothing=tuple(nothing))
    except Exception as error:
        raise ContractBroken(f"it measures: {type(error).__name__}: {error}") from error
    broken = []
    for name, rule in rules.items():
        try:
            rule(case)
        except Exception as error:  # noqa: BLE001  # whatever a foreign metric raises breaks the rule
            about = str(error) if isinstance(error, ContractBroken) else f"{type(error).__name__}: {error}"
            broken.append(f"{name}: {about}")
    if broken:
        raise ContractBroken(f"{len(broken)} of {len(rules)} rules are broken:\n  " + "\n  ".join(broken))


def _rules_but(except_for: Collection[str]) -> dict[str, Rule]:
    named = {rule.__name__.replace("_", " "): rule for rule in METRIC_RULES}
    if unknown := [name for name in except_for if name not in named]:
        raise InvalidArgument(
            "except_for", expected=f"names of rules: {', '.join(named)}", found=unknown, fix="copy them from a message"
        )
    return {name: rule for name, rule in named.items() if name not in except_for}


def _as_it_is(sample: Any) -> Any:
    return sample
