"""Ground truth: a real ext4 filesystem loses its power during a save, is mounted again, and the run continues."""

import random
import shutil
import time
from pathlib import Path
from unittest import mock

import attrs
import pytest

import trainfold
from crash.disk.effects import Mark
from crash.effort import CUTS, IS_SOAK, say
from crash.kills.power_cut import KEPT, NoLoopDevice, Writer, powered_disk
from crash.saves.recovery import Promised, broken, look, staged
from crash.saves.rivals import RIVALS
from crash.saves.scenarios import Doing, digest_of_state, state_at
from trainfold.backends.stores.local import LocalStore

LATEST_CUT_SECS = 0.03


@pytest.fixture(scope="module")
def disk():
    """A private disk that can lose its power."""
    try:
        with powered_disk() as made:
            yield made
    except NoLoopDevice as why:
        pytest.skip(f"no disk whose power can be cut: {why}")


@pytest.fixture(scope="module")
def writer(warm_python):
    """A process that saves to it."""
    made = Writer(warm_python)
    yield made
    made.close()


def saved_until_cut(disk, writer, how, run, chance):
    """The writer's output; the power is cut a while after one of its saves."""
    awaited = 2 * chance.randrange(12) + chance.randrange(2)
    writer.start(how, run)
    said = []
    while len(said) < awaited:
        said.append(writer.next())
        assert said[-1][0] != "end", f"it ended before the power did: {said[-1]}"
    time.sleep(chance.random() * LATEST_CUT_SECS)
    disk.cut()
    while not said or said[-1][0] != "end":
        said.append(writer.next())
    disk.boot()
    return said


def test_no_other_filesystem_than_the_one_made_for_it_can_be_cut(disk, tmp_path):
    """The call is replaced in this test, and must not be reached."""
    elsewhere = tmp_path / "trainfold-power-cut"
    elsewhere.mkdir()
    (tmp_path / "image").touch()
    others = [
        attrs.evolve(disk, mounted=elsewhere),
        attrs.evolve(disk, mounted=disk.mounted.parent),
        attrs.evolve(disk, mounted=Path("/")),
        attrs.evolve(disk, image=tmp_path / "image"),
        attrs.evolve(disk, device="/dev/null"),
    ]
    with mock.patch("fcntl.ioctl") as ioctl:
        for other in others:
            with pytest.raises(AssertionError):
                other.cut()
        assert not ioctl.called
        disk.cut()
        assert ioctl.called


@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_after_a_power_cut_in_mid_save_the_run_goes_on_from_what_was_acknowledged(disk, writer):
    """C01, C02: everything else that was acknowledged is found too."""
    chance, in_flight, deleted, start = random.Random(4), 0, 0, time.monotonic()
    for cut in range(CUTS):
        run = disk.mounted / f"run-{cut}"
        said = saved_until_cut(disk, writer, ("sync", "async")[cut % 2], run, chance)
        assert said[-1][0] == "end"
        assert said[-1][2] != "it could", "the cut came too late"
        promised, gone = promised_by(said[:-1])
        deleted += gone > 0
        in_flight += promised.in_flight is not None
        wrong = broken(look(LocalStore(run)), promised)
        assert not wrong, f"cut {cut}, after {said[-3:]}: {wrong}"
        if run.exists():
            with LocalStore(run).lock():
                assert not list(staged(run)), "left after the lock was taken"
        further = state_at(1000)
        trainfold.save(further, run)
        assert digest_of_state(trainfold.load(run, like=state_at(0))) == digest_of_state(further)
        shutil.rmtree(run)
    say(f"{CUTS} cuts, {in_flight} of them in mid-save, {deleted} after deletions, {time.monotonic() - start:.1f} s")
    assert in_flight
    assert deleted


def promised_by(said):
    """What a writer has promised, and how many checkpoints were deleted. A manager deletes old ones when the next one is committed.

    An async save may still be deleting in the background when a new best is written, so the former best may be deleted at once.
    """
    promised, kept, count = Promised(), (), 0
    for what, step, about in said:
        if about.get("best") is not None:
            kept = kept[:KEPT]
            promised = attrs.evolve(promised, standing=tuple(pair for pair in promised.standing if pair[0] in kept))
        if what == "ack" and "kept" in about:
            kept = tuple(about["kept"])
        staying = kept if what == "ack" else (*kept[: KEPT - 1], *kept[KEPT:])
        gone = tuple(name for name, _ in promised.standing if name not in staying) if "digest" in about else ()
        doing = Doing(step, about.get("digest", ""), gone, best=about.get("best"))
        promised, count = promised.after(Mark(what, doing)), count + (len(gone) if what == "ack" else 0)
    return promised, count


@pytest.mark.timeout(120)
def test_such_a_cut_takes_away_what_others_had_acknowledged(disk, writer):
    """Teeth: a power cut that never loses anything would prove nothing. This writer syncs no directory."""
    chance, lost, cuts = random.Random(5), 0, 0
    while not lost and cuts < 9:  # on a busy machine the disk may have been synced meanwhile
        cuts += 1
        run = disk.mounted / f"rival-{cuts}"
        said = saved_until_cut(disk, writer, "torch", run, chance)
        acknowledged = max((step for what, step, _ in said if what == "ack"), default=0)
        try:
            RIVALS["torch.save, fsync, replace"].load(run, acknowledged)
        except Exception:  # noqa: BLE001  # it is gone, or another one is there: perhaps the one that was in flight
            try:
                RIVALS["torch.save, fsync, replace"].load(run, acknowledged + 1)
            except Exception:  # noqa: BLE001
                lost += acknowledged > 0
        shutil.rmtree(run)
    say(f"torch.save, fsync, replace: the acknowledged state was lost in {lost} of {cuts} cuts")
    assert lost
