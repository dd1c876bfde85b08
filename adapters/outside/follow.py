"""`take_followers`: components that come from the checkpoint that the weights of a run have come from, such as a tokenizer."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.runs.load import load_run
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_files import HubFiles
from trainfold.core.checks import names_given
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.request import resume_request
from trainfold.core.state.state import TrainState
from trainfold.core.weights.several.source_text import described, sources_in


class _Run(Protocol):
    """What of a live run is needed here."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def attached(self) -> Mapping[str, Any]: ...

    def capture(self) -> TrainState: ...

    def restore(self, state: TrainState, *, components: Sequence[str], collectives: Collectives) -> None: ...


def check_follow(run: _Run, names: Any, source: object, saved: Collection[str] | None) -> tuple[str, ...]:
    """The components that follow the weights of a source.

    Args:
        run: that begins with these weights.
        names: as they were given.
        source: of the weights; None for none.
        saved: the components that checkpoints of the run have; None for all.

    Raises:
        InvalidArgument: for a name of something else than a component under ``extra``, or of one that checkpoints would not have; or for a source that is not one checkpoint.
    """
    chosen = names_given(names) or ()
    files = _hub_files(run)
    empty = [name for name, each in files.items() if not each.names and name not in chosen]
    if empty and _directories(source):
        raise InvalidArgument("restore.follow", expected=f"{empty[0]!r} among the components that follow the weights: its files are not taken yet", found=list(chosen),
                              fix=f"pass follow=[{empty[0]!r}], or call take(directory) of it before the restore")  # fmt: skip
    if not chosen:
        return ()
    odd = [name for name in chosen if name not in run.names or (saved is not None and name not in saved)]
    if odd:
        raise InvalidArgument(
            "restore.follow", expected=f"components under extra that checkpoints have, among {sorted(run.names)}", found=odd,
            fix="attach it under extra=; counters, position, optimizer and streams of another run are never taken: this run begins")  # fmt: skip
    checkpoints = _checkpoints(source)
    if _directories(source) and not [name for name in chosen if name not in files]:
        return chosen
    if len(checkpoints) != 1:
        raise InvalidArgument(
            "restore.follow",
            expected="weights from one checkpoint, from which these components come too",
            found=" and ".join(map(described, checkpoints)) or "no CheckpointWeights",
            fix="pass initial=trainfold.weights.CheckpointWeights(run), or leave follow= out and build them in the script; a tokenizer of a hub directory "
            "follows as trainfold.weights.HubFiles()",
        )
    return chosen


def take_followers(run: _Run, names: Sequence[str], source: object, world: Collectives) -> None:
    """Restore components of a live run from the checkpoint that its weights have come from; every rank calls.

    Args:
        run: whose weights were taken.
        names: as `check_follow` returns them.
        source: of the weights, pinned.
        world: the ranks.

    Raises:
        ResumeRefused: if that checkpoint does not have them, or in another form.
        InvalidState: if files are to follow, and not exactly one hub directory of the source has them.
    """
    files = _hub_files(run) if _directories(source) else {}
    for name in names:
        if name in files:
            on_all_ranks(world, partial(_take_files, name, files[name], source), doing="take files beside the weights")
    names = [name for name in names if name not in files]
    if not names:
        return
    (checkpoint,) = _checkpoints(source)
    captured = run.capture()
    settings = tuple(f"attached.{name}." for name in names)
    like = TrainState(
        extra={name: captured.extra[name] for name in names},
        contract={key: value for key, value in captured.contract.items() if key.startswith(settings)},
    )
    request = resume_request(step=checkpoint.step, components=names)
    loaded = load_run(checkpoint.run, like=like, request=request, contract=None, collectives=world)
    run.restore(loaded.state, components=names, collectives=world)


def _checkpoints(source: object) -> list[CheckpointWeights]:
    """The checkpoints in a source; each once."""
    found = [each for each in sources_in(source) if isinstance(each, CheckpointWeights)]
    return list({(each.run.url, each.step): each for each in found}.values())


def _directories(source: object) -> list[HubDirectory]:
    return [each for each in sources_in(source) if isinstance(each, HubDirectory)]


def _hub_files(run: _Run) -> dict[str, HubFiles]:
    return {name: each for name, each in run.attached().items() if isinstance(each, HubFiles)}


def _take_files(name: str, files: HubFiles, source: object) -> None:
    having = [each for each in _directories(source) if files.has_in(each)]
    if len({repr(each) for each in having}) > 1:
        raise InvalidState(name, expected="one directory with such files, among those of the weights", found=" and ".join(map(repr, having)),
                           fix="leave follow= out, and call take(directory) of it")  # fmt: skip
    files.take(next(iter(having), _directories(source)[0]))
