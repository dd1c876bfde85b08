"""The charts of a run's page: the time line, the saves, the lineage, and curves over steps."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from trainfold.core.history.inventory import Inventory
from trainfold.core.markup.chart import Axis, Chart, Point, Series
from trainfold.core.markup.curve import Curve
from trainfold.core.markup.texts import count_text, moment_text, number_text, secs_text, ticks
from trainfold.core.markup.timelines import step_axis
from trainfold.core.page.save_times import SaveTimes
from trainfold.core.page.sessions import Session, again_text

MOST_MARKS: Final = 400  # of saves; more share a bar
_DAY: Final = 86_400
_FARTHEST: Final = 1e300  # beyond it a value is drawn at the edge
_UNITS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800)  # fmt: skip


def time_line(sessions: Sequence[Session], saves: Sequence[SaveTimes]) -> Chart:
    """Steps over time: a line for each process, a square where it was killed, a dot for each save."""
    begin, end = sessions[0].began_at, max(session.ended_at for session in sessions)
    highest = max([session.last for session in sessions] + [save.step for save in saves])
    lines = tuple(tuple(_thinned([*session.moments, *_end(session)])) for session in sessions)
    again = tuple(
        ((before.ended_at, float(before.at_end)), (after.began_at, float(after.first)))
        for before, after in itertools.pairwise(sessions)
    )
    kills = tuple(((each.ended_at, float(each.at_end)),) for each in sessions if each.ending in ("killed", "raised"))
    dots = tuple(((save.called, float(save.step)),) for save in _spread(saves))
    count = sum(session.ending == "killed" for session in sessions)
    text = (
        f"{len(sessions):,} {'process' if len(sessions) == 1 else 'processes'} in {secs_text(max(0.0, end - begin))}, up to step {highest:,}; {count_text(count, 'kill')}; "
        f"{again_text(sessions)} computed again. The table below has each of them."
    )
    marks = (
        Series("back to a checkpoint", "dashed", "quiet", again),
        Series("training", "line", "accent", lines),
        Series("save", "dots", "accent", dots),
        Series("killed, or ended by an exception", "squares", "warm", kills),
    )
    times = _time_axis(*_extent(marks))  # by clocks that may go back
    return Chart("Steps over time", text, times, _axis(0, highest, f"step; {times.name}"), marks)


def _end(session: Session) -> list[Point]:
    return [(session.ended_at, session.at_end)] if session.ended_at > session.moments[-1][0] else []


def save_chart(saves: Sequence[SaveTimes]) -> Chart:
    """How long the loop stood still in each save, and how long it took until the save was durable."""
    timed = [save for save in saves if save.durable is not None]
    shown = _slowest(timed)
    longest = max((save.durable_secs or 0.0 for save in timed), default=0.0)
    longest = max(longest, max((save.stall_secs for save in timed), default=0.0)) or 1.0
    durable = tuple(((float(save.step), 0.0), (float(save.step), save.durable_secs or 0.0)) for save in shown)
    stalls = tuple(((float(save.step), 0.0), (float(save.step), save.stall_secs)) for save in shown)
    factor, unit = (1000.0, "milliseconds") if longest < 1 else (1.0, "seconds")
    stall = sum(save.stall_secs for save in timed)
    text = (
        f"{count_text(len(timed), 'save')}: the loop stood still for {secs_text(stall)} in all, and the slowest took {secs_text(longest)} until it was "
        "durable. The table below has the newest."
    )
    low, high = min(save.step for save in timed), max(save.step for save in timed)
    y = Axis(0.0, longest * 1.05, tuple((at / factor, number_text(at)) for at in ticks(0, longest * factor * 1.05, most=5)), f"{unit} after the call")  # fmt: skip
    marks = (
        Series("until it was durable", "bars", "soft", durable),
        Series("the loop stood still", "bars", "warm", stalls),
    )
    return Chart("Saves by step", text, step_axis(low, high, pad=True), y, marks, height=180)


def curve_chart(  # noqa: PLR0913 - what one chart may show
    title: str, curve: Curve, *, dots: Sequence[Point] = (), best: Point | None = None, name: str = "loss", others: Sequence[Curve] = (), left: Sequence[Point] = ()
) -> Chart:  # fmt: skip
    """A curve over steps, where steps without a finite value are marks at the foot; evaluations are dots, the best is a square, and curves of other ranks are dashed.

    Law: each mark lies between the ends of both axes.

    Args:
        title: the heading.
        curve: with a finite value.
        dots: evaluations.
        best: one of them.
        name: what the values are.
        others: curves of other ranks.
        left: evaluations of states that a resume has left behind.
    """
    squares = [best] if best else []
    values = [
        value
        for _, value in (*curve.points, *dots, *squares, *left, *(point for each in others for point in each.points))
    ]
    beside = tuple(_drawn(each.points) for each in others)
    (_, low), (_, high) = _drawn([(0, min(values)), (0, max(values))])
    if high == low:
        low, high = low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    room = (high - low) / 20
    y = Axis(low - room, high + room, tuple((at, number_text(at)) for at in ticks(low - room, high + room, most=5)), name)  # fmt: skip
    foot = low - room
    bad = tuple(((float(step), foot),) for step in curve.not_finite)
    since = curve.not_finite_since
    to_the_end = () if since is None or curve.last is None else (((float(since), foot), (float(curve.last[0]), foot)),)
    marks = (
        Series("other ranks", "dashed", "quiet", beside),
        Series(
            (f"{name} of rank 0" if beside else name) if dots or best or bad or beside else "",
            "line",
            "accent",
            (_drawn(curve.points),),
        ),
        Series("evaluation of a state that was left behind", "dots", "quiet", tuple((at,) for at in _drawn(left))),
        Series("evaluation", "dots", "good", tuple((point,) for point in _drawn(dots))),
        Series("the best", "squares", "ink", (_drawn(squares),) if best else ()),
        Series("", "wide", "warm", to_the_end),
        Series("not finite", "squares", "warm", bad),
    )
    first, last = _extent(marks)
    text = f"{title}, steps {int(first):,} to {int(last):,}: {_ends(curve)}at least {number_text(min(values))}, at most {number_text(max(values))}."
    return Chart(title, text, step_axis(first, last), y, marks)


def _ends(curve: Curve) -> str:
    """The first finite value, and the last one, whatever that is, in words."""
    if not curve.points or curve.last is None:
        return ""
    since = "" if curve.not_finite_since is None else f" (not finite since step {curve.not_finite_since:,})"
    return f"from {number_text(curve.points[0][1])} to {number_text(curve.last[1])}{since}, "


def _extent(marks: Sequence[Series]) -> tuple[float, float]:
    """The least and the largest place of all marks on the axis below."""
    places = [x for mark in marks for part in mark.parts for x, _ in part]
    return min(places), max(places)


def _drawn(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points where a picture has them: their differences, and a margin around them, must be numbers too."""
    return tuple((float(step), float(min(max(value, -_FARTHEST), _FARTHEST))) for step, value in points)


