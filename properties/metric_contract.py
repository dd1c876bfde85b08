"""The contract of a metric: `check_metric` says whether somebody's `Metric` tells the truth, and names every rule that it breaks."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.metric import Metric
from trainfold.properties.batches import OutputsOf, need_rows
from trainfold.properties.differences import ContractBroken
from trainfold.properties.metric_rules import METRIC_RULES, Rule, make_case

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

    Batches are observed, merged and cut in many ways; made empty; given NaN; and brought to the device ``meta``, which has no
    values that anybody could wait for. What only shows with other batches, or where accumulators on a real device are merged,
    is not seen.

    Args:
        make_metric: makes the metric; called more than once, so that what a metric keeps to itself is found out.
        samples: batches, three or more; the more they differ the more they tell. Each is what ``observe`` gets after the
            accumulator, a tuple where that is more than one thing. Dimension 0 of tensors is that of samples: batches are cut
            along it, also those in dicts and lists. A sample with a number in it is observed as it is, since nobody knows
            the number of a part; one sample at least has two rows and can be cut.
        outputs_of: makes of a sample, or of a part of one, what ``observe`` gets: for outputs that cannot be cut themselves.
        nothing: batches in which nothing counts, such as one with a mask of zeros: their result has to be None.
        except_for: names of rules that the metric breaks knowingly, as the message has them.

    Raises:
        ContractBroken: naming every broken rule, and the leaf and the bits that differ.
        InvalidArgument: for fewer than three samples, for samples of which none can be cut, and for names of no rule.

    Examples:
        >>> import torch
        >>> from trainfold.core.metrics.ratio import Ratio
        >>> from trainfold.core.metrics.moments import Mean
        >>> batches = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.5, 1e30]), torch.tensor([-1e30])]
        >>> check_metric(Mean, batches)
        >>> check_metric(Ratio, batches, outputs_of=lambda losses: (losses.double().sum(), len(losses)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        trainfold.properties.differences.ContractBroken: 1 of 15 rules are broken:
          a split batch is its parts: sample 1 as a whole and cut at 1, merged differ in a bit: ...
    """
    if len(samples) < _FEWEST:
        raise InvalidArgument("samples", expected="three or more", found=len(samples), fix="give batches that differ")
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
