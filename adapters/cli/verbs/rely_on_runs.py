"""The commands before one relies on a run: `verify` and `plan`, and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from trainfold.adapters.cli.formats.commands import Key
from trainfold.adapters.cli.locate import has_other_format
from trainfold.adapters.cli.terminal.given_options import (
    DURATION,
    NAMES,
    CheckpointPath,
    Components,
    Json,
    RunPath,
    whole_typed,
)
from trainfold.adapters.cli.terminal.output import Answer, deliver

_CADENCE = Group(
    "How often to save", help="Give three durations to see the cadence that loses the least time.", sort_key=9
)


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
