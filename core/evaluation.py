"""`Evaluation`: the results of an evaluation by name, and what must be known to trust them (Q04, Q12)."""

from collections.abc import Mapping
from typing import Any, final

from trainfold.core.suite import Suite, Tally, nonfinite_of, results_of


@final
class Evaluation(dict[str, Any]):
    """Results by the names of the suite, the same on every rank; empty when nothing was seen anywhere.

    A metric without a result, such as a ratio whose denominator is 0, is absent.

    Attributes:
        complete: False when a limit cut the evaluation short on some rank: such results are no candidates for "best".
        batches: how many batches all ranks observed.
        nonfinite: for each metric that saw any, how many of its terms were NaN or infinite, as {"loss": {"nan": 3}}.
        tally: what the results come from. Save it, and give it to ``evaluate(..., start=...)`` to go on from here.

    Examples:
        >>> from trainfold import metrics as M
        >>> from trainfold.core.suite import no_tally
        >>> suite = {"loss": M.Ratio()}
        >>> evaluation_of(suite, no_tally(suite)) == {}
        True
    """

    __slots__ = ("batches", "complete", "nonfinite", "tally")

    def __init__(
        self,
        results: Mapping[str, Any],
        *,
        tally: Tally,
        complete: bool,
        nonfinite: Mapping[str, Mapping[str, int]],
    ) -> None:
        super().__init__(results)
        self.tally = tally
        self.complete = complete
        self.batches = tally.batches
        self.nonfinite = nonfinite


def evaluation_of(suite: Suite, tally: Tally, *, complete: bool = True) -> Evaluation:
    """The evaluation that a tally stands for.

    Args:
        suite: the metrics.
        tally: what all ranks have seen.
        complete: whether that is all there is to see.
    """
    return Evaluation(results_of(suite, tally), tally=tally, complete=complete, nonfinite=nonfinite_of(tally))
