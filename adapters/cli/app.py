"""The commands and their arguments. Each command has its own module, imported when the command runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import CycloptsError
from cyclopts.validators import Number

from trainfold import __version__
from trainfold.adapters.cli.completion import Shell, script_of
from trainfold.adapters.cli.flights.flight_commands import bisect, replay
from trainfold.adapters.cli.formats.commands import AnyPath, Key, convert, files, link
from trainfold.adapters.cli.locate import has_other_format
from trainfold.adapters.cli.misuse import no_command, package_missing, usage_error
from trainfold.adapters.cli.terminal.given_options import (
    DURATION,
    NAMES,
    CheckpointPath,
    Components,
    Json,
    Patience,
    RunPath,
    numbers_typed,
    whole_typed,
)
from trainfold.adapters.cli.terminal.output import (
    INTERRUPTED,
    Answer,
    OutputFailed,
    PackageMissing,
    Screen,
    UsageError,
    deliver,
    give_up,
)

_START, _LOOK, _TRUST = (
    Group("Start here", sort_key=1),
    Group("Look at runs and checkpoints", sort_key=2),
    Group("Before you rely on one", sort_key=3),
)
_CHANGE = Group("Change a run", sort_key=4)
_FORMATS = Group("From one format to another", sort_key=5)
_SHELL = Group("For shells and programs", sort_key=6)
_KEEP = Group("What stays: what any rule wants", sort_key=9)
_CADENCE = Group(
    "How often to save", help="Give three durations to see the cadence that loses the least time.", sort_key=9
)

Steps = Annotated[
    tuple[int, ...] | None,
    Parameter(
        converter=numbers_typed,
        n_tokens=1,
        metavar="INT[,INT...]",
        help="Take these steps; by default all whole checkpoints.",
    ),
]

app = App(
    name="trainfold",
    version=__version__,
    version_flags=["--version", "-V"],
    help=(
        "Training runs that can be killed at any time and end with the same bits.\n\n"
        "A run is a directory; each checkpoint in it is a directory `step-...` that is complete if, and only if, it has "
        "a `manifest.json`. Only `prune`, `copy` and `collect` change a run.\n\n"
        "Exit codes: 0 success; 2 the command line is wrong; 3 `diff` found differences; 4 the output cannot be written; "
        "5 a package is missing; "
        "10 and above: a checkpoint is missing, torn, damaged, foreign or refused, and the message names the fix. With --json, one "
        "object is printed in every case, and its field `error` holds the same message."
    ),
)


@app.command(group=_START)
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


@app.command(group=_START)
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


@app.command(group=_LOOK)
def ls(
    run: RunPath,
    *,
    components: Annotated[
        tuple[str, ...] | None,
        NAMES,
        Parameter(help="List only checkpoints that have these components, such as model,ema."),
    ] = None,
    json: Json = False,
) -> int:
    """List the checkpoints of a run, and what is left of saves that did not finish.

    Reads only the manifests: `verify` finds damaged bytes.
    """
    from trainfold.adapters.cli.ls import list_run

    return deliver(lambda: list_run(run, components=components), as_json=json)


@app.command(group=_LOOK)
def inspect(
    checkpoint: CheckpointPath,
    *,
    tensors: Annotated[bool, Parameter(negative=(), help="List every tensor too.")] = False,
    components: Components = None,
    key: Key = None,
    json: Json = False,
) -> int:
    """Show what a checkpoint holds: components, fingerprints, tensors, files, the contract of its run."""
    from trainfold.adapters.cli.inspect import inspect_checkpoint

    def answer() -> Answer:
        if key is not None or (components is None and has_other_format(checkpoint)):
            from trainfold.adapters.cli.formats.inspect_format import inspect_format

            return inspect_format(checkpoint, tensors=tensors, key=key)
        return inspect_checkpoint(checkpoint, tensors=tensors, components=components)

    return deliver(answer, as_json=json)


@app.command(group=_LOOK)
def page(
    run: RunPath,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="FILE",
            help="The file to write, such as run.html. A page that is there is replaced; any other file is not.",
        ),
    ] = None,
    serve: Annotated[
        bool,
        Parameter(negative=(), help="Follow the run in a browser of this machine, until Ctrl-C, and write no file."),
    ] = False,
    port: Annotated[
        int,
        Parameter(
            converter=whole_typed,
            validator=Number(gte=0, lte=65_535),
            show_default=lambda _: "any free one",
            help="The port of --serve, on 127.0.0.1.",
        ),
    ] = 0,
    json: Json = False,
) -> int:
    """Write one file of HTML that shows a run, and opens offline: starts and kills, losses, saves, checkpoints and why each is kept, bytes.

    It only reads the run. What was recorded with CheckpointManager(..., record=0) is there with its times.

    Example: trainfold page runs/a -o run.html
    """
    from trainfold.adapters.cli.page.write_page import page_command

    return deliver(lambda: page_command(run, output, serves=serve, port=port), as_json=json)


@app.command(group=_LOOK)
def diff(  # noqa: PLR0913 - one for each option
    a: AnyPath,
    b: AnyPath,
    *,
    components: Components = None,
    values: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Read the leaves that differ, and say by how much: in values, and in units in the last place.",
        ),
    ] = False,
    rules: Annotated[
        str | None,
        Parameter(
            help="Of a checkpoint and a directory of a model hub: the family whose names are translated, such as llama."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        Parameter(help="The config.json that --rules needs; by default the one in the directory of the hub."),
    ] = None,
    key: Key = None,
    json: Json = False,
) -> int:
    """Compare two checkpoints: components, then each leaf that differs, then the contracts of their runs.

    Reads only the manifests, which have a digest of every leaf; and, of tensors that another number of ranks has cut otherwise, the bytes.
    With --components the contracts, which belong to the runs as a whole, are not compared.

    If one of them is of another format, such as a directory of a model hub, the weights of both are read and compared.
    """
    from trainfold.adapters.cli.diff import diff_checkpoints

    def answer() -> Answer:
        if rules is not None or like is not None or key is not None or has_other_format(a) or has_other_format(b):
            from trainfold.adapters.cli.formats.diff_format import diff_formats

            return diff_formats(a, b, rules=rules, like=like, key=key)
        return diff_checkpoints(a, b, components=components, values=values)

    return deliver(answer, as_json=json)


@app.command(group=_TRUST)
def verify(
    checkpoint: CheckpointPath,
    *,
    contents: Annotated[
        bool, Parameter(negative=(), help="Show fingerprints that do not depend on the number of ranks too.")
    ] = False,
    components: Components = None,
    key: Key = None,
    json: Json = False,
) -> int:
    """Read every byte of a checkpoint and compare all digests; every damaged file is named."""
    from trainfold.adapters.cli.verify import verify_checkpoint

    def answer() -> Answer:
        if key is not None or (components is None and has_other_format(checkpoint)):
            from trainfold.adapters.cli.formats.verify_format import verify_format

            return verify_format(checkpoint, key=key)
        return verify_checkpoint(checkpoint, contents=contents, components=components)

    return deliver(answer, as_json=json)


@app.command(group=_TRUST)
def plan(  # noqa: PLR0913 - one for each option
    run: RunPath,
    *,
    step: Annotated[
        int | None,
        Parameter(
            converter=whole_typed, validator=Number(gte=0), help="The step to resume from; by default the newest one."
        ),
    ] = None,
    components: Annotated[
        tuple[str, ...] | None,
        NAMES,
        Parameter(help="Plan for a program that loads these components alone, such as model."),
    ] = None,
    initial: Annotated[
        Path | None,
        Parameter(
            help="Where the weights are with which the run begins, if it has no checkpoint: a directory of a model hub, another run, or another format that `convert` reads."
        ),
    ] = None,
    mtbf: Annotated[
        float | None,
        DURATION,
        Parameter(group=_CADENCE, help="Mean time between failures of the whole job, such as 12h."),
    ] = None,
    save: Annotated[
        float | None,
        DURATION,
        Parameter(group=_CADENCE, help="How long one save delays the loop, such as 0.2s."),
    ] = None,
    step_time: Annotated[
        float | None,
        DURATION,
        Parameter(group=_CADENCE, help="How long one optimizer step takes, such as 500ms."),
    ] = None,
    write: Annotated[
        float | None,
        DURATION,
        Parameter(
            group=_CADENCE,
            help="How long a save takes until it is durable, if it runs in the background.",
        ),
    ] = None,
    restart: Annotated[
        float | None,
        DURATION,
        Parameter(group=_CADENCE, help="Time from a failure to the first step after it."),
    ] = None,
    json: Json = False,
) -> int:
    """Show what a resume of a run would load, and why newer checkpoints are passed over.

    Reads only the manifests: `verify` finds damaged bytes, which a resume passes over too.

    With --mtbf, --save and --step-time it also shows after how many steps to save.
    """
    from trainfold.adapters.cli.plan import plan_run

    costs = {"mtbf_secs": mtbf, "save_secs": save, "step_secs": step_time, "write_secs": write, "restart_secs": restart}
    return deliver(lambda: plan_run(run, step=step, components=components, costs=costs, initial=initial), as_json=json)


@app.command(group=_CHANGE)
def prune(  # noqa: PLR0913 - one for each option
    run: RunPath,
    *,
    keep_last: Annotated[
        int | None,
        Parameter(group=_KEEP, converter=whole_typed, help="Keep the newest N complete checkpoints; 0 keeps all."),
    ] = None,
    keep_every: Annotated[
        int | None,
        Parameter(
            group=_KEEP, converter=whole_typed, help="Keep the first checkpoint at or after each multiple of N steps."
        ),
    ] = None,
    keep_best: Annotated[
        int | None,
        Parameter(group=_KEEP, converter=whole_typed, help="Keep the N best whose scores are in the run's best.json."),
    ] = None,
    keep_newer: Annotated[
        float | None,
        DURATION,
        Parameter(group=_KEEP, help="Keep checkpoints saved within this time, such as 7d or 12h."),
    ] = None,
    left_behind_last: Annotated[
        int | None,
        Parameter(
            group=_KEEP,
            converter=whole_typed,
            help="Of the checkpoints that rewinds have left behind, keep the newest N; without a rule all of them stay.",
        ),
    ] = None,
    left_behind_newer: Annotated[
        float | None,
        DURATION,
        Parameter(group=_KEEP, help="Of these, keep those saved within this time."),
    ] = None,
    flatten: Annotated[
        bool,
        Parameter(
            negative=(),
            help="First write what stays and refers to other checkpoints again, so that it stands alone and the others may go.",
        ),
    ] = False,
    dry_run: Annotated[bool, Parameter(negative=(), help="Print what would be deleted, and delete nothing.")] = False,
    json: Json = False,
) -> int:
    """Delete old checkpoints by the rules of a manager's retention. Needs at least one rule.

    The newest complete checkpoint stays, and so does what a pointer or best.json names. It is read whole before another one is deleted.
    Leftovers of older saves, deletions and uploads that did not finish are deleted too. A run into which another program may save is refused;
    --dry-run only reads.

    Example: trainfold prune runs/a --keep-last 3 --keep-every 10000 --dry-run
    """
    from trainfold.adapters.cli.prune import Keep, prune_run

    keep = Keep(
        last=keep_last,
        every=keep_every,
        best=keep_best,
        newer_secs=keep_newer,
        left_behind_last=left_behind_last,
        left_behind_newer_secs=left_behind_newer,
    )
    return deliver(lambda: prune_run(run, keep, dry_run=dry_run, flatten=flatten), as_json=json)


@app.command(group=_CHANGE)
def copy(  # noqa: PLR0913 - one for each option
    a: RunPath,
    b: Annotated[
        Path, Parameter(help="Where the checkpoints go: a directory or a URL, which is new or has the same run.")
    ],
    *,
    steps: Steps = None,
    newest: Annotated[
        bool, Parameter(negative=(), help="Copy the checkpoint that a resume would load, and no other.")
    ] = False,
    dry_run: Annotated[bool, Parameter(negative=(), help="Print the plan, and copy nothing.")] = False,
    json: Json = False,
) -> int:
    """Copy checkpoints of a run A into B, each of which is a directory or the URL of a bucket.

    Every byte is compared with the digest in its manifest while it passes, and the manifests are the same afterwards. A checkpoint appears at B when it is whole. If the
    command is killed, run it again: what is there is not sent again. Checkpoints to whose files a copied one refers go with it. Nothing at B is overwritten: another
    checkpoint of the same step is refused.

    Example: trainfold copy runs/a s3://bucket/runs/a --newest
    """
    from trainfold.adapters.cli.tiers.copy import copy_path

    return deliver(lambda: copy_path(a, b, steps=steps, newest=newest, dry_run=dry_run), as_json=json)


@app.command(name="collect", group=_CHANGE)
def collect_nodes(
    *nodes: Annotated[
        Path,
        Parameter(
            help="The folder of each node, such as a copy of its disk, with some files of the run under their names."
        ),
    ],
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            help="Where the checkpoints go: a directory or a URL, which is new or has the same run.",
        ),
    ],
    steps: Steps = None,
    dry_run: Annotated[bool, Parameter(negative=(), help="Print the plan, and write nothing.")] = False,
    json: Json = False,
) -> int:
    """Put a run together whose files lie in folders of several nodes. Only complete checkpoints are collected.

    One of the folders has the manifest of a checkpoint; each file in it must be in some folder, with its size and its digest. What incomplete ones lack is listed. If folders have
    different manifests of a step, nothing is collected. If the command is killed, run it again.

    Example: trainfold collect node0/run node1/run -o runs/a
    """
    from trainfold.adapters.cli.tiers.collect import collect_paths

    return deliver(lambda: collect_paths(nodes, output, steps=steps, dry_run=dry_run), as_json=json)


app.command(replay, group=_LOOK)
app.command(bisect, group=_LOOK)
app.command(files, group=_LOOK)
app.command(convert, group=_FORMATS)
app.command(link, group=_FORMATS)


@app.command(group=_SHELL)
def completion(shell: Annotated[Shell, Parameter(help="The shell: bash, zsh or fish.")], /) -> int:
    """Print a script that completes trainfold's commands and options in a shell.

    Example: eval "$(trainfold completion bash)"; the same with zsh after compinit; for fish: trainfold completion fish | source
    """
    from trainfold.adapters.cli.terminal.output import written

    return written(lambda: print(script_of(app, shell), end="")) or 0


@app.command(group=_SHELL)
def schema(
    name: Annotated[
        str | None, Parameter(help="What it describes, such as ls; without it, all names are listed.")
    ] = None,
    /,
) -> int:
    """Print the JSON Schema of what a command prints with --json, or of a checkpoint's manifest.json."""
    from trainfold.adapters.cli.schema import show_schema

    return show_schema(name)


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse and run a command line; see `trainfold.adapters.cli.main`."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    if tokens[:1] == ["rehearse"] and not {"--", "--help", "-h"} & set(tokens):
        return _refused(no_command(), tokens)
    try:
        code = app(tokens, console=Screen(), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _refused(usage_error(error), tokens)
    except ModuleNotFoundError as error:
        return _refused(package_missing(error, tokens[0]), tokens)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputFailed as failed:  # from the help and the version, which `deliver` does not print
        return give_up(failed) or 0
    return code if isinstance(code, int) else 0


def _refused(error: UsageError | PackageMissing, tokens: Sequence[str]) -> int:
    return deliver(lambda: Answer({}, error=error), as_json="--json" in tokens)
