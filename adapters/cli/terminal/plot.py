"""Draws pictures: the loss curves of two runs, and the steps of a loop beside a save."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainfold.core.errors import TrainfoldError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval: TypeAlias = tuple[int, float, float]
"""A step's number, and when it began and ended, in seconds."""

_LIGHT, _DARK, _RED, _ORANGE = "#9ecae1", "#08306b", "#d62728", "#ff7f0e"


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
    """Draw the values of one run over those of the other, and a line at each kill.

    Args:
        path: of the PNG to write.
        uninterrupted: step -> value.
        killed: step -> value, for each process of the run that was killed.
        kills: (steps done, ``"step"`` or ``"save"``) of each kill.
        verdict: the end of the title.
        label: what the values are.

    Raises:
        PlotMissing: if matplotlib is not installed.
    """
    figure = _figure(path, height=5)
    axes = figure.add_subplot()
    axes.plot(*_points(uninterrupted), color=_LIGHT, linewidth=7, solid_capstyle="round", label="never killed")
    for number, values in enumerate(killed):
        once = "killed and resumed" if number == 0 else None
        axes.plot(*_points(values), color=_DARK, linewidth=1.6, marker="." if len(values) < 2 else None, label=once)
    for kind, colour, style in (("step", _RED, "--"), ("save", _ORANGE, "-")):
        steps = [step for step, during in kills if during == kind]
        for number, step in enumerate(steps):
            once = f"SIGKILL during a {kind}" if number == 0 else None
            axes.axvline(step, color=colour, linestyle=style, linewidth=1.2, label=once)
    axes.set_title(f"One training run, killed {len(kills)} times: {verdict}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, loc="upper right")
    figure.savefig(path)


def draw_timelines(path: Path, lanes: Sequence[tuple[str, Interval, Sequence[Interval]]]) -> None:
    """Draw the steps of a loop above one of its saves, in a lane for each loop; each lane has its own scale of time.

    Args:
        path: of the PNG to write.
        lanes: title, save, and the steps around it; each counts its seconds from the beginning of its save.

    Raises:
        PlotMissing: if matplotlib is not installed.
    """
    figure = _figure(path, height=1.9 * len(lanes))
    for row, (title, save, steps) in enumerate(lanes):
        _draw_lane(figure.add_subplot(len(lanes), 1, row + 1), title, save, steps)
    figure.axes[-1].set_xlabel("seconds since the save began")
    figure.savefig(path)


def _draw_lane(axes: "Axes", title: str, save: Interval, steps: Sequence[Interval]) -> None:
    number, start, stop = save
    axes.axvspan(start, stop, color=_ORANGE, alpha=0.12, linewidth=0)
    axes.broken_barh([(start, stop - start)], (0, 0.8), color=_ORANGE)
    axes.broken_barh([(s, e - s) for _, s, e in steps], (1, 0.8), facecolor=_DARK, edgecolor="white", linewidth=1.5)
    for step, s, e in steps:
        axes.text((s + e) / 2, 1.38, str(step), color="white", fontsize=8, ha="center", va="center", clip_on=True)
    axes.text(stop, 0.4, f" step {number} is durable", fontsize=8, va="center")
    axes.set_yticks([0.4, 1.4], ["save", "steps"])
    axes.set_ylim(-0.2, 2.0)
    axes.tick_params(left=False)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _figure(path: Path, *, height: float) -> "Figure":
    """A figure without pyplot, which has global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PlotMissing(
            str(path), expected="matplotlib", found="no such package", fix="pip install 'trainfold[plot]'"
        ) from missing
    figure = Figure(figsize=(9, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(losses)
    return steps, [losses[step] for step in steps]
