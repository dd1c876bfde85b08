"""A run that begins with the weights of a source: at step 0, with nothing else of it; from then on its own checkpoints count."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.live.live_cases import Averaged
from torch import nn

from trainfold.adapters.cli.diff import diff_checkpoints
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.construct import materialize, on_meta
from trainfold.core.errors import (
    HalfRestored,
    InvalidArgument,
    InvalidState,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    SourceFailed,
)
from trainfold.core.state.notes import LINEAGE
from trainfold.core.state.state import Progress
from trainfold.core.weights.several.lineage import lineage_source
from trainfold.weights import ByScript, CheckpointWeights, Frozen, HubDirectory, LoadSpec, SeveralSources, take_weights


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Run:
    """A script of its own seed."""

    def __init__(self, seed, **attached):
        self.model = network(seed)
        self.model[0].requires_grad_(not isinstance(attached.get("weights"), Frozen))
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.average = Averaged()
        self.live = attach(self.model, self.optimizer, extra={"average": self.average}, **attached)

    def train(self, manager, steps):
        while self.live.progress.step < steps:
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(self.live.progress.step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance(samples=5)
            manager.step(self.live)
        return bits(self.model)


def bits(model):
    return {name: each.tolist() for name, each in model.state_dict().items()}


def another_run(seed=7, steps=3):
    """A run whose checkpoint has counters, streams, slots and an average too."""
    store, run = MemoryStore(), Run(seed)
    run.average.seen = 41
    with CheckpointManager(store, every=1) as manager:
        manager.restore(run.live)
        run.train(manager, steps)
    return store, run


def test_a_run_begins_with_weights_alone_and_then_with_its_own_checkpoints(caplog):
    """V07: step 0, no optimizer, streams or counters. V02: relaunched with the same arguments, its own newest wins, and what was ignored is said with the reason. L03: a resume reads one checkpoint; the other sources are not asked."""
    base, other = another_run()
    store, run = MemoryStore(), Run(1)
    source = CheckpointWeights(base)
    streams = torch.random.get_rng_state()
    with CheckpointManager(store, every=1) as manager:
        begun = manager.restore(run.live, initial=source)
        assert bits(run.model) == bits(other.model)
        assert (run.live.progress, run.optimizer.state_dict()["state"], run.average.seen) == (Progress(), {}, 0)
        assert torch.equal(torch.random.get_rng_state(), streams)
        assert (begun.is_fresh, begun.step, begun.ignored) == (True, 0, ())
        assert set(begun.weights.sources) == {*run.model.state_dict()}
        assert "begins with" in str(begun)
        trained = run.train(manager, 2)
    again = Run(2)
    with CheckpointManager(store, every=1) as manager, caplog.at_level(logging.INFO):
        resumed = manager.restore(again.live, initial=HubDirectory("removed/since"))
        assert (resumed.is_fresh, resumed.step, bits(again.model)) == (False, 2, trained)
        assert resumed.ignored == ("HubDirectory('removed/since'): the run has checkpoints of its own",)
        assert "ignored  HubDirectory" in str(resumed)
    assert "initial weights ignored: HubDirectory('removed/since'): the run has checkpoints of its own" in caplog.text


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 4), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_a_run_killed_anywhere_is_the_run_that_was_not(steps, killed_at, frozen, seed):
    """V07, V13, M39: with a frozen base from another source too, which is asked at each start."""
    base, _ = another_run()
    base_of_frozen, _ = another_run(8)
    more = {"weights": Frozen(CheckpointWeights(base_of_frozen))} if frozen else {}
    results = []
    for stops in ([steps], [min(killed_at, steps), steps]):
        store = MemoryStore()
        for number, stop in enumerate(stops):
            run = Run(seed + number, **more)
            with CheckpointManager(store, every=1) as manager:
                manager.restore(run.live, initial=CheckpointWeights(base))
                torch.manual_seed(3)
                result = run.train(manager, stop)
        results.append(result)
    assert results[0] == results[1]


def test_checkpoints_say_where_each_tensor_came_from_also_after_a_resume():
    """V16, L02: of a base that is taken at each start and of what was trained."""
    base, _ = another_run(8, steps=1)
    start, _ = another_run()
    store = MemoryStore()
    for seed, steps in ((1, 1), (2, 2)):
        run = Run(seed, weights=Frozen(CheckpointWeights(base)))
        with CheckpointManager(store, every=1) as manager:
            initial = SeveralSources([LoadSpec(CheckpointWeights(start), names="1.{name}"), ByScript()])
            manager.restore(run.live, initial=initial)
            run.train(manager, steps)
    for step in (1, 2):
        lineage = read_manifest(store, f"step-{step:08d}").contract[LINEAGE]
        found = {name: lineage_source(lineage, name) for name in run.model.state_dict()}
        assert found["0.weight"] == repr(CheckpointWeights(base, step=1))
        assert found["1.running_mean"] == repr(CheckpointWeights(start, step=3))
        assert found["2.weight"] == "ByScript()"
        assert None not in found.values()


def test_runs_that_began_with_the_same_weights_elsewhere_are_equal(tmp_path):
    """V16: where they came from is shown, and compared with nothing: a base may be moved."""
    base, _ = another_run()
    moved = tmp_path / "moved"
    save(take_weights(Run(1).live.capture(), CheckpointWeights(base)), moved)
    torch.manual_seed(0)
    for name, source in (("a", CheckpointWeights(base)), ("b", CheckpointWeights(moved))):
        run = Run(1)
        with CheckpointManager(tmp_path / name, every=1) as manager:
            manager.restore(run.live, initial=source)
            torch.manual_seed(3)
            run.train(manager, 1)
    answer = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert answer.error is None
    assert "weights.from" in str(answer.tables)


def test_a_component_follows_the_source_that_was_chosen_for_the_weights():
    """V16, P35: weights of one checkpoint and a component of another, or of none, do not come together. L04."""
    base, other = another_run()
    with CheckpointManager(base, every=1) as manager:
        manager.restore(other.live)
        other.average.seen = 50
        other.train(manager, 4)
    store, run = MemoryStore(), Run(1)
    pinned = CheckpointWeights(base, step=3)
    with CheckpointManager(store, every=1) as manager:
        manager.restore(run.live, initial=pinned, follow=["average"])
        assert (run.average.seen, run.live.progress.step) == (41, 0)
        run.average.seen = 60
        run.train(manager, 1)
    again = Run(2)
    with CheckpointManager(store, every=1) as manager:
        assert manager.restore(again.live, initial=pinned, follow=["average"]).ignored
        assert again.average.seen == 60


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"initial": "models/base"}, "restore.initial: expected a WeightSource"),
        ({"initial": ByScript()}, "restore.initial: .*supplies what is trained"),
        ({"initial": Frozen(CheckpointWeights(MemoryStore()))}, "attach.*Frozen"),
        ({"follow": ["average"]}, "restore.follow: .*no CheckpointWeights"),
        ({"initial": HubDirectory("x"), "follow": ["average"]}, "restore.follow: .*no CheckpointWeights"),
        ({"initial": CheckpointWeights(MemoryStore()), "follow": ["optimizer"]}, "restore.follow: .*under extra"),
        ({"initial": CheckpointWeights(MemoryStore()), "follow": ["averag"]}, "restore.follow: .*under extra"),
    ],
)
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_mistake_is_an_error_whether_or_not_the_run_has_checkpoints(more, said, has_checkpoint):
    """K09: a program that will fail at its next fresh start fails at this start."""
    store = another_run(steps=1)[0] if has_checkpoint else MemoryStore()
    run = Run(1)
    with CheckpointManager(store) as manager, pytest.raises(InvalidArgument, match=said):
        manager.restore(run.live, **more)


def test_a_run_whose_model_is_outside_takes_no_initial_weights():
    base, _ = another_run(steps=1)
    run = Run(1, weights=CheckpointWeights(base))
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(InvalidArgument, match="leave one of the two out"):
        manager.restore(run.live, initial=CheckpointWeights(base))


def test_initial_weights_take_no_place_of_a_checkpoint_that_is_asked_for_or_damaged():
    """V02: an explicit step that is missing raises; damage is not a fresh start."""
    base, _ = another_run(steps=1)
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(ResumeRefused, match="at step 7"):
        manager.restore(Run(1).live, step=7, initial=CheckpointWeights(base))
    store, _ = another_run(steps=1)
    store.delete("step-00000001/manifest.json")
    store.write("step-00000001/manifest.json", [b"damaged"], size_bytes=7)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused):
        manager.restore(Run(1).live, initial=CheckpointWeights(base))


def test_weights_that_do_not_fit_change_nothing_and_a_source_that_fails_halfway_ends_the_run():
    """V12."""

    class Fails:
        def supply(self, wanted):
            yield "0.weight", torch.ones(3, 4)
            raise OSError("the server is gone")

    base, _ = another_run(steps=1)
    run = Run(1)
    before = bits(run.model)
    with CheckpointManager(MemoryStore()) as manager:
        with pytest.raises(InvalidState, match=r"nothing for 1.weight, 1.bias"):
            manager.restore(
                run.live, initial=SeveralSources([LoadSpec(CheckpointWeights(base), names=["0.{name}", "2.{name}"])])
            )
        assert bits(run.model) == before
        run.live.capture()
        with pytest.raises(SourceFailed, match="the server is gone"):
            manager.restore(run.live, initial=Fails())
        with pytest.raises(HalfRestored):
            run.live.capture()
        with pytest.raises(HalfRestored, match=r"live\.advance"):
            run.live.advance(samples=1)  # not some hundred steps later, at the next save


def test_each_rank_of_a_run_begins_alike_and_continues_alike():
    """V02, V07: two ranks with scripts of other seeds; a rank that fails ends the start on both, and nothing is saved of a half."""
    base, other = another_run(steps=1)
    store = MemoryStore()
    runs = [Run(seed) for seed in (1, 2)]

    def start(world, run, source):
        with CheckpointManager(store, every=1, collectives=world) as manager:
            restored = manager.restore(run.live, initial=source)
            if restored.is_fresh:
                run.live.advance(samples=2)
                manager.save(run.live)
            return restored.is_fresh, restored.step, bits(run.model) == bits(other.model)

    assert (
        run_threads(2, lambda world: start(world, runs[world.rank], CheckpointWeights(base))) == [(True, 0, True)] * 2
    )
    again = [Run(seed) for seed in (3, 4)]
    found = run_threads(2, lambda world: start(world, again[world.rank], CheckpointWeights(base)))
    assert found == [(False, 1, True)] * 2

    class Fails:
        def __init__(self, rank):
            self.rank = rank

        def supply(self, wanted):
            yield from (
                (n, torch.zeros(e.shape, dtype=getattr(torch, e.dtype)))
                for n, e in wanted.items()
                if self.rank == 0 or n != "2.bias"
            )

    half = [Run(seed) for seed in (5, 6)]

    def broken(world):
        run = half[world.rank]
        with CheckpointManager(MemoryStore(), collectives=world) as manager:
            with pytest.raises((InvalidState, RankFailed), match=r"nothing for 2\.bias"):
                manager.restore(run.live, initial=Fails(world.rank))
            with pytest.raises(HalfRestored):
                run.live.capture()

    run_threads(2, broken)


def test_a_run_that_has_trained_does_not_begin_again():
    """V07: its counters, slots and streams would belong to other weights."""
    base, _ = another_run(steps=1)
    run = Run(1)
    with CheckpointManager(MemoryStore(), every=9) as manager:
        manager.restore(run.live, initial=CheckpointWeights(base))
        trained = run.train(manager, 1)
        with pytest.raises(InvalidState, match=r"at step 0, found one at step 1; .*before the loop"):
            manager.restore(run.live, initial=CheckpointWeights(base))
        assert bits(run.model) == trained


def test_a_model_that_was_built_on_meta_begins_with_initial_weights():
    """V07, L02: what is left to a script that has made nothing is named, and not saved."""
    base, other = another_run(steps=1)

    def begun(source):
        model = on_meta(lambda: network(1))
        materialize(model, device="cpu")
        live = attach(model)
        with CheckpointManager(MemoryStore()) as manager:
            manager.restore(live, initial=source)
        live.capture()
        return bits(model)

    assert begun(CheckpointWeights(base)) == bits(other.model)
    part = LoadSpec(CheckpointWeights(base), names=["0.{name}", "1.{name}"])
    with pytest.raises(InvalidState, match=r"2\.weight"):
        begun(SeveralSources([part, ByScript()]))


def test_masters_follow_initial_weights():
    """P19, V07: the first step would revert the run to the weights of the script."""
    model = nn.Linear(2, 1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for each in model.parameters():
        optimizer.state[each]["master"] = each.detach().float()
    store = MemoryStore()
    with torch.no_grad():
        other = nn.Linear(2, 1).to(torch.bfloat16)
    save(attach(other).capture(), store)
    live = attach(model, optimizer)
    with CheckpointManager(MemoryStore()) as manager:
        manager.restore(live, initial=CheckpointWeights(store))
    assert torch.equal(optimizer.state[model.weight]["master"], other.weight.float())


def test_other_doors_begin_alike():
    """V02: starting over on purpose, a manager that saves nothing, and a pure state."""
    base, other = another_run()
    store, _ = another_run(9, steps=1)
    run = Run(1)
    with CheckpointManager(store, start_over=True) as manager:
        assert manager.restore(run.live, initial=CheckpointWeights(base)).weights is not None
    assert bits(run.model) == bits(other.model)
    run = Run(1)
    with DisabledManager() as manager:
        assert manager.restore(run.live, initial=CheckpointWeights(base), follow=["average"]).is_fresh
    assert (bits(run.model), run.average.seen) == (bits(other.model), 41)
    state = take_weights(Run(1).live.capture(), CheckpointWeights(base))
    assert lineage_source(state.contract[LINEAGE], "0.weight") == repr(CheckpointWeights(base, step=3))


def test_ranks_that_find_other_checkpoints_of_a_run_are_refused():
    """V05: one rank sees a save that the other does not see yet; half a model of each would train."""
    stores = [another_run(steps=2)[0], another_run(steps=3)[0]]
    models = [network(rank) for rank in range(2)]
    before = [bits(each) for each in models]

    def start(world):
        live = attach(models[world.rank])
        with CheckpointManager(MemoryStore(), collectives=world) as manager:
            try:
                manager.restore(live, initial=CheckpointWeights(stores[world.rank]))
            except RanksDisagree as error:
                return str(error)

    told = run_threads(2, start)
    assert all("step 2" in each and "step 3" in each for each in told)
    assert [bits(each) for each in models] == before
