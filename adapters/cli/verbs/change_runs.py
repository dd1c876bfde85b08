"""The commands that change a run: `prune`, `copy` and `collect`, and their arguments."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from trainfold.adapters.cli.terminal.given_options import (
    DURATION,
    Json,
    RunPath,
    numbers_typed,
    whole_typed,
)
from trainfold.adapters.cli.terminal.output import deliver

_KEEP = Group("What stays: what any rule wants", sort_key=9)
Steps = Annotated[
    tuple[int, ...] | None,
    Parameter(
        converter=numbers_typed,
        n_tokens=1,
        metavar="INT[,INT...]",
        help="Take these steps; by default all whole checkpoints.",
    ),
]


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
