"""A run's facts for tests of its page, in which each text that can come from a file is chosen."""

from trainfold.core.best.best_json import BestFile
from trainfold.core.best.record import BestRecord
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import CheckpointTorn
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.manifest import (
    ComponentRecord,
    FileRecord,
    Head,
    Manifest,
    ShardRecord,
    Summary,
    TensorRecord,
)
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.markup.curve import curve_of
from trainfold.core.page.run_page import FlightFacts, ResumeFacts, RunPage
from trainfold.core.problem import problem_of


def manifest_of(step, text, references=()):
    shard = ShardRecord(0, 8, 48, ((0, 10),), "xxh3:0")
    table = (TensorRecord(f"model.{text}", "float32", (10,), (shard,)),)
    files = (FileRecord("model.safetensors", ("model",), 0, 60, "xxh3:0"), *references)
    contract = {"unsaved": {text: text}, "batch_size": step, f"k{text}": text}
    return Manifest(
        Head("r", step),
        1,
        (ComponentRecord(text, ({},), (table,), "xxh3:0"),),
        (),
        contract,
        {"torch": str(step)},
        files,
    )


def page_of(text="plain"):
    """A page in which each text that can come from a file, or from a program, is this one."""
    torn = problem_of(CheckpointTorn(text, expected=text, found=text, fix=text))
    entries = (
        Entry("step-00000010", Head("r", 10), manifest_of(10, text)),
        Entry("step-00000020", Head("r", 20), manifest_of(20, text, (FileRecord(text, ("model",), 0, 60, "x", "step-00000010"),))),
        Entry("step-00000030", Head("r", 30, 1, ((0, 20),)), None, None, Summary(9, (), {text: text}, (text, "step-00000010"))),
        Entry(f"step-{text}", None, None, torn),
    )  # fmt: skip
    journal = (
        JournalLine(1e9, "started", 0, data={"keep": [["last", 2], ["own", text]]}),
        JournalLine(1e9 + 1, "called", 10, data={"returned": 1e9 + 1.2, "outcome": "staged"}),
        JournalLine(1e9 + 3, "written", 10, data={"began": 1e9 + 1.3}),
        JournalLine(1e9 + 4, "evaluated", 10, data={"metric": text, "score": 0.5}),
        JournalLine(1e9 + 5, "warned", detail=text),
        JournalLine(1e9 + 5, "failed", 12, detail=text),
        JournalLine(
            1e9 + 20,
            "started",
            10,
            text,
            text,
            {"reached": 14, "reached_at": 1e9 + 9, "keep": [["last", 2], ["own", text]]},
        ),
        JournalLine(1e9 + 21, "met", 10, data={"drifts": [[text] * 5], "count": 3}),
        JournalLine(1e9 + 30, "closed", detail=text),
    )
    losses = curve_of(range(40), [step % 7 if step != 5 else float("nan") for step in range(40)])
    others = curve_of(range(40), [step % 5 for step in range(40)])
    best = BestFile(BestRecord("r", text, "min", 0.0, 0.25, 20), 0, ((BestEntry(0.25, 20), 0), (BestEntry(0.5, 10), 0)))
    resume = ResumeFacts(text, ((text,) * 5,), (text,))
    return RunPage(Inventory(f"/runs/{text}", text, entries, torn), 1e9 + 60, {entries[0].name: 1e9}, {entries[1].name: (text,)},
                   best, journal, FlightFacts(losses, losses, 0, 39, 1e9 + 29, {1: FlightFacts(others, losses, 0, 39, damage=text)}, 3), resume, (text,), 7)  # fmt: skip
