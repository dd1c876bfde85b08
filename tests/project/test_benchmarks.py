"""The benchmarks: each runs, reports what it measured against which target, and measures what it reports. Speeds are not tested."""

import json
import math
import os
import runpy
import subprocess
from types import SimpleNamespace

import pytest

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
KEYS = {
    "agreement": {"rows", "links", "checks", "large", "coordinators"},
    "columns": {"rounds", "rows"},
    "construct": {"size", "rounds", "rows", "ranks", "fresh_ranks"},
    "convert": {"size_bytes", "largest_bytes", "rounds", "conversions", "loads", "planning"},
    "drift": {"size", "rounds", "rows"},
    "evaluate": {"terms", "model", "chunks", "chunk_us", "vector"},
    "flight": {"rows", "bytes_a_step"},
    "gaps": {"row"},
    "garbage": {"rows"},
    "loop": {"rows"},
    "discovery": {"secs", "asked", "root_bytes"},
    "many_ranks": {"parts", "cpu_secs"},
    "meshes": {"size", "rounds", "saves", "loads"},
    "object_store": {"mib", "rounds", "rows", "ratios", "requests", "ls"},
    "plan": {"plans", "ranks", "growth", "checkpoints", "find_newest_secs"},
    "ranks": {"size", "rounds", "rows"},
    "replicas": {"hashed", "summed", "rows"},
    "scale": {"saves", "resumes", "shared", "writers"},
    "save": {"size_gb", "rounds", "rows", "inner", "same_bits"},
    "stall": {"size", "state_bytes", "step_secs", "longest_without", "rounds", "rows", "memory"},
    "step": {"rows"},
    "torch_formats": {"mib", "rounds", "rows"},
    "unchanged": {"rows"},
}
TARGETS = {
    "agreement": ["a vote", "sockets of rank 0"],
    "columns": ["pieces: most", "exchange: most", "pieces: bytes", "exchange: bytes"],
    "construct": ["construction and load", "a rank of", "fresh, MiB", "fresh, a rank", "first loss"],
    "convert": [
        "native to hub, speed",
        "native to hub, peak",
        "load, warm",
        "load, cold",
        "planning hf",
        "planning run",
        "planning x.pt",
        "planning dcp ->",
        "planning dcp, nested",
        "planning dcp, optimizer",
        "planning llama, hf",
        "planning llama, run",
        "planning llama, dcp",
    ],
    "drift": ["the boundary", "lost each"],
    "evaluate": ["10^6 fp32", "share of", "chunks of 32", "bytes in", "all-reduces", "one result"],
    "flight": ["recorded live loop", "bytes a step", "a step that runs twice"],
    "gaps": ["a piece in a gap"],
    "garbage": [],
    "loop": ["attached loop, sync", "attached loop, async"],
    "discovery": ["ls", "resume"],
    "meshes": ["saves: most", "loads: most", "loads: median"],
    "many_ranks": ["load", "inspect", "verify", "plan"],
    "object_store": ["upload: speed", "download: speed", "copy: speed", "ls: requests"],
    "plan": [
        "plan_save,",
        "plan_resume,",
        "fresh optimizer,",
        "dtype to adapt,",
        "growth exponent",
        "of a rank",
        "newest of",
    ],
    "ranks": [
        "a step",
        "a save, dcp /",
        "a save, dcp, synced",
        "async call",
        "lost an async save",
        "the same mesh",
        "from 3 ranks",
        "tp onto fsdp",
        "fsdp onto tp",
        "peak of a load",
    ],
    "replicas": ["most bytes of a replica", "content sum"],
    "save": ["raw ceiling", "torch.save", "dcp.save", "safetensors", "CPU-s per GB", "fresh pages", "live memory"],
    "scale": [
        "plan of a save",
        "root and the indexes",
        "plan of reads",
        "peak",
        "replicated leaves",
        "each once",
        "bytes that they need",
        "root, MB",
        "index /",
        "data files / ranks",
        "ranks that write weights",
        "share a store",
        "plan of shared reads",
        "at once of shared reads",
    ],
    "stall": [
        "call, ms",
        "longest step",
        "lost a save",
        "extra memory / state",
        "max_extra_bytes",
        "that stays",
        "1,000 saves",
    ],
    "step": ["time", "first steps too", "peak memory", "same bits"],
    "torch_formats": [
        *(
            f"ours: {way}: {what}"
            for way in ("dcp -> hf", "hf -> dcp")
            for what in ("time /", "throughput /", "memory, MiB", "memory / the least")
        ),
    ],
    "unchanged": ["bytes of adapters", "time of adapters", "CPU time if everything"],
}


