"""A rank is really killed inside a load, a restore or an evaluation: the others end in time and name it, and the next start has the same bits."""

import os
import signal

import pytest
import torch

import trainfold
from trainfold import metrics as M
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import fingerprint

HASTY = {"timeout_secs": 60.0, "grace_secs": 0.5}
NO_RANK = -1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(LocalStore):
    """Kills this process when it reads what it is to die of."""

    def __init__(self, path, point):
        super().__init__(path)
        self._point = point

    def read(self, name, *, start=0, stop=None):
        if self._point == "the manifest" and name.endswith(MANIFEST) and (start or (stop or 0) > 4096):
            die()  # the whole of it, or its end
        return super().read(name, start=start, stop=stop)

    def opened(self, name):
        if self._point == "the data" or (self._point == "the memory of the weights" and Own.taken):
            die()
        return super().opened(name)


class Own:
    """An object of a user, which dies while it takes its state. It has its state before the weights are overwritten."""

    taken = False

    def __init__(self):
        self.value, self.point = torch.zeros(2), ""

    def state_dict(self):
        return {"value": self.value.clone()}

    def load_state_dict(self, state):
        if self.point == "the restore":
            die()
        self.value, Own.taken = state["value"].clone(), True


def make(point=""):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    adamw = torch.optim.AdamW(model.parameters())
    live = trainfold.attach(model, adamw, extra={"own": (own := Own())})
    own.point = point  # after the attach, so that it does not count as a setting
    return live, model, adamw


def prints(live):
    """What all ranks have alike."""
    return {name: value for name, value in fingerprint(live.capture()).items() if name != "rng"}


def train_and_save(collectives, run):
    live, model, adamw = make()
    with trainfold.CheckpointManager(run, every=1, collectives=collectives) as manager:
        manager.restore(live)
        for _ in range(3):
            model(torch.ones(2, 64)).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
            live.advance(samples=2)
            manager.step(live)
    return prints(live)


def resume(collectives, run, victim, point, in_place):
    is_victim = collectives.rank == victim
    live, _, _ = make(point if is_victim else "")
    store = Deadly(run, point) if is_victim else LocalStore(run)
    with trainfold.CheckpointManager(store, collectives=collectives) as manager:
        manager.restore(live, in_place=in_place)
    return live.progress.step, prints(live)


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    ("victim", "in_place"), [(0, False), pytest.param(1, False, marks=pytest.mark.long), (1, True)]
)
def test_a_rank_killed_in_a_load_is_named_by_the_others_and_the_next_start_has_the_same_bits(
    processes, tmp_path, victim, in_place
):
    """C07, P06, V12, X10: while it reads the manifest, while it reads tensors, and while its objects take their state.

    P07: three loads of one checkpoint in which a rank dies are enough, as for a single process. They were not counted where rank 0 survived.
    """
    run = str(tmp_path / "run")
    whole = processes.run(2, train_and_save, run, collectives=HASTY)
    for point in ("the memory of the weights",) if in_place else ("the manifest", "the data", "the restore"):
        ended = processes.outcomes(2, resume, run, victim, point, in_place, collectives=HASTY)
        survivor = ended[1 - victim]
        assert ended[victim].code == -signal.SIGKILL, (point, ended[victim].printed)
        error = "HalfRestored" if in_place else "RankFailed"  # it has overwritten its own weights
        assert (survivor.code, survivor.error) == (1, error), (point, survivor.printed)
        assert f"rank {victim}: expected every rank to take part, found no sign of it" in survivor.text, point
        assert survivor.secs < HASTY["timeout_secs"] / 2, point
        counted = list(quarantined(LocalStore(run), limit=1))
        assert counted == (["step-00000003"] if in_place or point == "the data" else []), point
        again = processes.run(2, resume, run, NO_RANK, "", in_place, collectives=HASTY)
        assert again == [(3, each) for each in whole], point


def evaluate(collectives, victim):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    batches = torch.arange(2 * 5 * 3 * 8.0).reshape(2, 5, 3, 8)[collectives.rank]

    def forward(x):
        if collectives.rank == victim and x[0, 0] == batches[3, 0, 0]:
            die()
        return {"loss": (model(x).sum().item(), len(x))}

    result = trainfold.evaluate(forward, list(batches), {"loss": M.Ratio()}, collectives=collectives, modules=model)
    return result["loss"]


@pytest.mark.slow(2)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_killed_in_an_evaluation_is_named_by_the_others_and_the_next_one_has_the_same_bits(processes, victim):
    """C07, X10: between two of its batches."""
    whole = processes.run(2, evaluate, NO_RANK, collectives=HASTY)
    ended = processes.outcomes(2, evaluate, victim, collectives=HASTY)
    survivor = ended[1 - victim]
    assert ended[victim].code == -signal.SIGKILL
    assert (survivor.code, survivor.error) == (1, "RankFailed"), survivor.printed
    assert f"rank {victim}: expected every rank to take part, found no sign of it" in survivor.text
    assert survivor.secs < HASTY["timeout_secs"] / 2
    assert processes.run(2, evaluate, NO_RANK, collectives=HASTY) == whole
