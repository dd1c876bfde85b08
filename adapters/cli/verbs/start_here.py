"""The commands that show what this is for: `demo` and `rehearse`, and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainfold.adapters.cli.terminal.given_options import (
    Json,
    Patience,
    numbers_typed,
    whole_typed,
)
from trainfold.adapters.cli.terminal.output import Answer, deliver


def demo(  # noqa: PLR0913 - one for each option
    *,
    steps: Annotated[int, Parameter(converter=whole_typed, help="Optimizer steps of each of the two runs.")] = 80,
    seed: Annotated[
        int, Parameter(converter=whole_typed, help="Seed of weights, dropout, data order and the times of the kills.")
    ] = 0,
    run: Annotated[Path, Parameter(help="Directory for everything that the demo writes.")] = Path("runs/demo"),
    donate: Annotated[bool, Parameter(help="Let each step write into the storage of the state before it.")] = True,
    nproc: Annotated[
        int,
        Parameter(
            converter=whole_typed,
            help="Train each run on so many processes, by torchrun: 1, 2, 4 or 8. A kill hits all.",
        ),
    ] = 1,
    json: Json = False,
) -> int:
    """Train a small GPT twice, kill the second run with SIGKILL at random times, and compare the bits.

    Takes about a minute on two cores. The text is the help of Python itself, so nothing is downloaded. Exit code 40 means
    that the runs differ, 41 that the kills missed, 42 that a run failed by itself, 43 that an evaluation depended on its batch size.
    """
    from trainfold.adapters.cli.demo.command import run_demo
    from trainfold.adapters.cli.demo.settings import make_settings

    def answer() -> Answer:
        settings = make_settings(steps=steps, seed=seed, donate=donate, nproc=nproc)
        import torch  # noqa: F401 - the processes of the demo need it, and would fail one by one

        return run_demo(run, settings)

    return deliver(answer, as_json=json)


def rehearse(  # noqa: PLR0913 - one for each option
    *command: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="Your program and its arguments, after --; {run} in them stands for a new directory for each run.",
        ),
    ],
    steps: Annotated[int, Parameter(converter=whole_typed, help="Optimizer steps after which the program ends.")] = 40,
    kills: Annotated[int, Parameter(converter=whole_typed, help="How often the last run is killed.")] = 3,
    every: Annotated[
        int | None, Parameter(converter=whole_typed, help="Steps between two saves; by default an eighth of --steps.")
    ] = None,
    seed: Annotated[int, Parameter(converter=whole_typed, help="Seed of the times of the kills.")] = 0,
    tolerance: Annotated[
        float | None,
        Parameter(
            help="For a program that does not repeat itself: how far apart values may be after a resume, such as 1e-3."
        ),
    ] = None,
    patience: Patience = 600.0,
    nproc: Annotated[
        tuple[int, ...] | None,
        Parameter(
            converter=numbers_typed,
            n_tokens=1,
            metavar="INT[,INT...]",
            help="Start the program on so many processes, by torchrun; kill all, or one of them. With 3,2 each resume changes the number.",
        ),
    ] = None,
    directory: Annotated[
        Path, Parameter(name="--dir", help="Directory for everything that the rehearsal writes.")
    ] = Path("runs/rehearsal"),
    json: Json = False,
) -> int:
    """Run your own program, kill it with SIGKILL at random times, resume it, and compare every bit.

    The program runs unchanged: once whole, once more to see whether it repeats itself, and once killed and resumed. Only for these runs,
    its managers save at another cadence and into another directory. Call live.record(loss=loss) in it to compare values too.

    Exit code 44 means that it resumes differently, 45 that it fails by itself, 46 that it does not repeat itself, 47 that it saved nothing,
    48 that it never resumed.

    Example: trainfold rehearse --steps 40 --kills 3 -- python train.py --out {run}
    """
    from trainfold.adapters.cli.rehearse.options import make_settings
    from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal

    def answer() -> Answer:
        settings = make_settings(
            command,
            steps=steps,
            kills=kills,
            every=every,
            seed=seed,
            tolerance=tolerance,
            patience_secs=patience,
            nproc=nproc,
        )
        return run_rehearsal(directory, settings)

    return deliver(answer, as_json=json)
