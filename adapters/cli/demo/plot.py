"""The two loss curves as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainfold.core.errors import TrainfoldError


class PlotMissing(TrainfoldError):
    """Nothing can be drawn here: matplotlib is not installed."""


def draw_losses(
    path: Path,
    *,
    uninterrupted: Mapping[int, float],
    killed: Mapping[int, float],
    kills: Sequence[tuple[int, str]],
    identical: bool,
) -> None:
    """Draw the losses of both runs over each other, and a line at each kill.

    Args:
        path: of the PNG to write.
        uninterrupted: step -> loss.
        killed: step -> loss.
        kills: (steps done, ``"step"`` or ``"save"``) of each.
        identical: what the title says.

    Raises:
        PlotMissing: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PlotMissing(
            str(path), expected="matplotlib", found="no such package", mend="pip install 'trainfold[plot]'"
        ) from missing
    figure = Figure(
        figsize=(9, 5), dpi=120, layout="constrained"
    )  # no pyplot: it has global state and needs no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_points(uninterrupted), color="#9ecae1", linewidth=7, solid_capstyle="round", label="never killed")
    axes.plot(*_points(killed), color="#08306b", linewidth=1.6, label="killed and resumed")
    for kind, colour, style in (("step", "#d62728", "--"), ("save", "#ff7f0e", "-")):
        steps = [step for step, during in kills if during == kind]
        for number, step in enumerate(steps):
            label = f"SIGKILL during a {kind}" if number == 0 else None
            axes.axvline(step, color=colour, linestyle=style, linewidth=1.2, label=label)
    verdict = "the same bits" if identical else "NOT the same"
    axes.set_title(f"One training run, {len(kills)} times killed: {verdict}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(losses)
    return steps, [losses[step] for step in steps]
