"""What is declared to belong to rank 0, to a share of the data or to each rank is saved so, given back so, and refused elsewhere."""

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.formats.native.contents import content_fingerprints
from trainfold.backends.runs.scan import read_manifest
from trainfold.core.errors import InvalidArgument, RanksDisagree, ResumeRefused
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.state.state import OfRankZero, Opaque, PerRank, TrainState, make_progress
from trainfold.ranks import Coordinates, World, run_threads
from trainfold.stores import MemoryStore


class Meter:
    def __init__(self, values):
        self._held = {"values": values}

    def state_dict(self):
        return dict(self._held)

    def load_state_dict(self, state):
        self._held = dict(state)


def held(meter):
    return meter.state_dict()["values"]


def shares_of_two(ranks):
    class TwoByTwo:
        gradient_divisor = None
        coordinates = Coordinates(
            World(ranks.rank, ranks.world_size), World(ranks.rank // 2, max(1, ranks.world_size // 2))
        )

    return TwoByTwo()


def made(ranks, sharing, *, seed=77):
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    noise = torch.Generator().manual_seed(seed)
    extra = {"meter": Meter([]), "log": Meter([]), "queue": Meter([]), "noise": noise}
    return attach(model, extra=extra, sharing=sharing, parallelism=shares_of_two(ranks)), extra


def trained(ranks, sharing):
    live, extra = made(ranks, sharing, seed=ranks.rank)
    extra["meter"].load_state_dict({"values": [float(ranks.rank)] * (1 + ranks.rank)})
    extra["log"].load_state_dict({"values": [ranks.rank + 5.0]})
    extra["queue"].load_state_dict({"values": [torch.full((2,), ranks.rank // 2 + 0.5)]})
    live.advance(samples=1)
    return live, extra


DECLARED = {"meter": "each_rank", "log": "rank_0", "queue": "each_share", "noise": "each_rank"}


def save_on(ranks, store, mode="sync", sharing=DECLARED):
    live, extra = trained(ranks, sharing)
    with CheckpointManager(store, collectives=ranks, mode=mode) as manager:
        manager.save(live)
    return extra["noise"].get_state().sum().item()


def load_on(ranks, store, sharing=DECLARED, **how):
    live, extra = made(ranks, sharing)
    with CheckpointManager(store, collectives=ranks, **how) as manager:
        manager.restore(live)
    found = {
        name: [float(torch.as_tensor(each).sum()) for each in held(extra[name])] for name in ("meter", "log", "queue")
    }
    return found, extra["noise"].get_state().sum().item()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_rank_gets_what_belongs_to_it(mode):
    """B05, B06: a meter and a generator of each rank, a log of rank 0, a queue of each share of the data."""
    store = MemoryStore()
    seeds = run_threads(4, lambda ranks: save_on(ranks, store, mode))
    assert len(set(seeds)) == 4
    for rank, (found, seed) in enumerate(run_threads(4, lambda ranks: load_on(ranks, store))):
        assert found["meter"] == [float(rank)] * (1 + rank)
        assert found["log"] == [5.0]
        assert found["queue"] == [2 * (rank // 2) + 1.0]
        assert seed == seeds[rank]


def test_another_number_of_ranks_gets_what_belongs_to_its_shares_and_what_is_rank_0s():
    """N02, G05: eight ranks in two shares cannot have the meters of four ranks; each reads the queue of its share."""
    store = MemoryStore()
    run_threads(4, lambda ranks: save_on(ranks, store))

    def on_two(ranks):
        live, extra = made(ranks, DECLARED)
        live._objects.ranks._given.coordinates = Coordinates(World(ranks.rank, 2), World(ranks.rank, 2))
        why = dict.fromkeys(("meter", "noise"), "two ranks now")
        with CheckpointManager(store, collectives=ranks) as manager:
            text = refusal(lambda: manager.restore(live))
            manager.restore(live, reset=why)
        return text, [float(each.sum()) for each in held(extra["queue"])], held(extra["log"]), held(extra["meter"])

    for rank, (text, queue, log, meter) in enumerate(run_threads(2, on_two)):
        assert text.startswith("ResumeRefused")
        assert "per_rank           meter: saved 4 ranks, wanted 2 ranks" in text
        assert "queue" not in text
        assert queue == [2 * rank + 1.0]
        assert (log, meter) == ([5.0], [])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_value_of_a_share_is_stored_once(mode):
    """B06, F36: the first rank of a share writes what all its ranks have, and the others make every call too; contents have one fingerprint for the ranks and the checkpoint."""
    store, kept = MemoryStore(), 100_000

    def save(ranks):
        live, extra = trained(ranks, {**DECLARED, "queue": "each_share"})
        extra["queue"].load_state_dict({"values": [torch.full((kept,), ranks.rank // 2 + 0.5)]})
        state = live.capture()
        with CheckpointManager(store, collectives=ranks, mode=mode) as manager:
            manager.save(live)
        return content_fingerprint(state, collectives=ranks)

    wanted = run_threads(4, save)
    sizes = {
        name: store.size(f"step-00000001/{name}") for name in store.list("step-00000001") if name.startswith("queue-")
    }
    assert sorted(sizes) == ["queue-00000-of-00004.safetensors", "queue-00002-of-00004.safetensors"]
    found = read_manifest(store, "step-00000001")
    contents = content_fingerprints(store, "step-00000001", found)
    for each in wanted:  # the streams of threads are those of the process
        assert {**each, "rng": ""} == {**contents, "rng": ""}
    for rank, (loaded, _) in enumerate(run_threads(4, lambda ranks: load_on(ranks, store))):
        assert loaded["queue"] == [kept * (rank // 2 + 0.5)]


def test_replicas_of_a_share_that_differ_are_refused():
    """B06: ranks with one share must have one value."""
    store = MemoryStore()

    def save(ranks):
        live, extra = trained(ranks, DECLARED)
        extra["queue"].load_state_dict({"values": [torch.full((2,), float(ranks.rank))]})
        with CheckpointManager(store, collectives=ranks) as manager:
            return refusal(lambda: manager.save(live))

    for text in run_threads(4, save):
        assert text.startswith("RanksDisagree: queue.value")
        assert "on rank 1" in text


def test_what_is_not_declared_is_refused_and_the_fix_says_how_to_declare_it():
    store = MemoryStore()
    for text in run_threads(2, lambda ranks: refusal(lambda: save_on(ranks, store, sharing={}))):
        assert text.startswith("RanksDisagree")
        assert "sharing={'name': 'each_rank'}" in text


class Counted(nn.Linear):
    """Returns beside its tensors what it is given."""

    def __init__(self, returned):
        super().__init__(1, 1)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.returned = returned

    def get_extra_state(self):
        return self.returned

    def set_extra_state(self, state):
        self.returned = state


@pytest.mark.parametrize("count", [float, torch.tensor])
def test_what_a_module_of_each_rank_returns_itself_is_refused_with_a_way_out(count):
    """It cannot be declared, which was the advice: an object under extra can be."""
    store = MemoryStore()

    def save(ranks):
        live = attach(Counted({"seen": count(ranks.rank)}))
        with CheckpointManager(store, collectives=ranks) as manager:
            return refusal(lambda: manager.save(live))

    for text in run_threads(2, save):
        assert text.startswith("RanksDisagree: module_extra_state.value")
        assert "attach(..., extra={'seen': seen}, sharing={'seen': 'each_rank'})" in text

    def follow(ranks, seen):
        meter = Meter([])
        live = attach(Counted({}), extra={"seen": meter}, sharing={"seen": "each_rank"})
        with CheckpointManager(store, collectives=ranks) as manager:
            manager.restore(live)
            if live.progress.step == 0:
                meter.load_state_dict({"values": [count(seen)]})
            live.advance(samples=1)
            manager.save(live)
        return float(held(meter)[0])

    assert run_threads(2, lambda ranks: follow(ranks, ranks.rank)) == [0.0, 1.0]
    assert run_threads(2, lambda ranks: follow(ranks, 7)) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("sharing", "found"),
    [
        ({"metre": "each_rank"}, "metre"),
        ({"model": "each_rank"}, "model"),
        ({"meter": "mine"}, "mine"),
        ({"model.buffers": "each_share"}, "each_share"),
        ("each_rank", "each_rank"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(sharing, found):
    """B02: when it is made, by name."""
    with pytest.raises(InvalidArgument, match=found):
        attach(nn.Linear(1, 1), extra={"meter": Meter([])}, sharing=sharing)


def test_a_state_of_ones_own_declares_the_same(tmp_path):
    """B05: the nodes are public, and one process is the case of one rank."""

    def state(ranks, count):
        own = PerRank({"n": ranks.rank, "t": torch.full((2,), float(ranks.rank))})
        first = OfRankZero({"text": f"rank {ranks.rank}"})
        shared = PerRank(torch.tensor([ranks.rank // 2]), share=ranks.rank // 2, shares=count // 2)
        return TrainState(trainer=make_progress(step=1), extra={"own": own, "first": first, "shared": shared})

    run_threads(4, lambda ranks: trainfold.save(state(ranks, 4), tmp_path, collectives=ranks))
    loaded = run_threads(4, lambda ranks: trainfold.load(tmp_path, like=state(ranks, 4), collectives=ranks))
    assert [each.extra["own"].value["n"] for each in loaded] == [0, 1, 2, 3]
    assert [each.extra["first"].value["text"] for each in loaded] == ["rank 0"] * 4
    assert [each.extra["shared"].value.item() for each in loaded] == [0, 0, 1, 1]
    alone = trainfold.TrainState(trainer=make_progress(step=1), extra={"own": PerRank({})})
    with pytest.raises(ResumeRefused, match="own: saved 4 ranks, wanted 1 rank"):
        trainfold.load(tmp_path, like=alone)
    trainfold.save(alone, tmp_path / "alone")
    with pytest.raises(ResumeRefused, match="saved 1 rank, wanted 2 ranks"):
        run_threads(2, lambda ranks: trainfold.load(tmp_path / "alone", like=alone, collectives=ranks))

    def odd(ranks):
        wrong = PerRank(torch.tensor([ranks.rank]), share=0, shares=1)
        trainfold.save(TrainState(trainer=make_progress(), extra={"w": wrong}), tmp_path / "odd", collectives=ranks)

    with pytest.raises(RanksDisagree, match="others on rank 1"):
        run_threads(2, odd)


def test_a_checkpoint_from_before_the_declaration_is_taken():
    """What was equal on all ranks is given to each."""
    store = MemoryStore()

    def play(ranks):
        for sharing in ({}, {"meter": "each_rank"}):
            live = attach(nn.Flatten(), extra={"meter": (lambda: [1.5], lambda _: None)}, sharing=sharing)
            with CheckpointManager(store, collectives=ranks) as manager:
                manager.restore(live)
                live.advance(samples=1)
                manager.save(live)
        return type(live.capture().extra["meter"]), type(live.capture().extra["meter"].value)

    assert run_threads(2, play) == [(PerRank, Opaque)] * 2


VALUES = {"replicated": [9.0] * 4, "rank_0": [0.5, 1.5, 2.5, 3.5], "each_share": [0.5, 0.5, 1.5, 1.5], "each_rank": [0.5, 1.5, 2.5, 3.5]}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("each_rank", "rank_0", [0.5] * 4),
        ("each_rank", "rank_0", [0.5] * 2),  # of two ranks
        ("each_share", "rank_0", [0.5] * 4),
        ("each_share", "each_rank", VALUES["each_share"]),
        ("rank_0", "each_rank", [0.5] * 4),
        ("replicated", "rank_0", [9.0] * 4),
    ],
)
def test_another_declaration_at_a_resume_gives_each_rank_what_it_says(before, now, expected, caplog):
    """B05, B06: each rank had its own value once more where it is rank 0's now; it is logged that the others are dropped."""
    store = MemoryStore()

    def save(ranks):
        live, extra = made(ranks, {"meter": before})
        extra["meter"].load_state_dict({"values": [VALUES[before][ranks.rank]]})
        live.advance(samples=1)
        with CheckpointManager(store, collectives=ranks) as manager:
            manager.save(live)

    def take(ranks):
        live, extra = made(ranks, {"meter": now})
        with CheckpointManager(store, collectives=ranks) as manager:
            manager.restore(live)
            found = held(extra["meter"])[0]
            live.advance(samples=1)
            manager.save(live)
        return found

    run_threads(4, save)
    caplog.clear()
    assert run_threads(len(expected), take) == expected
    assert ("values that the other ranks had are dropped" in caplog.text) == (expected[0] != 9.0 and now == "rank_0")


def test_what_is_registered_later_is_shared_as_declared_and_gets_what_belongs_to_it():
    """B05: a meter of each rank, and buffers that are rank 0's, registered before or after the restore."""
    store = MemoryStore()

    def play(ranks, steps, *, is_late):
        live = attach(nn.Flatten(), parallelism=shares_of_two(ranks))
        meter, average = Meter([]), nn.BatchNorm1d(2)
        with CheckpointManager(store, collectives=ranks) as manager:
            for now in (is_late, not is_late):
                if now:
                    manager.restore(live)
                else:
                    live.register("meter", meter, sharing={"meter": "each_rank"})
                    live.register("average", average, sharing={"average.buffers": "each_rank"})
            found = held(meter), average.running_mean.tolist()
            for _ in range(steps):
                meter.load_state_dict({"values": [float(ranks.rank)]})
                average.running_mean.fill_(ranks.rank + 0.5)
                live.advance(samples=1)
                manager.save(live)
        return found

    run_threads(2, lambda ranks: play(ranks, 1, is_late=False))
    for is_late in (False, True):
        loaded = run_threads(2, lambda ranks, is_late=is_late: play(ranks, 0, is_late=is_late))
        assert loaded == [([float(rank)], [rank + 0.5] * 2) for rank in range(2)]


def test_a_declaration_at_a_registration_is_of_the_object_that_is_registered():
    live = attach(nn.Linear(1, 1), extra={"late_buffers": Meter([])})
    with pytest.raises(InvalidArgument, match=r"model\.buffers"):
        live.register("meter", Meter([]), sharing={"model.buffers": "rank_0"})
    with pytest.raises(InvalidArgument, match="optimizer"):
        live.register("second", torch.optim.SGD([torch.ones(1)]), sharing={"second": "each_rank"})
    with pytest.raises(InvalidArgument, match="late_buffers"):
        live.register("late", nn.BatchNorm1d(1), sharing={"late.buffers": "each_rank"})
    assert live.names == ("late_buffers",)


# --- buffers ------------------------------------------------------------------------------------------------------------


MAX_OR_SUM = {torch.float32: torch.distributed.ReduceOp.SUM, torch.int64: torch.distributed.ReduceOp.MAX}


def statistics_under_fsdp2(collectives, folder):
    """BatchNorm under FSDP2: each rank has statistics of its own data, which nothing sends."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(name, sharing, steps, leave_at=None, *, synchronised=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (collectives.world_size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        live = attach(model, optimizer, sharing=sharing)
        with CheckpointManager(f"{folder}/{name}", every=2, collectives=collectives) as manager:
            restored = manager.restore(live)
            start = model[1].running_mean.tolist()
            while live.progress.step < steps:
                seed = 10 * live.progress.step + collectives.rank
                model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for each in (
                    model[1].buffers() if synchronised else ()
                ):  # as SyncBatchNorm does, which torch has for accelerators only
                    torch.distributed.all_reduce(
                        each.div_(collectives.world_size) if each.is_floating_point() else each, MAX_OR_SUM[each.dtype]
                    )
                live.advance(samples=8)
                manager.step(live)
                if live.progress.step == leave_at:
                    return start, model[1].running_mean.tolist()
        weights = [each.full_tensor().tolist() for each in model.parameters()]
        return start, model[1].running_mean.tolist(), weights, restored.step

    found = {"undeclared": refusal(lambda: run("undeclared", {}, 2))}
    for how in ("rank_0", "each_rank"):
        sharing = {"model.buffers": how}
        _, ended = run(how, sharing, 4, leave_at=2)
        start, *after = run(how, sharing, 4)
        _, *wanted = run(f"{how}-whole", sharing, 4)
        found[how] = ended, start, after[:2], wanted[:2], after[2]
    _, ended = run("synchronised", {}, 4, leave_at=2, synchronised=True)
    start, *after = run("synchronised", {}, 4, synchronised=True)
    found["synchronised"] = ended, start, after, run("synchronised-whole", {}, 4, synchronised=True)[1:]
    found["each_rank"] += (refusal(lambda: run("each_rank", {}, 4)),)
    return found


@pytest.mark.slow(2)
def test_batch_statistics_under_fsdp2_are_saved_as_declared(processes, tmp_path):
    """B05: refused without a declaration; rank 0's for all, or each rank's own, which resumes exactly, as synchronised ones do without one."""
    ranks = processes.run(2, statistics_under_fsdp2, str(tmp_path), collectives=PATIENT)
    of_rank_zero = ranks[0]["rank_0"][0]
    for each in ranks:
        assert "sharing={'model.buffers': 'each_rank'}" in each["undeclared"]
        ended, start, (_, weights), (_, wanted), step = each["rank_0"]
        assert start == of_rank_zero
        assert weights == wanted, "a forward in training mode reads no statistics"
        ended, start, after, wanted, step, _ = each["each_rank"]
        assert (start, after, step) == (ended, wanted, 2)
        ended, start, after, wanted = each["synchronised"]
        assert (start, after[:2], after[2]) == (ended, [*wanted[:2]], 2)
    assert ranks[0]["each_rank"][0] != ranks[1]["each_rank"][0]
    assert ranks[0]["synchronised"][0] == ranks[1]["synchronised"][0]
