"""The cost of exact metrics: adding a million terms, evaluating the demo's model, and the bytes that ranks send.

A million terms are one batch of values. They are added exactly, by ``tensor.double().sum()``, by torchmetrics, and, if they are
float32 or narrower, by a plain scatter into 256 bins of exponents; all take turns. Beside the time, the table shows whether the
result has the same bits in batches of 1,000 and in another order. The model is the demo's, in its evaluation. It measures the time
in metrics over the total time, and ``evaluate(..., chunk=32)`` beside the same batches without chunks, in turns, with the model and
with a forward that does nothing.

    python benchmarks/evaluate.py [--quick] [--json] [--check]
"""

import functools
import statistics
import sys
import time
import warnings

import torch
from _targets import Target, finish, machine, make_parser

from trainfold import metrics as M
from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.held_out import SUITE
from trainfold.adapters.cli.demo.model import make_model
from trainfold.adapters.cli.demo.settings import make_settings
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.evaluate.suite import merge_tallies, no_tally, observe, results_of
from trainfold.core.exact.sum import exact_add, exact_value, exact_zero, rounded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchmetrics

TERMS = 1_000_000
BATCH = 1_000
TARGET_TERMS, TARGET_SHARE, TARGET_BYTES, TARGET_CHUNKS = 2.0, 0.01, 64 * 1024, 1.1
EVALUATION_BATCH = CHUNK = 32
BATCHES = (7, 32, 64)


def exact(parts):
    """Ours."""
    total = exact_zero()
    for part in parts:
        total = exact_add(total, part)
    return rounded(exact_value(total))


def double(parts):
    """The usual way, done carefully."""
    return float(sum((part.double().sum() for part in parts), torch.zeros((), dtype=torch.float64)))


def single(parts):
    """The usual way."""
    return float(sum((part.float().sum() for part in parts), torch.zeros(())))


def scattered(parts):
    """Scatter mantissas of float32 into bins by exponent: exact for normal terms, wrong for subnormal and special values."""
    bins = torch.zeros(256, dtype=torch.int64)
    for part in parts:
        bits = part.float().view(torch.int32)
        exponent = (bits >> 23) & 0xFF
        mantissa = ((bits & 0x7FFFFF) | 0x800000).long()
        bins.scatter_add_(0, exponent.long(), torch.where(bits < 0, -mantissa, mantissa))
    return float(sum(count * 2.0 ** (place - 150) for place, count in enumerate(bins.tolist()) if count))


def of_torchmetrics(parts):
    """Return a new metric of torchmetrics."""
    metric = torchmetrics.SumMetric()
    for part in parts:
        metric.update(part)
    return float(metric.compute())


SUMS = {
    "exact": exact,
    "double().sum()": double,
    "float().sum()": single,
    "scatter, float32 only": scattered,
    "torchmetrics Sum": of_torchmetrics,
}


def make_terms(count):
    """Return terms by name; losses are those of an evaluation."""
    torch.manual_seed(0)
    probability = torch.rand(count).clamp_min(1e-7)
    return {
        "losses fp32": -probability.log(),
        "losses fp32, a third masked": -probability.log() * (torch.rand(count) > 1 / 3),
        "normal fp32": torch.randn(count),
        "losses bf16": (-probability.log()).bfloat16(),
        "losses fp64": -probability.double().log(),
        "fp32 over 60 powers of two": torch.ldexp(torch.randn(count), torch.randint(-60, 1, (count,))),
        "fp64 over 1,800": torch.ldexp(torch.randn(count).double(), torch.randint(-900, 900, (count,))),
    }


def sums_for(terms):
    """Return the ways to add terms of this dtype."""
    return {name: function for name, function in SUMS.items() if function is not scattered or terms.element_size() <= 4}


