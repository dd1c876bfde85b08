"""How exact a resume is: the same task under seven tools, killed and resumed, compared bit for bit with an uninterrupted run.

Each tool is used as its documentation describes, with its options for exact resumes; the loops are in ``benchmarks/loops``. A
case is trained to its end in one process, trained in a second process that kills itself with SIGKILL, and resumed in a
third. The outcome is one of

    exact            the same weights, bit for bit, and the same loss at each step that the resumed run trained
    differs          other weights or losses, without a warning
    warns            other weights or losses, and a warning that the uninterrupted run did not give
    refuses          the resume ends with an error
    no end           the resumed run ended early, or trained nothing
    not offered      the tool has no documented way to do it

If the script changes between the kill and the resume (another horizon, batch size or optimizer), there is no run to
compare with: then ``differs`` means that the run continues without a warning.

    pip install -c constraints.txt '.[rivals]'
    python benchmarks/resume.py [--quick] [--json] [--only trainfold expert] [--cases "in an epoch"]
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import attrs
from _targets import Target, finish, machine, make_parser
from loops.task import Case, Data, NotOffered, make_net, seed_all

TOOLS = {  # name: (module, package that must be installed)
    "by hand, tutorial": ("by_hand", "torch"),
    "by hand, expert": ("expert", "torch"),
    "Lightning Trainer": ("lightning_trainer", "lightning"),
    "Lightning Fabric": ("lightning_fabric", "lightning"),
    "accelerate": ("accelerate_loop", "accelerate"),
    "transformers Trainer": ("transformers_trainer", "transformers"),
    "trainfold": ("trainfold_loop", "trainfold"),
}
# The process dies after one of these steps; the last checkpoints are then those of 12, inside an epoch, and of 16, at an end.
MIDDLE, END = 14, 17
CASES = {  # name: (the task, the step after which the process dies, what the script changes for the resume)
    "in an epoch": ({"dropout": 0.0}, MIDDLE, {}),
    "at an epoch's end": ({"dropout": 0.0}, END, {}),
    "dropout, shuffling": ({}, MIDDLE, {}),
    "dropout, shuffling, 2 workers": ({"workers": 2}, MIDDLE, {}),
    "augmentation": ({"augment": True}, MIDDLE, {}),
    "augmentation, 2 workers": ({"augment": True, "workers": 2}, MIDDLE, {}),
    "accumulation": ({"accumulate": 2, "epochs": 6}, MIDDLE, {}),
    "OneCycle": ({"schedule": "onecycle"}, MIDDLE, {}),
    "EMA": ({"ema": True}, MIDDLE, {}),
    "two optimizers": ({"two_optimizers": True}, MIDDLE, {}),
    "bf16": ({"dtype": "bfloat16"}, MIDDLE, {}),
    "changed horizon": ({"schedule": "cosine"}, MIDDLE, {"epochs": 4}),
    "changed batch size": ({}, MIDDLE, {"batch_size": 4}),
    "changed optimizer": ({}, MIDDLE, {"optimizer": "SGD"}),
}
DAMAGED = ("20 kills in a save", "a flipped bit", "a truncated file")
EVALUATION = "evaluation, batches of 1, 7, 64"
KILLS, WIDE = 20, 512
WORSE = ("exact", "refuses", "warns", "no end", "differs")
_LOUD = re.compile(r"warn|refus|mismatch|differ|drift|passed over", re.IGNORECASE)


@attrs.frozen
class End:
    """The end of a process: its exit status (negative for a signal), its output, and the report of the run."""

    status: int
    said: str
    digest: str | None
    losses: dict[int, str]

    def warnings(self):
        """Return the lines that look like a warning, without numbers."""
        return {re.sub(r"\d+", "#", line.strip()) for line in self.said.splitlines() if _LOUD.search(line)}


def start(module, case, *, resume):
    """Train in a child process; return its process id."""
    out = case.folder / "said.txt"
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with out.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb"), write_through=True), sys.stderr
        with contextlib.chdir(case.folder):
            module.train(case, resume=resume)
        status = 0
    except NotOffered:
        status = 77
    except BaseException:  # noqa: BLE001 (it is a child: whatever it is, it ends here)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait(child, case):
    """Wait for a child and return how it ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log, final = case.folder / "losses.jsonl", case.folder / "final.json"
    losses = dict(json.loads(line) for line in log.read_text().splitlines()) if log.exists() else {}
    said = (case.folder / "said.txt").read_text(errors="replace")
    digest = json.loads(final.read_text())["digest"] if final.exists() else None
    for each in (log, final, case.folder / "said.txt"):
        each.unlink(missing_ok=True)
    return End(code, said, digest, losses)


