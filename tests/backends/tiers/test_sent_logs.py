"""The logs of a run in two tiers, when the disk is lost, or was left behind by another machine."""

import random
import shutil
import threading

import pytest
from kit.adapters.manager.flight_cases import Recorded, died

from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight import log_parts, log_pieces
from trainfold.backends.flight.flights import flight_name, read_flights
from trainfold.backends.flight.journals import JOURNAL, read_journal
from trainfold.backends.flight.log_parts import part_numbers
from trainfold.backends.flight.log_pieces import read_log
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import sent_logs
from trainfold.backends.tiers.compare_runs import planned_copy
from trainfold.backends.tiers.copy_checkpoints import carry_out
from trainfold.backends.tiers.sent_logs import SentLogs
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.errors import SaveFailed
from trainfold.core.flight.log_lines import LINE_BYTES
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.page.document import page_html
from trainfold.core.page.kept import policy_of, why_kept
from trainfold.core.save.retention import keep_every

NAME = flight_name(0)


@pytest.fixture
def small_parts(monkeypatch):
    for module in (log_parts, log_pieces, sent_logs):
        monkeypatch.setattr(module, "PART_BYTES", 4 * LINE_BYTES)


def trained(run, last, *, dies_after=None):
    manager = CheckpointManager(run, every=2, record=3)
    Recorded(0).run(manager, last, dies_after)
    if dies_after is None:
        manager.close()
    else:
        manager.drain()
        died(manager)


@pytest.mark.usefixtures("small_parts")
def test_a_run_in_two_tiers_whose_disk_is_lost_has_the_log_of_the_run_that_was_never_killed(tmp_path):
    """R04: the far tier has the log of each checkpoint before it has the checkpoint, and a start that fetches this fetches that."""
    trained(tmp_path / "whole", 9)
    far = MemoryStore()
    trained(TwoTiers(tmp_path / "a", far), 9, dies_after=5)
    assert list(read_flights(far)[0].steps)[:4] == [1, 2, 3, 4]
    trained(TwoTiers(tmp_path / "b", far), 9)
    for store in (LocalStore(tmp_path / "b"), far):
        assert read_log(store, NAME, store.list()) == (tmp_path / "whole" / NAME).read_bytes()
        assert [line.step for line in read_journal(store).lines if line.kind == "started"] == [0, 4]
        assert read_journal(store).lines[-1].kind == "closed"
    assert len(part_numbers(NAME, far.list())) > 1
    assert part_numbers(NAME, LocalStore(tmp_path / "b").list()) == [0]


@pytest.mark.usefixtures("small_parts")
def test_a_disk_that_was_left_behind_gets_the_logs_and_one_that_is_ahead_keeps_its_own(tmp_path):
    """What the far tier has longer replaces what the disk has, where the checkpoint comes from there; else the disk has the run."""
    far, whole = MemoryStore(), tmp_path / "whole"
    trained(whole, 12)
    trained(TwoTiers(tmp_path / "a", far), 4)
    trained(TwoTiers(tmp_path / "b", far), 8)
    trained(tmp_path / "b", 10)  # without the far tier
    trained(TwoTiers(tmp_path / "b", far), 10)
    trained(TwoTiers(tmp_path / "a", far), 12)
    for store in (LocalStore(tmp_path / "a"), far):
        assert read_log(store, NAME, store.list()) == (whole / NAME).read_bytes()
    starts = [line.step for line in read_journal(LocalStore(tmp_path / "a")).lines if line.kind == "started"]
    assert starts == [0, 4, 8, 10, 10]


@pytest.mark.usefixtures("small_parts")
def test_a_disk_that_was_left_behind_with_more_steps_gets_the_log_of_the_run_that_went_on(tmp_path, monkeypatch):
    """R04: its log was longer, so it got lines of steps that are not the run's, and the far log was overwritten with them; no line of the journal is lost."""
    far, late = MemoryStore(), tmp_path / "a"
    trained(TwoTiers(late, far), 9, dies_after=3)
    shutil.copytree(late, tmp_path / "b", symlinks=True)
    trained(late, 9, dies_after=9)  # without the far tier, of which 8 is lost
    shutil.rmtree(late / "step-00000008")
    shutil.rmtree(late / "step-00000006")
    shutil.rmtree(late / "step-00000004")
    monkeypatch.setattr(random, "random", lambda: 0.5)
    trained(TwoTiers(tmp_path / "b", far), 6)
    logs = [read_log(far, NAME, far.list()), read_log(LocalStore(late), NAME, LocalStore(late).list())]
    assert len(logs[0]) < len(logs[1])
    journals = [set(read_log(each, JOURNAL, each.list()).splitlines()) for each in (far, LocalStore(late))]
    assert journals[0] - journals[1]
    assert journals[1] - journals[0]
    trained(TwoTiers(late, far), 8)
    for store in (LocalStore(late), far):
        assert read_log(store, NAME, store.list()).startswith(logs[0])
        assert sorted(read_flights(store)[0].steps) == [*range(1, 9)]
        lines = read_log(store, JOURNAL, store.list()).splitlines()
        assert set(lines) >= journals[0] | journals[1]
        assert len(set(lines)) == len(lines)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("keeps_notes", [True, False])
