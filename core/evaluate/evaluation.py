"""`Evaluation`: the results of an evaluation by name, and the tally behind them."""

from collections.abc import Mapping
from typing import Any, final

from trainfold.core.evaluate.suite import Suite, Tally, check_tally, nonfinite_of, results_of
from trainfold.core.markup.html_table import html_table, notebook


@final
class Evaluation(dict[str, Any]):
    """Results by the names of the suite, the same on every rank; empty if no rank saw a batch.

    A metric without a result, such as a ratio whose denominator is 0, is absent.

    Attributes:
        complete: False if a limit cut the evaluation short on some rank; such a result never becomes the best.
        batches: how many batches all ranks observed.
        nonfinite: how many terms of each metric were NaN or infinite, if any were, as {"loss": {"nan": 3}}.
        tally: the accumulators behind the results. Save it, and pass it to ``evaluate(..., start=...)`` to continue from here.

    Examples:
        >>> from trainfold import metrics as M
        >>> from trainfold.evaluation import no_tally
        >>> suite = {"loss": M.Ratio()}
        >>> evaluation_of(suite, no_tally(suite)) == {}
        True
    """

    __slots__ = ("nonfinite", "tally")

    def __init__(self, results: Mapping[str, Any], *, tally: Tally, nonfinite: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(results)
        self.tally = tally
        self.nonfinite = nonfinite

    @property
    def complete(self) -> bool:
        """Whether all batches were seen."""
        return self.tally.complete

    @property
    def batches(self) -> int:
        """How many batches were seen."""
        return self.tally.batches

    def copy(self) -> "Evaluation":
        """A copy with the same tally."""
        return Evaluation(self, tally=self.tally, nonfinite=self.nonfinite)

    def __or__(self, other: Mapping[str, Any]) -> "Evaluation":  # type: ignore[override]
        """A copy with more results and the same tally."""
        return Evaluation({**self, **other}, tally=self.tally, nonfinite=self.nonfinite)

    def __repr__(self) -> str:
        return super().__repr__() if self.complete else f"<partial: {super().__repr__()}>"

    def _repr_html_(self) -> str:
        title = f"{'evaluation' if self.complete else 'partial evaluation'} of {self.batches} batches"
        counted = {
            name: ", ".join(f"{count} {kind}" for kind, count in of.items()) for name, of in self.nonfinite.items()
        }
        rows = [(name, value, counted.get(name, "")) for name, value in self.items()]
        rows += [(name, "", why) for name, why in counted.items() if name not in self]
        return notebook(html_table(title, ("metric", "result", "not finite"), rows))


def evaluation_of(suite: Suite, tally: Tally) -> Evaluation:
    """The evaluation of a tally; it is complete if the tally is.

    Args:
        suite: the metrics.
        tally: the tally of all ranks.

    Raises:
        InvalidArgument: if the tally is of other metrics.
    """
    check_tally("tally", suite, tally)
    return Evaluation(results_of(suite, tally), tally=tally, nonfinite=nonfinite_of(tally))