def run(module, case, *, resume=False):
    """Train in a child process and wait for it."""
    return wait(start(module, case, resume=resume), case)


def verdict_of(whole, resumed):
    """Return the outcome of a resume."""
    if resumed.status:
        return "refuses"
    steps = resumed.losses.items()
    if resumed.digest == whole.digest and all(whole.losses.get(step) == loss for step, loss in steps):
        return "exact"  # a run that died between its last save and its report has nothing left to report
    if not resumed.losses or max(resumed.losses) < max(whole.losses):
        return "no end"
    return "warns" if resumed.warnings() - whole.warnings() else "differs"


def judge(module, folder, fields, die_at, changed):
    """Train to the end; train, kill and resume; compare."""
    whole_case, cut_case = (Case(str(folder / name), **fields) for name in ("whole", "cut"))
    for case in (whole_case, cut_case):
        case.folder.mkdir(parents=True)
    whole = run(module, whole_case)
    if whole.status == 77:
        return "not offered", whole
    assert whole.status == 0, whole.said
    died = run(module, attrs.evolve(cut_case, die_at=die_at))
    assert died.status == -signal.SIGKILL, died.said
    resumed = run(module, attrs.evolve(cut_case, **changed), resume=True)
    if changed and not resumed.status and resumed.digest is not None:
        return ("warns" if resumed.warnings() - whole.warnings() else "differs"), resumed
    return verdict_of(whole, resumed), resumed


