"""What a run does sooner or later and did not do in a rehearsal."""

from trainfold.adapters.cli.rehearse.findings import Rehearsed
from trainfold.adapters.cli.rehearse.moments import saves_between


def not_rehearsed(rehearsed: Rehearsed) -> list[str]:
    """What a run does sooner or later and did not do here. The tables list it, because its absence is easy to overlook."""
    return [*_saves_not_hit(rehearsed), *_epochs_not_seen(rehearsed), *_samples_not_counted(rehearsed)]


def _saves_not_hit(rehearsed: Rehearsed) -> list[str]:
    saved = sorted({step for _, step in rehearsed.whole.stretch.saved})
    if (
        rehearsed.kills == 0
        or saves_between(saved)
        or not any(entry.kind == "save" for entry in rehearsed.whole.entries)
    ):
        return []
    steps = rehearsed.settings.steps
    return [
        f"a kill during a save, because there was none between the first and the last: pass --every {max(1, steps // 3)} or less"
    ]


def _epochs_not_seen(rehearsed: Rehearsed) -> list[str]:
    whole = rehearsed.whole
    epochs = {entry.step: entry.data["epoch"] for entry in whole.entries if "epoch" in entry.data}
    resumed = [start.stretch.resumed_at for start in rehearsed.killed if start.stretch.is_resumed]
    if not epochs or not resumed or not any("dataset" in saved.components for saved in whole.stretch.saved.values()):
        return []
    if len(set(epochs.values())) == 1:
        return [f"an epoch's end, which takes more than {whole.stretch.last_step} steps: pass more --steps"]
    if all(epochs.get(step) != epochs.get(step - 1, 0) for step in resumed):
        every = rehearsed.settings.every
        other = every - 1 if every > 1 else 2
        return [f"a resume inside an epoch, because each was at the end of one: pass another --every, such as {other}"]
    return []


def _samples_not_counted(rehearsed: Rehearsed) -> list[str]:
    if not rehearsed.settings.is_resized or rehearsed.has_position:
        return []
    why = (
        "each rank has a position of its own: use"
        if "dataset" in rehearsed.of_ranks
        else "no loader is attached: attach one with"
    )
    return [
        f"that each sample is read once on another number of ranks, because {why} a trainfold.data.GlobalBatchSampler"
    ]
