"""`trainfold convert SRC DST`: plans a conversion, shows the plan, and carries it out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainfold.adapters.cli.formats.own_rules import rules_named
from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.adapters.cli.terminal.reading import reading
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.printable import bytes_text
from trainfold.core.transform.conversion import Conversion


def convert_path(  # noqa: PLR0913 - keywords
    source: Path,
    target: Path,
    *,
    to: str,
    dtype: str | None = None,
    rules: str | None = None,
    like: Path | None = None,
    lora: Path | None = None,
    dequantise: bool = False,
    asked: str | None = None,
    key: str | None = None,
    dry_run: bool = False,
) -> Answer:
    """Convert what is at a path.

    Args:
        source: what is read.
        target: the path that is written, or the URL of a run in a bucket.
        to: ``native``, ``hf`` or ``dcp``.
        dtype: to which floating weights are cast; None for none.
        rules: the family whose names are translated, or a module and a name in it; None for none.
        like: the directory of the original model, or its ``config.json``; None for the source.
        lora: the configuration of an adapter that is merged, or its directory; None for none.
        dequantise: whether quantised weights become plain.
        asked: the format of the source, if it shows two.
        key: under which the model is in what torch has written; None to look for it.
        dry_run: whether nothing is written.

    Returns:
        The plan, and where the result is.

    Raises:
        InvalidArgument: for what cannot be done, before anything is read.
        CheckpointError: the matching subclass, if something cannot be read or written.
    """
    planned = plan_conversion(
        open_source(source, asked=asked, key=key),
        target,
        to=to,
        dtype=dtype,
        rules=rules_named(rules),
        like=like,
        lora=lora,
        dequantise=dequantise,
    )
    plan, written = planned.plan, None
    if not dry_run:
        with reading("converting", plan.read_bytes) as advance:
            written = run_conversion(planned, advance=advance)
    return Answer(_data(plan, written, dry_run=dry_run), tuple(_tables(plan, written)))


def _data(plan: Conversion, written: str | None, *, dry_run: bool) -> dict[str, Any]:
    return {
        "source": plan.source,
        "source_format": plan.source_format,
        "target": plan.target,
        "to": plan.to,
        "dry_run": dry_run,
        "written": written,
        "step": plan.step,
        "transforms": plan.transforms.splitlines(),
        "tensors_read": len(plan.before),
        "tensors_written": len(plan.after),
        "components": list(plan.components),
        "left_out": list(plan.left_out),
        "tensors_left_out": dict(plan.tensors_left_out),
        "files": [{"name": name, "size_bytes": size} for name, size in plan.files.items()],
        "size_bytes": plan.size_bytes,
        "is_there": plan.is_there,
        "needed_bytes": plan.needed_bytes,
        "free_bytes": plan.free_bytes,
    }


def _tables(plan: Conversion, written: str | None) -> list[Table]:
    facts = [
        ("from", f"{plan.source} ({plan.source_format})"),
        ("to", f"{plan.target} ({plan.to})"),
        ("step", "not known" if plan.step is None else str(plan.step)),
        ("model", f"{len(plan.before)} tensors, {_size(plan.before)}, become {len(plan.after)}, {_size(plan.after)}"),
        *(("transform", line) for line in plan.transforms.splitlines()),
        ("holds", ", ".join(plan.components)),
        ("left out", ", ".join(plan.left_out) or "nothing"),
        *(("left out", f"{name}: {reason}") for name, reason in plan.tensors_left_out.items()),
        (
            "room",
            f"{bytes_text(plan.needed_bytes)} needed, {'no limit' if plan.free_bytes is None else f'{bytes_text(plan.free_bytes)} free'}",
        ),
    ]
    if plan.is_there:
        facts[-1] = ("there", f"already: it is {'compared' if written is None else 'the same'}, and left as it is")
    title = "Would be converted" if written is None else f"{'Complete' if plan.is_there else 'Converted'}: {written}"
    files = tuple((name, bytes_text(size)) for name, size in plan.files.items())
    return [Table(title, ("", ""), tuple(facts)), Table("Files", ("file", "size"), files)]


def _size(specs: Mapping[str, LeafSpec]) -> str:
    return bytes_text(sum(size_bytes(each.dtype, each.shape) for each in specs.values()))
