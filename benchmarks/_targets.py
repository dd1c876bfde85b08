"""Shared by all benchmarks: the command line, CPU time, the targets, the table or JSON, the exit status.

The exit status is 0 even if a target is MISSED, because a busy machine must not fail a build. With ``--check`` a missed
target exits with 1.
"""

import argparse
import json
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import attrs
import torch


def cpu_secs(action: Callable[[], object], rounds: int) -> float:
    """Return the least CPU time of some rounds of an action."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


@final
@attrs.frozen
class Target:
    """A figure and its limit.

    Attributes:
        name: what was measured.
        value: the figure.
        relation: ``>=``, ``>`` or ``<=``.
        limit: the figure must be at least, or at most, this.
    """

    name: str
    value: float
    relation: Literal[">=", ">", "<="]
    limit: float

    @property
    def ratio(self) -> float:
        """The margin of the target: 1 or more meets it, for either relation."""
        good, base = (self.limit, self.value) if self.relation == "<=" else (self.value, self.limit)
        return good / base if base > 0 else float("inf")

    @property
    def met(self) -> bool:
        """Whether the figure meets the limit."""
        return {">=": operator.ge, ">": operator.gt, "<=": operator.le}[self.relation](self.value, self.limit)

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return (
            f"{self.name:56} {self.value:9.4g} {self.relation:2} {self.limit:<5g}  ratio {self.ratio:8.3f}  {verdict}"
        )


def make_parser(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the common options; ``quick`` describes what ``--quick`` measures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: checks that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table, and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def machine() -> dict[str, Any]:
    """Return what the figures depend on beside the code; the load is that of the last minute."""
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