def run_benchmark(warm, root, folder, name, *options):
    """The JSON that a benchmark prints as its only standard output."""
    done = subprocess.run(
        warm.command(root / "benchmarks" / f"{name}.py", "--quick", "--json", *options),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr  # a missed target fails only with the option for it
    return json.loads(done.stdout)


@pytest.fixture
def targets(root):
    """The names in the benchmarks' module of targets."""
    return SimpleNamespace(**runpy.run_path(str(root / "benchmarks" / "_targets.py")))


LONG = (
    "agreement",
    "columns",
    "construct",
    "convert",
    "drift",
    "evaluate",
    "flight",
    "garbage",
    "many_ranks",
    "meshes",
    "object_store",
    "plan",
    "ranks",
    "scale",
    "stall",
    "step",
    "torch_formats",
)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ()) for name in sorted(KEYS) if name not in LONG),
        pytest.param("ranks", ("--only", "saves"), marks=pytest.mark.long),
        ("stall", ("--only", "trainfold", "torch.save")),
        *(pytest.param(name, (), marks=pytest.mark.long) for name in LONG),
    ],
)
def test_a_benchmark_prints_json_with_every_target_and_leaves_nothing_behind(
    warm_python, root, tmp_path, name, options
):
    found = run_benchmark(warm_python, root, tmp_path, name, *options)
    assert KEYS[name] | {"quick", "machine", "targets"} == found.keys()
    assert found["quick"] is True
    assert found["machine"]["threads"] == 1
    for target in found["targets"]:
        assert target.keys() == {"name", "value", "relation", "limit", "ratio", "met"}
        assert math.isfinite(target["value"]), "it measured something"
    said = [target["name"] for target in found["targets"]]
    is_of_saves = "saves" in options
    expected = [part for part in TARGETS[name] if not is_of_saves or part.startswith("a save")]
    assert all(any(part in name for name in said) for part in expected), said
    assert list(tmp_path.iterdir()) == []
    check_bits(found)


@pytest.mark.slow(10)
def test_the_comparison_of_resumes_tells_an_exact_one_from_one_that_differs(warm_python, root, tmp_path):
    """V13: it kills the same task in the middle of an epoch, once under trainfold and once saved as in tutorials."""
    names, cases = ["trainfold", "by hand, tutorial"], ["in an epoch", *(["a flipped bit"] if IS_DEEP else [])]
    found = run_benchmark(warm_python, root, tmp_path, "resume", "--only", *names, "--cases", *cases)
    verdicts = {name: {case: found["rows"][name][case][0] for case in found["rows"][name]} for name in names}
    assert verdicts == {
        "trainfold": dict.fromkeys(cases, "exact"),
        "by hand, tutorial": dict.fromkeys(cases, "differs"),
    }


def check_bits(found):
    """Check that every report about bits says that they are equal."""
    for row in [found, *(row for row in found.get("rows", []) if isinstance(row, dict))]:
        assert row.get("same_bits", True) is True
    assert all(target["met"] for target in found["targets"] if "same bits" in target["name"])
    assert all(row["same_bits"] for row in found.get("terms", []) if row["by"] == "exact")


@pytest.mark.parametrize(
    ("value", "relation", "limit", "ratio", "met"),
    [
        (0.9, ">=", 0.75, 1.2, True),
        (0.6, ">=", 0.75, 0.8, False),
        (1.0, ">", 1.0, 1.0, False),
        (1.0, "<=", 2.0, 2.0, True),
        (4.0, "<=", 2.0, 0.5, False),
    ],
)
def test_a_target_says_by_how_much_it_is_met_whichever_way_it_points(targets, value, relation, limit, ratio, met):
    target = targets.Target("a figure", value, relation, limit)
    assert target.ratio == pytest.approx(ratio)
    assert target.met is met
    assert str(target).endswith("met" if met else "MISSED")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_miss_is_printed_and_fails_only_where_a_check_is_asked_for(targets, capsys, tmp_path, as_json):
    judged = [targets.Target("good", 1.0, ">=", 0.5), targets.Target("bad", 1.0, ">=", 2.0)]
    options = targets.make_parser("what it is", quick="little").parse_args(["--json"] if as_json else [])
    options.out = tmp_path / "figures.json"
    assert targets.finish(options, {"rows": []}, judged, ["a table"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(options.out.read_text())
    assert [target["met"] for target in figures["targets"]] == [True, False]
    if as_json:
        assert json.loads(printed) == figures
    else:
        assert printed.startswith("a table")
        assert [line.split()[-1] for line in printed.splitlines()[-2:]] == ["met", "MISSED"]
    options.check = True
    assert targets.finish(options, {}, judged, []) == 1
    assert targets.finish(options, {}, judged[:1], []) == 0
