"""The commands that run a program again beside its flight log, and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainfold.adapters.cli.terminal.given_options import Json, Patience, RunPath, whole_typed
from trainfold.adapters.cli.terminal.output import Answer, deliver


def replay(  # noqa: PLR0913 - one for each option
    run: RunPath,
    *command: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="Your program and its arguments, after --, as you started the run; {run} in them stands for the copy.",
        ),
    ],
    begin: Annotated[
        int | None,
        Parameter(
            name="--from",
            converter=whole_typed,
            help="The checkpoint to begin with, by its step; 0 for the start of the program; by default the newest before --to, or before the first loss that is not finite, with --until-nonfinite.",
        ),
    ] = None,
    to: Annotated[
        int | None,
        Parameter(
            converter=whole_typed,
            help="The last step; by default the last one of the log, or with --until-nonfinite the one after it.",
        ),
    ] = None,
    until_nonfinite: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Stop in the first step that a NaN or an infinity reaches, and show the first module whose output had it, and what it got.",
        ),
    ] = False,
    directory: Annotated[Path, Parameter(name="--dir", help="Directory for everything that the replay writes.")] = Path(
        "runs/replay"
    ),
    patience: Patience = 600.0,
    json: Json = False,
) -> int:
    """Run your own program again from a checkpoint, in a scratch directory, and compare each step with the flight log of the run.

    The run is only read. CheckpointManager(record=100) writes the log; without one, the state at the last step is compared, if it is saved.

    Exit code 3 means that the replay differs, 45 that the program fails, 48 that it does not go on from the checkpoint.

    Example: trainfold replay runs/a --from 1000 --to 1100 -- python train.py
    """
    from trainfold.adapters.cli.flights.replay_run import replay_run

    return deliver(
        lambda: replay_run(
            run,
            command,
            begin=begin,
            end=to,
            until_nonfinite=until_nonfinite,
            directory=directory,
            patience_secs=patience,
        ),
        as_json=json,
    )


def bisect(  # noqa: PLR0913 - one for each option
    a: RunPath,
    b: RunPath,
    *command: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="The program of A and its arguments, after --: it is run again up to the step, to see which of the runs it repeats. With {run} in it, which stands for the run, B is run again too.",
        ),
    ],
    program_b: Annotated[
        str | None,
        Parameter(
            metavar="COMMAND", help="The program of B, if it is another one, in quotes, such as 'python other.py'."
        ),
    ] = None,
    directory: Annotated[Path, Parameter(name="--dir", help="Directory for what a replay writes.")] = Path(
        "runs/bisect"
    ),
    patience: Patience = 600.0,
    json: Json = False,
) -> int:
    """Find the first step in which two runs part, and why: by their flight logs, then their checkpoints, then a replay.

    Says whether the position, the batch, the settings, the random streams, the state, or only the arithmetic differed; lists the leaves by the size of the
    difference, and what differs in the settings and in the numerical environment.

    Exit code 3 means that they part.

    Example: trainfold bisect runs/a runs/b -- python train.py {run}
    """
    from trainfold.adapters.cli.flights.bisect_runs import bisect_runs
    from trainfold.adapters.cli.flights.scratch_run import check_outside

    def parted() -> Answer:
        if command or program_b:
            check_outside(directory, a, b)
        return bisect_runs(a, b, command, command_b=program_b, directory=directory, patience_secs=patience)

    return deliver(parted, as_json=json)
