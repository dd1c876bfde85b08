"""`FreshStart`: what a run without checkpoints begins with, as a value that prints. `plan_start`: the decision, before anything is read."""

from collections.abc import Mapping
from typing import Final, final

import attrs

from trainfold.core.errors import TrainfoldError
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.markup.html_table import html_table, notebook
from trainfold.core.printable import printable
from trainfold.core.problem import Problem, problem_of
from trainfold.core.state.components import components_of
from trainfold.core.state.state import OptimizerState, TrainState
from trainfold.core.weights.asked import asked_of
from trainfold.core.weights.several.cover import Coverage, cover
from trainfold.core.weights.several.several_sources import specs_of
from trainfold.core.weights.several.source_text import pinned
from trainfold.core.weights.source import WeightSource

_AS_IT_IS: Final = "as the script has it"
_MASTERS: Final = "as the script has it, with masters of these weights"


@final
@attrs.frozen
class FreshStart:
    """What a run without checkpoints begins with: weights of a source, and all else as the script has it. Prints as a list.

    Attributes:
        run: the location of the run.
        weights: which source each tensor of the model comes from.
        size_bytes: the size of the tensors that come from sources.
        others: every other component -> what it begins with.
    """

    run: str
    weights: Coverage
    size_bytes: int
    others: Mapping[str, str]

    @property
    def step(self) -> int:
        """The step from which the run continues."""
        return 0

    def __str__(self) -> str:
        rows = [f"{name:12} {what}" for name, what in self._rows()]
        return "\n".join(map(printable, [f"begin {self.run} at step 0, {self.size_bytes:,} bytes of weights", *rows]))

    def _repr_html_(self) -> str:
        return notebook(html_table(f"begin {self.run} at step 0", ("", ""), self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        order = "a step that is asked for: none; checkpoints of the run: none; initial: taken"
        weights = [("model", str(each)) for each in self.weights.uses]
        return [("in order", order), *weights, *self.others.items()]


def plan_start(run: str, state: TrainState, source: WeightSource) -> FreshStart | tuple[Problem, ...]:
    """Decide what a run begins with that has no checkpoint, or name every reason why it cannot.

    Args:
        run: where it is.
        state: of the run, with a model. Values are not read.
        source: of its weights, which is asked what it has. Nothing else of it is read.

    Examples:
        >>> import torch
        >>> from trainfold import attach
        >>> from trainfold.weights import ByScript, SeveralSources
        >>> state = attach(torch.nn.Linear(2, 1)).capture()
        >>> print(plan_start("runs/a", state, SeveralSources([ByScript()])))
        begin runs/a at step 0, 0 bytes of weights
        in order     a step that is asked for: none; checkpoints of the run: none; initial: taken
        model        ByScript(): 2 tensors
        trainer      as the script has it
        rng          as the script has it
    """
    assert state.model is not None, "checked by the caller"
    outside = state.origin.frozen
    leaves = {**state.model.params, **state.model.buffers}
    wanted = asked_of({name: each for name, each in leaves.items() if name not in outside}, state.model.ties)
    try:
        found = pinned(source)
        specs = specs_of(found)
        coverage = cover(specs, wanted)
    except TrainfoldError as error:
        return (problem_of(error),)
    if coverage.problems:
        return tuple(map(problem_of, coverage.problems))
    taken = [wanted[name] for name in coverage.sources if name not in coverage.by_script]
    optimizer = state.optimizer
    has_masters = isinstance(optimizer, OptimizerState) and optimizer.masters is not None
    others = {name: _MASTERS if name == "optimizer" and has_masters else _AS_IT_IS for name in components_of(state)}
    del others["model"]
    return FreshStart(run, coverage, sum(size_bytes(each.dtype, each.shape) for each in taken), others)
