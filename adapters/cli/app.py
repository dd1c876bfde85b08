"""The command line: its commands in groups, and what parses and runs one. Each command has its own module, imported when it runs."""

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import CycloptsError

from trainfold import __version__
from trainfold.adapters.cli.completion import Shell, script_of
from trainfold.adapters.cli.flights.flight_commands import bisect, replay
from trainfold.adapters.cli.formats.commands import convert, files, link
from trainfold.adapters.cli.misuse import no_command, package_missing, usage_error
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
from trainfold.adapters.cli.verbs.change_runs import collect_nodes, copy, prune
from trainfold.adapters.cli.verbs.look_at_runs import diff, inspect, ls, page
from trainfold.adapters.cli.verbs.rely_on_runs import plan, verify
from trainfold.adapters.cli.verbs.start_here import demo, rehearse

_START, _LOOK, _TRUST = (
    Group("Start here", sort_key=1),
    Group("Look at runs and checkpoints", sort_key=2),
    Group("Before you rely on one", sort_key=3),
)
_CHANGE = Group("Change a run", sort_key=4)
_FORMATS = Group("From one format to another", sort_key=5)
_SHELL = Group("For shells and programs", sort_key=6)

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


for _group, _verbs in (
    (_START, (demo, rehearse)),
    (_LOOK, (ls, inspect, page, diff, replay, bisect, files)),
    (_TRUST, (verify, plan)),
    (_CHANGE, (prune, copy)),
    (_FORMATS, (convert, link)),
):
    for _verb in _verbs:
        app.command(_verb, group=_group)
app.command(collect_nodes, name="collect", group=_CHANGE)


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
