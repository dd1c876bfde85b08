"""What all benchmarks do in the same way: their command line, their targets, their table or JSON, their exit status.

A target is met or MISSED and the exit status is 0 all the same, because a busy machine must not fail a build; ``--check``
makes a miss exit with 1.
"""

import argparse
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import attrs
import torch


@final
@attrs.frozen
class Target:
    """A figure and what it should be.

    Attributes:
        name: what was measured.
        value: what was found.
        relation: ``>=``, ``>`` or ``<=``.
        limit: what it is held to.
    """

    name: str
    value: float
    relation: Literal[">=", ">", "<="]
    limit: float

    @property
    def ratio(self) -> float:
        """How far the target is met: 1 or more meets it, whichever way the relation points."""
        good, base = (self.limit, self.value) if self.relation == "<=" else (self.value, self.limit)
        return good / base if base > 0 else float("inf")

    @property
    def met(self) -> bool:
        """Whether the figure is what it should be."""
        return {">=": operator.ge, ">": operator.gt, "<=": operator.le}[self.relation](self.value, self.limit)

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return (
            f"{self.name:56} {self.value:9.4g} {self.relation:2} {self.limit:<5g}  ratio {self.ratio:8.3f}  {verdict}"
        )


def make_parser(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser that has the options of every benchmark; ``quick`` says what ``--quick`` measures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: to see that it runs, not for figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table, and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code; the load is that of the minute before."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def finish(
    options: argparse.Namespace, found: Mapping[str, Any], targets: Sequence[Target], table: Iterable[str]
) -> int:
    """Print the table and the targets, or all of it as JSON; return the exit status."""
    judged = [{**attrs.asdict(target), "ratio": target.ratio, "met": target.met} for target in targets]
    text = json.dumps({"quick": options.quick, **found, "targets": judged}, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        print(*table, sep="\n")
        print("targets (a ratio of 1 or more meets one)" + ("; --quick measures too little to judge" * options.quick))
        print(*(f"  {target}" for target in targets), sep="\n", flush=True)
    return int(options.check and not all(target.met for target in targets))
