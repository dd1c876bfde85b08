"""The recorder reports exactly what was done: it is compared with the disk, and with strace's output for the same calls."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from crash.disk.disk import BLOCK_BYTES, content
from crash.disk.effects import TOP, Bind, Move, Resize, Sync, SyncFailed, Unbind, Write
from crash.disk.states import Budget, after_all, before_syncs, crash_states, live, states_of

CALLS = "openat,write,pwrite64,ftruncate,fallocate,fsync,fdatasync,rename,renameat,linkat,unlink,unlinkat,mkdir,rmdir,symlink,symlinkat"
PROGRAM = """
import sys, os
sys.path.insert(0, {tests!r})
from crash.disk.effects import Recorder
from crash.saves.scenarios import Scene, SCENARIOS
from crash.disk.syscalls import watched
SCENARIOS["first_save"](Scene(Recorder({warm!r})))
print(os.getpid(), flush=True)
sys.stdin.readline()
recorder = Recorder({top!r})
with watched(recorder):
    SCENARIOS[{name!r}](Scene(recorder))
print(*[type(effect).__name__ for effect in recorder.effects])
"""
KINDS = {
    "write": "Write", "pwrite64": "Write", "ftruncate": "Resize", "fallocate": "Resize", "fsync": "Sync", "rename": "Move",
    "renameat": "Move", "linkat": "Bind", "mkdir": "Bind", "symlink": "Bind", "symlinkat": "Bind", "unlink": "Unbind",
    "unlinkat": "Unbind", "rmdir": "Unbind",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("save_again", marks=pytest.mark.long), "direct"])
def test_strace_sees_the_same_effects_in_the_same_order(warm_python, name, tmp_path):
    """No call of the store bypasses the recorder."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    top, warm, log = tmp_path / "top", tmp_path / "warm", tmp_path / "log"
    top.mkdir(), warm.mkdir()
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]), top=str(top), warm=str(warm), name=name)
    with subprocess.Popen(
        warm_python.command("-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as saver:
        pid = saver.stdout.readline().strip()
        words = [strace, "-f", "-y", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(log), "-p", pid]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tracer:
            if "attached" not in (line := tracer.stderr.readline()):
                saver.kill()
                pytest.skip(f"strace may not attach here: {line}")
            effects, _ = saver.communicate("go on\n", timeout=100)
            tracer.communicate(timeout=30)
    assert saver.returncode == 0
    seen = [kind for line in whole_lines(log.read_text()) if (kind := kind_of(line, top)) is not None]
    assert seen == [kind for kind in effects.split() if kind != "Mark"]


def whole_lines(text):
    """The calls in the order in which they ended; a call that strace shows in two parts is put together."""
    begun = {}
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        if rest.strip().endswith("<unfinished ...>"):
            begun[pid] = rest.strip().removesuffix("<unfinished ...>")
        elif found := re.match(r"\s*<\.\.\. \w+ resumed>(.*)", rest):
            yield begun.pop(pid) + found[1]
        else:
            yield rest.strip()


def kind_of(line, top):
    """The kind of effect in a line of strace, if it is below a directory."""
    found = re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", line)
    if found is None or str(top) not in found[2] or found[3].startswith("-"):
        return None
    if found[1] == "openat":
        return "Bind" if "O_CREAT" in found[2] and ("O_EXCL" in found[2] or kind_of.made(found[2])) else None
    return KINDS[found[1]]


def _made_now(arguments, known=set()):  # noqa: B006  # one process, one run: the lock file is made once in each
    new = arguments not in known
    known.add(arguments)
    return new


kind_of.made = _made_now


# --- the rules of the disk -------------------------------------------------------------------------------------------

MADE = Bind(TOP, "a", 1, "file")
TEXT = b"x" * (BLOCK_BYTES + 10)


def after(*effects):
    """Every disk that a crash may leave after some effects."""
    disk = after_all(effects)
    return [state.files for state in states_of(disk, 0, Budget(10**6, 10**6))], disk


def contents(*effects):
    """What a crash may leave of the file `a`, which exists in every state."""
    states, _ = after(MADE, Sync(TOP), *effects)
    return {state["a"] for state in states}


def test_what_nobody_has_synced_may_be_there_in_part_or_not_at_all():
    found = contents(Write(1, 0, TEXT))
    block, rest = TEXT[:BLOCK_BYTES], TEXT[BLOCK_BYTES:]
    assert found == {
        b"", TEXT, block, bytes(len(block)), bytes(len(TEXT)), block + bytes(len(rest)), bytes(len(block)) + rest,
    }  # fmt: skip


def test_a_sync_makes_the_bytes_durable_and_not_the_name():
    states, _ = after(MADE, Write(1, 0, b"text"), Sync(1))
    assert sorted(state.get("a", b"-") for state in states) == [b"-", b"text"]


def test_a_sync_of_the_directory_makes_the_name_durable_and_not_the_bytes():
    assert contents(Write(1, 0, b"text"), Sync(TOP)) == {b"", bytes(4), b"text"}


def test_after_a_sync_that_failed_none_makes_the_bytes_durable():
    assert b"" in contents(Write(1, 0, b"text"), SyncFailed(1), Sync(1))


def test_a_size_may_be_there_without_the_bytes():
    assert contents(Resize(1, 8), Write(1, 0, b"text")) >= {b"", bytes(8), b"text" + bytes(4)}
    assert content(b"longer", [Resize(1, 2)]) == b"lo"


def test_a_rename_leaves_the_old_or_the_new_and_perhaps_both_names():
    states, _ = after(MADE, Bind(TOP, "b", 2, "file"), Write(1, 0, b"new"), Sync(1), Write(2, 0, b"old"), Sync(2), Sync(TOP),
                      Move(TOP, "a", TOP, "b", 1))  # fmt: skip
    found = sorted(tuple(sorted(state.items())) for state in states)
    assert found == [(("a", b"new"), ("b", b"new")), (("a", b"new"), ("b", b"old")), (("b", b"new"),)]


def test_changes_of_names_in_one_directory_are_durable_without_those_in_another():
    states, _ = after(Bind(TOP, "d", 1, "directory"), Bind(1, "a", 2, "file"), Sync(1))
    assert [sorted(state) for state in states] == [[], ["d", "d/a"]]
    states, _ = after(Bind(TOP, "d", 1, "directory"), Sync(TOP), Bind(1, "a", 2, "file"), Unbind(1, "a"))
    assert sorted(sorted(state) for state in states) == [["d"], ["d", "d/a"]]


def test_what_a_crash_may_leave_anywhere_it_may_leave_before_a_sync_too():
    """The usual run looks there alone, and misses nothing that the budget would let it see."""
    done = [MADE, Write(1, 0, TEXT), Sync(1), Bind(TOP, "b", 2, "file"), Write(2, 0, b"old"), Sync(TOP), Sync(2),
            Write(2, 1, b"x"), Move(TOP, "a", TOP, "b", 1), Unbind(TOP, "b"), Bind(TOP, "c", 3, "file"), Write(1, 3, b"y"), Sync(1),
            Bind(TOP, "d", 4, "directory"), Bind(4, "e", 5, "file"), Sync(4), Write(5, 0, TEXT), Sync(TOP), Unbind(TOP, "c")]  # fmt: skip
    whole = Budget(10**6, 10**6)
    everywhere = {state.key() for state in crash_states(done, whole)}
    there = {state.key() for state in crash_states(done, whole, places=before_syncs(done))}
    assert there == everywhere
    assert len(there) > 50


def test_what_is_live_is_all_that_was_done():
    _, disk = after(MADE, Write(1, 0, b"one"), Move(TOP, "a", TOP, "b", 1))
    assert live(disk) == ({"b": b"one"}, {"b": 1})