def median_secs(functions, rounds, inner):
    """Return the median time of a call of each function; they take turns, in rotating order."""
    times = {name: [] for name in functions}
    names = list(functions)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            function = functions[name]
            function()
            started = time.perf_counter()
            for _ in range(inner):
                function()
            times[name].append((time.perf_counter() - started) / inner)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_terms(*, quick):
    """Return the time of each way to add terms, and whether its bits depend on batches and order."""
    rows = []
    for kind, terms in make_terms(TERMS // 10 if quick else TERMS).items():
        order = torch.randperm(len(terms))
        cuts = [[terms], terms.split(BATCH), terms[order].split(BATCH)]
        sums = sums_for(terms)
        secs = median_secs(
            {name: functools.partial(function, [terms]) for name, function in sums.items()},
            3 if quick else 15,
            1 if quick else 8,
        )
        for name, function in sums.items():
            bits = {function(parts).hex() for parts in cuts}
            rows.append(
                {
                    "terms": kind,
                    "by": name,
                    "ms": 1e3 * secs[name],
                    "ratio": secs[name] / secs["double().sum()"],
                    "same_bits": len(bits) == 1,
                }
            )
    return rows


def measure_model(*, quick):
    """Return the seconds of the demo's evaluation in the model, in our metrics, and in those of torchmetrics."""
    settings = make_settings(tiny=quick)
    corpus = make_corpus(help_text(), context=settings.context, heldout_bytes=settings.heldout_bytes)
    model = make_model(settings).eval()
    ours, theirs, forwards = [], [], []
    for _ in range(2 if quick else 7):
        tally, spent, in_forward, in_theirs = no_tally(SUITE), 0.0, 0.0, 0.0
        rivals = (
            torchmetrics.MeanMetric(),
            torchmetrics.classification.MulticlassAccuracy(256, top_k=5, average="micro"),
        )
        for windows in corpus.heldout.split(EVALUATION_BATCH):
            batch = as_batch(windows)
            started = time.perf_counter()
            with torch.no_grad():
                logits, wanted = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
                nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
            forward_done = time.perf_counter()
            outputs = {
                "loss": (nats, nats.numel()),
                "perplexity": (nats, nats.numel()),
                "top-5 accuracy": (logits, wanted),
            }
            tally = observe(SUITE, tally, outputs)
            ours_done = time.perf_counter()
            rivals[0].update(nats)
            rivals[1].update(logits, wanted)
            in_theirs += time.perf_counter() - ours_done
            in_forward += forward_done - started
            spent += ours_done - forward_done
        started = time.perf_counter()
        results_of(SUITE, merge_tallies(SUITE, no_tally(SUITE), tally))
        spent += time.perf_counter() - started
        ours.append(spent / (spent + in_forward))
        theirs.append(in_theirs / (in_theirs + in_forward))
        forwards.append(in_forward)
    return {
        "forward_secs": statistics.median(forwards),
        "share_ours": statistics.median(ours),
        "share_torchmetrics": statistics.median(theirs),
    }


def measure_chunks(*, quick):
    """Return the seconds of an evaluation in chunks and of one without, and the microseconds of a chunk without a model."""
    settings = make_settings(tiny=quick)
    corpus = make_corpus(help_text(), context=settings.context, heldout_bytes=settings.heldout_bytes)
    model, suite = make_model(settings).eval(), {"loss": M.Ratio()}

    def forward(windows):
        batch = as_batch(windows)
        logits, wanted = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        return {"loss": (torch.nn.functional.cross_entropy(logits, wanted, reduction="none"), wanted.numel())}

    rows = []
    for size in BATCHES:
        batches = corpus.heldout.split(size)
        ways = {
            "plain": functools.partial(evaluate, forward, batches, suite),
            "chunks": functools.partial(evaluate, forward, batches, suite, chunk=CHUNK),
        }
        secs = median_secs(ways, 2 if quick else 7, 1)
        rows.append({"batch": size, "secs": secs["plain"], "ratio": secs["chunks"] / secs["plain"]})
    items = torch.zeros(64 * CHUNK, 1024)
    nothing = {
        size: functools.partial(
            evaluate, lambda batch: {"loss": (0, len(batch))}, items.split(size), suite, chunk=CHUNK
        )
        for size in BATCHES
    }
    plain = functools.partial(evaluate, lambda batch: {"loss": (0, len(batch))}, items.split(CHUNK), suite)
    secs = median_secs({**nothing, "plain": plain}, 2 if quick else 15, 1)
    return rows, {str(size): 1e6 * (secs[size] - secs["plain"]) / 64 for size in BATCHES}


def measure_vector():
    """Return the calls and bytes of the all-reduce of two ranks for ten metrics."""
    edges = tuple(float(edge) for edge in range(33))
    suite = {
        "loss": M.Ratio(),
        "perplexity": M.Perplexity(),
        "accuracy": M.Ratio(),
        "spread": M.Variance(),
        "worst": M.Max(),
        "positions": M.PositionAccuracy(),
        "accepted": M.AcceptanceLength(),
        "top": M.TopK(5),
        "f1": M.F1(10),
        "median": M.Quantiles(edges, (0.5,)),
    }

    def forward(values):
        hits = values[:64].view(8, 8) > 1
        classes = values.long() % 10
        return {
            "loss": (values, len(values)),
            "perplexity": (values, len(values)),
            "accuracy": (values > 1, len(values)),
            "spread": values,
            "worst": values,
            "positions": (hits, torch.ones_like(hits)),
            "accepted": (hits, torch.ones_like(hits)),
            "top": (torch.outer(values, torch.arange(10.0)), classes),
            "f1": (classes, classes),
            "median": values,
        }

    def work(ranks):
        torch.manual_seed(ranks.rank)
        evaluate(forward, [torch.rand(1000) * 30], suite, collectives=ranks)
        return [str(call) for call in ranks.schedule]

    schedules = run_threads(2, work)
    sums = [call for call in schedules[0] if call.startswith("all_sum")]
    return {"all_reduces": len(sums), "bytes": 8 * int(sums[0].partition("[")[2].partition("]")[0])}


def main():
    """Measure, print, judge."""
    options = make_parser(__doc__, quick="a tenth of the terms, three rounds, a tiny model").parse_args()
    rows = measure_terms(quick=options.quick)
    model = measure_model(quick=options.quick)
    chunks, chunk_us = measure_chunks(quick=options.quick)
    vector = measure_vector()
    ratio = next(row["ratio"] for row in rows if row["by"] == "exact" and row["terms"] == "losses fp32")
    targets = [
        Target("10^6 fp32 losses, exact / double().sum()", ratio, "<=", TARGET_TERMS),
        Target("metrics, share of the demo model's evaluation", model["share_ours"], "<=", TARGET_SHARE),
        Target("chunks of 32 / batches of 64, demo model", chunks[-1]["ratio"], "<=", TARGET_CHUNKS),
        Target("bytes in the all-reduce of ten metrics", vector["bytes"], "<=", TARGET_BYTES),
        Target("all-reduces of an evaluation", vector["all_reduces"], "<=", 1),
        Target("kinds of terms whose exact sum has one result", _invariant(rows), ">=", len(make_terms(1))),
    ]
    table = [f"{'terms':30} {'by':20} {'ms':>9} {'ratio':>7}  same bits in any batches and order"]
    table += [
        f"{row['terms']:30} {row['by']:20} {row['ms']:9.3f} {row['ratio']:7.2f}  {'yes' if row['same_bits'] else 'no'}"
        for row in rows
    ]
    table += [
        f"demo model: {model['forward_secs']:.2f} s in the model",
        f"  metrics {model['share_ours']:.2%} of all, those of torchmetrics (loss, top 5) {model['share_torchmetrics']:.2%}",
        *(
            f"  in chunks of {CHUNK}, from batches of {row['batch']}: {row['ratio']:.3f} times as long as these batches as they are"
            f" ({chunk_us[str(row['batch'])]:.0f} us a chunk of {CHUNK} x 4 KiB)"
            for row in chunks
        ),
        f"ten metrics on two ranks: {vector['all_reduces']} all-reduce of {vector['bytes']} bytes",
    ]
    return finish(
        options,
        {"machine": machine(), "terms": rows, "model": model, "chunks": chunks, "chunk_us": chunk_us, "vector": vector},
        targets,
        table,
    )


def _invariant(rows):
    return sum(row["same_bits"] for row in rows if row["by"] == "exact")


if __name__ == "__main__":
    sys.exit(main())