def judge_kills(module, folder, kills):
    """Kill at random times while checkpoints are written, resume each time, and compare the end."""
    fields = {"width": WIDE, "save_every": 1, "dropout": 0.0}
    whole_case, cut_case = (Case(str(folder / name), **fields) for name in ("whole", "cut"))
    for case in (whole_case, cut_case):
        case.folder.mkdir(parents=True)
    whole, dice = run(module, whole_case), random.Random(0)
    assert whole.status == 0, whole.said
    seen = {}
    for _ in range(kills):
        child = start(module, cut_case, resume=True)
        ends = time.monotonic() + 20
        before = writes(cut_case)
        while writes(cut_case) == before and time.monotonic() < ends:
            time.sleep(0.001)  # until a checkpoint file is being written
        time.sleep(dice.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        end = wait(child, cut_case)
        seen |= end.losses
        if end.status > 0:
            return "refuses", end
        if end.status == 0:
            break
    resumed = run(module, cut_case, resume=True)
    resumed = attrs.evolve(resumed, losses={**seen, **resumed.losses})
    return verdict_of(whole, resumed), resumed


def writes(case):
    """Return names, sizes and times of the checkpoint files."""
    found = set()
    for path in case.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.name not in ("losses.jsonl", "said.txt", "final.json"):
                stat = path.stat()
                found.add((str(path), stat.st_size, stat.st_mtime_ns))
    return found


def judge_damage(module, folder, damage):
    """Damage the largest file of the newest checkpoint, resume, and compare; return the worst outcome of several places."""
    whole_case = Case(str(folder / "whole"), dropout=0.0)
    whole_case.folder.mkdir(parents=True)
    whole = run(module, whole_case)
    places = (0.25, 0.4, 0.5, 0.6, 0.75) if damage == "a flipped bit" else (0.5,)
    ends = [damaged(module, folder / f"cut-{place}", damage, place) for place in places]
    verdicts = [verdict_of(whole, end) for end in ends]
    worst = max(range(len(ends)), key=lambda index: WORSE.index(verdicts[index]))
    return verdicts[worst], ends[worst]


def damaged(module, folder, damage, place):
    """Return how a resume from a damaged checkpoint ends."""
    case = Case(str(folder), dropout=0.0)
    case.folder.mkdir(parents=True)
    run(module, attrs.evolve(case, die_at=MIDDLE))
    newest = sorted((Path(name) for name, _, _ in writes(case)), key=lambda path: path.stat().st_mtime_ns)
    latest = newest[-1].stat().st_mtime_ns
    files = [path for path in newest if latest - path.stat().st_mtime_ns < 10**9 and is_of_newest(path, newest)]
    victim = max(files, key=lambda path: ("last" in path.name, path.stat().st_size))
    data = bytearray(victim.read_bytes())
    at = int(len(data) * place)
    if damage == "a flipped bit":
        data[at] ^= 1 << 4
    else:
        del data[at:]
    victim.write_bytes(bytes(data))
    return run(module, case, resume=True)


def is_of_newest(path, files):
    """Whether a file belongs to the checkpoint that was written last."""
    numbers = [int(number) for each in files for number in re.findall(r"(?:step[-=]|checkpoint[-_])(\d+)", str(each))]
    own = re.findall(r"(?:step[-=]|checkpoint[-_])(\d+)", str(path))
    return not numbers or (bool(own) and int(own[-1]) == max(numbers)) or "last" in path.name


def judge_evaluation(module, folder):
    """Evaluate one model at three batch sizes, in a child process like all other cases."""
    import torch

    folder.mkdir(parents=True)
    out = folder / "values.json"
    child = os.fork()
    if not child:
        try:
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
                seed_all()
                net = make_net(Case(str(folder), dropout=0.0)).eval()
                loaders = [torch.utils.data.DataLoader(Data(augment=False), batch_size=size) for size in (1, 7, 64)]
                out.write_text(json.dumps([float(module.evaluate(net, loader)).hex() for loader in loaders]))
        except BaseException:  # noqa: BLE001 (it is a child: whatever it is, it ends here)
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if not out.exists():
        return "refuses", End(1, "", None, {})
    values = json.loads(out.read_text())
    return ("exact" if len(set(values)) == 1 else "differs"), End(0, " ".join(values), None, {})


def judge_all(name, wanted, kills):
    """Judge every case of one tool, in this process, which has imported it; return case -> (verdict, output of the resume)."""
    module = importlib.import_module(f"loops.{TOOLS[name][0]}")
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for index, case in enumerate(wanted):
            folder = Path(root) / str(index)
            if case in CASES:
                verdict, end = judge(module, folder, *CASES[case])
            elif case == DAMAGED[0]:
                verdict, end = judge_kills(module, folder, kills)
            elif case in DAMAGED:
                verdict, end = judge_damage(module, folder, case)
            else:
                verdict, end = judge_evaluation(module, folder)
            found[case] = [verdict, end.said[-600:]]
    return found


def judged_afresh(name, cases):
    """Judge the cases of a tool in a new Python, which imports no other tool."""
    command = [sys.executable, __file__, "--one", name, "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def judged_in_a_fork(name, cases, kills):
    """Judge them in a fork of this process, which starts at once; what it prints goes to standard error."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=os.dup2, initargs=(2, 1)) as pool:
        return pool.submit(judge_all, name, cases, kills).result()


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="three kills in a save, and no new Python for each tool")
    parser.add_argument("--only", nargs="*", choices=sorted(TOOLS), default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--cases", nargs="*", default=[*CASES, *DAMAGED, EVALUATION], metavar="CASE")
    parser.add_argument("--one", choices=sorted(TOOLS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    kills = 3 if options.quick else KILLS
    if options.one:
        print(json.dumps(judge_all(options.one, options.cases, kills)))
        return 0
    rows, missing = {}, []
    for name in options.only:
        if importlib.util.find_spec(TOOLS[name][1]) is None:
            missing.append(name)
            continue
        rows[name] = (
            judged_in_a_fork(name, options.cases, kills) if options.quick else judged_afresh(name, options.cases)
        )
        print(f"{name}: {len(rows[name])} cases", file=sys.stderr, flush=True)
    width = max(map(len, options.cases))
    table = [
        f"{'':{width}}  " + "  ".join(f"{name:20}" for name in rows),
        *(f"{case:{width}}  " + "  ".join(f"{rows[name][case][0]:20}" for name in rows) for case in options.cases),
        *(f"not installed: {name} (pip install '.[rivals]')" for name in missing),
    ]
    silent = sum(row[0] in ("differs", "no end") for row in rows.get("trainfold", {}).values())
    targets = [Target("cases in which trainfold differs without a warning", silent, "<=", 0)]
    return finish(options, {"machine": machine(), "rows": rows, "missing": missing}, targets, table)


if __name__ == "__main__":
    sys.exit(main())