def _axis(low: float, high: float, name: str) -> Axis:
    return Axis(low, max(high, low + 1), tuple((at, number_text(at)) for at in ticks(low, max(high, low + 1), most=5)), name)  # fmt: skip


def _time_axis(begin: float, end: float) -> Axis:
    """Moments at round times: the first with its date, the others with what differs from the one before."""
    span = max(end - begin, 1.0)
    unit = next((each for each in _UNITS if span / each <= 6), _UNITS[-1] * max(1, round(span / _UNITS[-1] / 6)))
    at = begin - begin % unit + unit
    moments = [begin]
    while at < begin + span:
        if at - begin > span / 8:
            moments.append(at)
        at += unit
    texts = [moment_text(each, with_secs=unit < 60).split(" ") for each in moments]
    days = [date for date, _ in texts]
    labels = []
    for place, (each, (date, clock)) in enumerate(zip(moments, texts, strict=True)):
        is_new = len({*days}) > 1 and (place == 0 or date != days[place - 1])
        labels.append((each, date[5:] if unit >= _DAY else f"{date[5:]} {clock}" if is_new else clock))
    return Axis(begin, begin + span, tuple(labels), f"{days[0]}, UTC" if len({*days}) == 1 else f"from {days[0]}, UTC")


def _thinned(points: Sequence[tuple[float, float]]) -> list[Point]:
    """At most `MOST_MARKS` of the points, with both ends."""
    stride = -(-len(points) // MOST_MARKS)
    return [(at, float(step)) for place, (at, step) in enumerate(points) if place % stride == 0 or place == len(points) - 1]  # fmt: skip


def _spread(saves: Sequence[SaveTimes]) -> list[SaveTimes]:
    done = [save for save in saves if save.outcome not in ("skipped", "failed")]
    return done[:: -(-len(done) // MOST_MARKS) or 1]


def _slowest(saves: Sequence[SaveTimes]) -> list[SaveTimes]:
    """Of so many neighbours as share a bar, the one that stalled longest, and the one that took longest."""
    size = -(-len(saves) // MOST_MARKS)
    if size <= 1:
        return list(saves)
    keys: tuple[Callable[[SaveTimes], float], ...] = (lambda save: save.stall_secs, lambda save: save.durable_secs or 0.0)  # fmt: skip
    found: list[SaveTimes] = []
    for start in range(0, len(saves), size):
        bucket = saves[start : start + size]
        found += dict.fromkeys(max(bucket, key=key) for key in keys)
    return found


def lineage_name(inventory: Inventory) -> str:
    """The last part of a run's location, as the heading of its page.

    Examples:
        >>> lineage_name(Inventory("s3://bucket/runs/a/", "r", ()))
        'a'
    """
    return inventory.run.rstrip("/").rpartition("/")[2] or inventory.run
