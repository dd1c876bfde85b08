"""`ScratchRun`: a copy of a run up to one checkpoint, from which the user's program goes on, watched to its end."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.adapters.cli.flights.read_run import Logs, ReadRun, read_run
from trainfold.adapters.cli.locate import Checkpoint
from trainfold.adapters.cli.rehearse.errors import NeverResumed, ProgramFailed
from trainfold.adapters.cli.rehearse.options import PLACEHOLDER
from trainfold.adapters.cli.rehearse.process import Program
from trainfold.adapters.cli.rehearse.starts import environment_of_programs
from trainfold.adapters.cli.terminal.workplace import Workplace
from trainfold.adapters.flight.replay_orders import NONFINITE_NAME, SUSPECTED_NAME
from trainfold.backends.flight.replay_place import location_of
from trainfold.backends.stores.kept_checkpoint import keep_checkpoint
from trainfold.backends.stores.local import local_store, open_store
from trainfold.backends.stores.place import is_object_url, local_path
from trainfold.backends.tiers.copy_run import copy_run
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.file_names import RUN_FILE, directory_of, step_of
from trainfold.core.printable import quoted
from trainfold.core.rehearsal.entry import RecordedLine
from trainfold.core.rehearsal.orders import RECORD_NAME, VARIABLE, Orders, ReplayOrders, encode_orders

_GRACE_SECS: Final = 60.0
_SHOWN_CHARACTERS: Final = 4000
_LOOKS: Final = "; put {run} into the command where it names the run, if it looks by itself whether that is there"


@final
@attrs.frozen
class ReplayRequest:
    """What is replayed.

    Attributes:
        run: the run.
        begin: the step of the checkpoint from which the program goes on; 0 for its own start.
        end: the step at which it ends.
        command: the program and its arguments; ``{run}`` in them stands for the directory of the replay.
        until_nonfinite: whether it ends at the first module whose output is not finite.
        patience_secs: how long it may be silent before it counts as hanging.
    """

    run: ReadRun
    begin: int
    end: int
    command: tuple[str, ...]
    until_nonfinite: bool = False
    patience_secs: float = 600.0


@final
@attrs.frozen
class ScratchRun:
    """What a program did in a replay.

    Attributes:
        run: the directory of the replay, with its log, if it recorded anything, and its last checkpoint.
        nonfinite: what was not finite, as it was written down; None if all was.
        output: the file with what the program said.
        failure: of the program; None if it did not fail before the last step.
    """

    run: ReadRun
    nonfinite: Mapping[str, Any] | None
    output: Path
    failure: ProgramFailed | None = None


def replay_program(home: Path, request: ReplayRequest) -> ScratchRun:
    """Begin a scratch run with one checkpoint, and run the program on it until its last step. The run itself is only read.

    Args:
        home: a new directory for the replay.
        request: what is replayed.

    Raises:
        CheckpointMissing: if the run has no such checkpoint.
        NeverResumed: if the program did not go on from it.
        ProgramFailed: if it fails by itself, or hangs, before it has done a step.
    """
    home = home.resolve()
    notes, run = home / "notes", home / "run"
    notes.mkdir(parents=True)
    if request.begin:  # else it is not there, as when the program was started first
        run.mkdir()
        _begin(run, request.run.checkpoint(request.begin))
    last = min(request.end, request.run.last)  # which the run may have a checkpoint of
    every = last if last > request.begin else request.end
    orders = Orders(str(home), str(notes), every=every, steps=request.end, linger_after=request.end,
                    replay=ReplayOrders(location_of(request.run.path), request.until_nonfinite))  # fmt: skip
    output = notes / "output.txt"
    program = Program(
        [word.replace(PLACEHOLDER, str(run)) for word in request.command],
        environment={**environment_of_programs(), VARIABLE: encode_orders(orders)},
        record=notes / RECORD_NAME,
        output=output,
        scan=None,
    )
    seen: list[RecordedLine] = []
    with program:
        is_silent = _follow(program, seen, request.patience_secs, is_found=(notes / NONFINITE_NAME).exists)
    nonfinite = json.loads((notes / NONFINITE_NAME).read_text()) if (notes / NONFINITE_NAME).exists() else None
    is_over = any(entry.kind == "done" for entry in seen)
    doubt = ""
    if nonfinite is None and not is_over and not is_silent:
        nonfinite, doubt = _suspected(notes, program.code)
    is_over |= nonfinite is not None
    failure = None
    if is_silent or not (is_over or program.code == 0):
        failure = _failed(output, program.code, doubt, is_silent=is_silent, is_start=not request.begin)
    made = read_run(run, may_be_empty=True)
    if failure is not None and made.last <= request.begin:
        raise failure
    _check_resumed(request, seen, made.flights)
    return ScratchRun(made, nonfinite, output, failure)


def failure_texts(made: ScratchRun, name: str) -> list[str]:
    """What is said of a program that failed after some steps, which count, as the run may have ended so, too.

    Args:
        made: what it did.
        name: of its run, in a sentence.
    """
    if made.failure is None:
        return []
    return [f"the program of {name} failed after step {made.run.last}; what it said is in {made.output}"]


def scratch_place(command: str, noun: str, *more: str) -> Workplace:
    """The directory of a command that runs a program by `replay_program`.

    Args:
        command: its name.
        noun: what it makes, for messages.
        more: names in it of further replays.
    """
    marker, lock = f"{command}.json", f"{command}.lock"
    names = frozenset({marker, lock, "run", "notes", "managers", *more})
    return Workplace(f"trainfold {command}", noun, "--dir", marker, lock, names)


def check_outside(directory: Path, *runs: Path) -> None:
    """Refuse a directory of a command that is in a run, or that has one in it: the command writes there, and empties it.

    Raises:
        InvalidArgument: if it is.
    """
    place = Path(local_path(str(directory), argument="--dir")).resolve()
    for run in runs:
        if is_object_url(str(run)):
            continue
        real = Path(local_path(str(run))).resolve()
        if place.is_relative_to(real) or real.is_relative_to(place):
            raise InvalidArgument("--dir", expected="a directory apart from the run, which is only read", found=f"{directory}, and the run {run}",
                                  fix="name another one, such as --dir runs/scratch")  # fmt: skip


def serves_any_run(command: Sequence[str]) -> bool:
    """Whether a command takes the run as an argument, so that it can train any."""
    return any(PLACEHOLDER in word for word in command)


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """The program to run.

    Raises:
        InvalidArgument: if there is none, or it cannot be started.
    """
    if not command or shutil.which(command[0]) is None:
        raise InvalidArgument("COMMAND", expected="a command after --, such as -- python train.py", found=repr(" ".join(command)),
                              fix="name your program as you started the run")  # fmt: skip
    return tuple(command)


def _begin(run: Path, checkpoint: Checkpoint) -> None:
    """Put a checkpoint into an empty run, with those that it refers to: as links, or as copies from a bucket or another filesystem."""
    near = local_store(checkpoint.store)
    if near is None:
        copy_run(open_store(checkpoint.store.url), run, steps=[step_of(checkpoint.name) or 0])
        return
    source = Path(near.url).absolute()
    for name in sorted({checkpoint.name, *(file.checkpoint for file in checkpoint.manifest.references)}):
        if keep_checkpoint(source / name, run) is None:
            shutil.copyfile(source / RUN_FILE, run / RUN_FILE)
            shutil.copytree(source / name, run / name)


def _follow(program: Program, seen: list[RecordedLine], patience_secs: float, is_found: Callable[[], bool]) -> bool:
    """Read what it records until it ends; returns whether it was silent for too long."""
    for entry in program.entries(patience_secs=patience_secs):
        if entry is None:
            return True
        seen.append(entry)
        if entry.kind == "done":
            break
    if is_found():
        program.kill()
        return False
    late = time.monotonic() + _GRACE_SECS
    for entry in program.entries(patience_secs=_GRACE_SECS):
        if entry is None or time.monotonic() > late:
            program.kill()
            break
    return False


def _suspected(notes: Path, code: int) -> tuple[dict[str, Any] | None, str]:
    """What was not finite in the step in which a program ended by `os._exit` or a signal: a module before a parameter, and then the rank that saw it first.

    Infinities that may be by design do not explain why it failed: they are only said with that, as a doubt.
    """
    places = sorted(notes.glob(SUSPECTED_NAME.format("*")), key=lambda each: each.stat().st_mtime_ns)
    found: list[dict[str, Any]] = [json.loads(each.read_text()) for each in places]
    first = min(found, key=lambda each: (each["is_doubtful"], each["output"] is None), default=None)
    if first is None:
        return None, ""
    if first["is_doubtful"] and code:
        return None, f" in its first step, where {first['text'].splitlines()[0]}, maybe by design"
    text = f"{first['text']}\nthe program ended without its exit handlers, with exit code {code}"
    return {**first, "text": text}, ""


def _check_resumed(request: ReplayRequest, seen: Sequence[RecordedLine], flights: Logs) -> None:
    """By the first step in its log, which begins empty; or by what its managers say, which do not know of a `trainfold.load`."""
    starts = [entry for entry in seen if entry.kind == "start"]
    first = min((step for flight in flights.values() for step in flight.steps), default=None)
    if first == request.begin + 1:
        return
    if request.begin and not any(entry.data["resumed_from"] == directory_of(request.begin) for entry in starts):
        places = sorted({str(entry.data["place"]) for entry in starts})
        raise NeverResumed(
            "the program",
            expected=f"one that goes on from {request.run.path}/{directory_of(request.begin)}",
            found=f"one whose managers save into {', '.join(places)}"
            if places
            else "one that makes no manager, and records no step with FlightLog"
            if first is None
            else f"one that makes no manager, and whose log begins at step {first}",
            fix="name the run as the program does; or put {run} into the command where it names it; and call manager.restore(live), or trainfold.load, before the loop",
        )


def _failed(output: Path, code: int, doubt: str, *, is_silent: bool, is_start: bool) -> ProgramFailed:
    said = ""
    with contextlib.suppress(OSError):
        said = output.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:]
    return ProgramFailed(
        "the program",
        expected="a program that ends with exit code 0",
        found=f"{'a silent one' if is_silent else f'exit code {code}{doubt}'}, saying:\n{quoted(said)}\n",
        fix=f"start it as the run was started{_LOOKS if is_start else ''}; all that it said is in {output}",
    )
