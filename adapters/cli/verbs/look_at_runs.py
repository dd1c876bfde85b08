"""The commands that show runs and checkpoints: `ls`, `inspect`, `page` and `diff`, and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trainfold.adapters.cli.formats.commands import AnyPath, Key
from trainfold.adapters.cli.locate import has_other_format
from trainfold.adapters.cli.terminal.given_options import (
    NAMES,
    CheckpointPath,
    Components,
    Json,
    RunPath,
    whole_typed,
)
from trainfold.adapters.cli.terminal.output import Answer, deliver


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