def test_only_what_is_new_of_a_log_is_sent_and_what_was_cut_goes(tmp_path, keeps_notes):
    """A part is put once when it is full; of a log that goes back the later parts are deleted, the last one first."""
    far, near, puts = MemoryStore(), LocalStore(tmp_path), []
    logs = SentLogs(near, far)
    for lines in (10, 11, 30, 3):
        data = b"".join(bytes([line + 1]) * LINE_BYTES for line in range(lines))
        near.write(NAME, [data], size_bytes=len(data))
        before = len(far.effects)
        (logs if keeps_notes else SentLogs(near, far)).send()
        puts.append(
            [(effect.kind, effect.name) for effect in far.effects[before:] if effect.kind in {"finish", "delete"}]
        )
        assert read_log(far, NAME, far.list()) == data
    second, third = "flight-00000-00001.log", "flight-00000-00002.log"
    assert puts[0] == [("finish", each) for each in (NAME, second, third)]
    assert puts[1] == [("finish", third)]
    assert [name for _, name in puts[2]] == [third, *(f"flight-00000-0000{number}.log" for number in range(3, 8))]
    assert [kind for kind, _ in puts[3]] == ["delete"] * 7 + ["finish"]
    assert puts[3][0][1] == "flight-00000-00007.log"


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A near and a far tier, and the calls that read or write a name in them, with how many bytes."""
    calls = []

    def count(kind, of, method):
        real = getattr(of, method)

        def call(self, name, *args, **options):
            found = real(self, name, *args, **options)
            calls.append((kind, name, options["size_bytes"] if found is None else len(found)))
            return found

        monkeypatch.setattr(of, method, call)

    count("near", LocalStore, "read")
    count("far", MemoryStore, "read")
    count("put", MemoryStore, "write")
    return LocalStore(tmp_path), MemoryStore(), calls


def test_a_log_that_has_not_changed_is_neither_read_nor_sent(counted):
    """R04: each of a thousand logs was read wholly at each upload."""
    near, far, calls = counted
    names = [flight_name(rank) for rank in range(100)]
    for name in names:
        near.write(name, [bytes(LINE_BYTES)], size_bytes=LINE_BYTES)
    logs = SentLogs(near, far)
    logs.send()
    assert sorted(calls) == [(kind, name, LINE_BYTES) for kind in ("near", "put") for name in names]
    calls.clear()
    logs.send()
    assert calls == []
    near.write(names[7], [bytes(3 * LINE_BYTES)], size_bytes=3 * LINE_BYTES)
    logs.send()
    assert calls == [("near", names[7], 3 * LINE_BYTES), ("put", names[7], 3 * LINE_BYTES)]
    near.write(names[7], [b"\1" * 3 * LINE_BYTES], size_bytes=3 * LINE_BYTES)  # as many bytes
    logs.send()
    assert far.read(names[7]) == near.read(names[7])


def test_several_logs_are_sent_at_once_and_one_that_is_refused_keeps_no_other(tmp_path, monkeypatch, caplog):
    """R04: a thousand ranks were as many puts one after the other, and those after a refused one were not made."""
    far, near = MemoryStore(), LocalStore(tmp_path)
    names = [flight_name(rank) for rank in range(20)]
    for name in names:
        near.write(name, [bytes(LINE_BYTES)], size_bytes=LINE_BYTES)
    real, both, under_way, most = far.write, threading.Barrier(2), set(), []

    def write(name, *args, **options):
        under_way.add(name)
        most.append(len(under_way))
        if name in names[:2]:
            both.wait(60.0)  # for the other one
        if name == names[3]:
            under_way.discard(name)
            raise SaveFailed("far", expected="room", found="none", fix="make some")
        real(name, *args, **options)
        under_way.discard(name)

    monkeypatch.setattr(far, "write", write)
    logs = SentLogs(near, far)
    logs.send()
    assert far.list() == [*names[:3], *names[4:]]
    assert max(most) <= sent_logs._AT_ONCE
    assert caplog.text.count("is not in the far tier") == 1
    monkeypatch.setattr(far, "write", real)
    logs.send()
    assert far.list() == names


def test_a_far_tier_that_takes_no_log_is_a_warning_once(tmp_path, caplog):
    """A log must not end a run, nor keep its checkpoints from being sent."""
    far, near = MemoryStore(), LocalStore(tmp_path)
    near.write(JOURNAL, [b"{}\n"], size_bytes=3)
    logs = SentLogs(near, far)

    def refuses(*_, **__):
        raise SaveFailed("far", expected="room", found="none", fix="make some")

    write, far.write = far.write, refuses
    logs.send()
    logs.send()
    assert sum("is not in the far tier" in each.getMessage() for each in caplog.records) == 1
    far.write = write
    logs.send()
    assert far.read(JOURNAL) == b"{}\n"


def steps_and_starts(store):
    return sorted(read_flights(store)[0].steps), [
        each.step for each in read_journal(store).lines if each.kind == "started"
    ]


def test_a_far_log_that_could_not_be_fetched_stays_whole(tmp_path, monkeypatch, caplog):
    """One error while a disk that was lost got its logs back: what was sent next replaced the log of the whole run by its end."""
    far = MemoryStore()
    trained(TwoTiers(tmp_path / "a", far), 6)
    fetch, read = SentLogs.fetch, far.read

    def unread(name, **where):
        raise SaveFailed("far", expected="bytes", found="timeout", fix="wait")

    def failing(self, **options):
        far.read = unread
        fetch(self, **options)
        far.read = read

    monkeypatch.setattr(SentLogs, "fetch", failing)
    trained(TwoTiers(tmp_path / "b", far), 8)
    assert steps_and_starts(far) == ([*range(1, 7)], [0])
    assert caplog.text.count("begins otherwise than that of the disk") == 2
    assert steps_and_starts(LocalStore(tmp_path / "b"))[0] == [7, 8]


@pytest.mark.usefixtures("small_parts")
def test_a_run_that_starts_over_has_its_log_in_the_far_tier(tmp_path, monkeypatch, caplog):
    """R04: its log begins otherwise since this start has cut it, and no later line reached the far tier; as on a disk, the lines of the steps before go."""
    far = MemoryStore()
    trained(TwoTiers(tmp_path / "a", far), 6)
    monkeypatch.setattr(random, "random", lambda: 0.5)
    with CheckpointManager(TwoTiers(tmp_path / "a", far), every=2, record=3, start_over=True) as manager:
        Recorded(0).run(manager, 4)
    near = LocalStore(tmp_path / "a")
    assert sorted(read_flights(near)[0].steps) == [*range(1, 5)]
    for name in (NAME, JOURNAL):
        assert read_log(far, name, far.list()) == read_log(near, name, near.list())
    assert "begins otherwise" not in caplog.text


def test_a_disk_that_was_made_by_a_copy_gets_the_logs_which_a_copy_leaves_out(tmp_path):
    """It has the newest checkpoint already, so nothing else is fetched."""
    far = MemoryStore()
    trained(TwoTiers(tmp_path / "a", far), 6)
    near = LocalStore(tmp_path / "b")
    carry_out(planned_copy(far, near, steps="newest"), far, near)
    trained(TwoTiers(tmp_path / "b", far), 8)
    assert steps_and_starts(far) == steps_and_starts(near) == ([*range(1, 9)], [0, 6])


def test_the_page_of_each_tier_has_its_own_rules(tmp_path):
    """W22: that of the far tier had those of the disk, and of what it keeps `no reason is known`."""
    near, far = tmp_path / "near", LocalStore(tmp_path / "far")
    tiers = TwoTiers(near, far, keep_far=keep_every(4))
    with CheckpointManager(tiers, every=1, keep_last=1, record=3) as manager:
        Recorded(0).run(manager, 6)

    def shown(run):
        page = PageReader(run).read()
        return str(policy_of(page.journal, page.place)), why_kept(page)

    assert shown(near) == ("the last one", {"step-00000006": ("the newest", "the pointer latest", "the last one")})
    rules, kept = shown(tmp_path / "near" / ".." / "far")
    assert (rules, sorted(kept)) == ("every 4 steps", [name for name in far.list() if name.startswith("step-")])
    assert kept["step-00000004"] == ("every 4 steps",)


class Refuses(MemoryStore):
    """A far tier that takes no manifest."""

    def commit(self, name, data, **more):
        if name.endswith(MANIFEST):
            raise SaveFailed(name, expected="room", found="503", fix="wait")
        super().commit(name, data, **more)


def test_what_was_not_sent_is_in_the_journal_and_the_end_is_that_of_the_manager(tmp_path):
    """W22: the page had nothing of failed uploads, and said `ended` of a process that had ended with SaveFailed, for a far tier without its last checkpoint."""
    manager = CheckpointManager(TwoTiers(tmp_path / "a", Refuses()), every=2, record=3)
    Recorded(0).run(manager, 2)
    with pytest.raises(SaveFailed, match="in the far tier"):
        manager.close()
    lines = read_journal(LocalStore(tmp_path / "a")).lines
    assert [(line.kind, line.detail) for line in lines[-1:]] == [("closed", "SaveFailed")]
    assert any(line.kind == "not_uploaded" and "503" in line.detail for line in lines)
    assert "committed" in [line.kind for line in lines]
    assert "A checkpoint was not sent to the far tier, step 2" in page_html(PageReader(tmp_path / "a").read())
