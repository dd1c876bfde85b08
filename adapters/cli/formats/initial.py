"""What `trainfold plan RUN --initial SRC` shows of a run without checkpoints: the weights with which it would begin."""

from collections import Counter
from pathlib import Path
from typing import Final

from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.runs.scan import check_place
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.printable import bytes_text

_CAVEAT: Final = (
    "which tensor of your model comes from where is planned when your program calls trainfold.plan(run, like=state, initial=source); "
    "all else begins as the script has it"
)


def plan_initial(run: Path, source: Path) -> Answer:
    """Show what is at a path, as the weights with which a run begins; no tensor is read.

    Args:
        run: the directory, which has no checkpoint.
        source: as for `open_source`.

    Raises:
        CheckpointError: the matching subclass, if the weights cannot be read, or no run can start there.
    """
    if run.is_dir():
        check_place(LocalStore(run))
    opened = open_source(source)
    specs = opened.model.specs()
    total = sum(size_bytes(each.dtype, each.shape) for each in specs.values())
    dtypes = Counter(each.dtype for each in specs.values())
    facts = (
        ("in order", "a step that is asked for: none; checkpoints of the run: none; initial: taken"),
        ("step", "0"),
        ("initial", f"{source} ({opened.format})"),
        *(("shown by", each) for each in opened.detected.seen),
        ("tensors", f"{len(specs)}, {bytes_text(total)}"),
        *(("dtype", f"{dtype}: {count}") for dtype, count in dtypes.items()),
        *(("not taken", name) for name in opened.others),
        ("note", _CAVEAT),
    )
    data = {
        "run": str(run),
        "resumes": False,
        "checkpoint": None,
        "step": 0,
        "initial": {
            "source": str(source),
            "format": opened.format,
            "tensors": len(specs),
            "size_bytes": total,
            "dtypes": dict(dtypes),
            "not_taken": list(opened.others),
        },
        "notes": [_CAVEAT],
    }
    return Answer(data, (Table(f"A start of {run}", ("", ""), facts),))
