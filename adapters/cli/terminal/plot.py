"""Draws the curves of two runs as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainfold.core.errors import TrainfoldError


class PlotMissing(TrainfoldError):
    """No picture can be drawn, because matplotlib is not installed."""


def draw_losses(  # noqa: PLR0913 - keywords
    path: Path,
    *,
    uninterrupted: Mapping[int, float],
    killed: Sequence[Mapping[int, float]],
    kills: Sequence[tuple[int, str]],
    verdict: str,
    label: str,
) -> None:
    """Draw the values of both runs over each other, and a line at each kill.

    Args:
        path: of the PNG to write.
        uninterrupted: step -> value.
        killed: step -> value, of each process of the run that was killed.
        kills: (steps done, ``"step"`` or ``"save"``) of each.
        verdict: what the title says.
        label: what the values are.

    Raises:
        PlotMissing: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PlotMissing(
            str(path), expected="matplotlib", found="no such package", fix="pip install 'trainfold[plot]'"
        ) from missing
    figure = Figure(
        figsize=(9, 5), dpi=120, layout="constrained"
    )  # no pyplot: it has global state and needs no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_points(uninterrupted), color="#9ecae1", linewidth=7, solid_capstyle="round", label="never killed")
    for number, values in enumerate(killed):
        once = "killed and resumed" if number == 0 else None
        axes.plot(*_points(values), color="#08306b", linewidth=1.6, marker="." if len(values) < 2 else None, label=once)
    for kind, colour, style in (("step", "#d62728", "--"), ("save", "#ff7f0e", "-")):
        steps = [step for step, during in kills if during == kind]
        for number, step in enumerate(steps):
            once = f"SIGKILL during a {kind}" if number == 0 else None
            axes.axvline(step, color=colour, linestyle=style, linewidth=1.2, label=once)
    axes.set_title(f"One training run, {len(kills)} times killed: {verdict}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(losses)
    return steps, [losses[step] for step in steps]
