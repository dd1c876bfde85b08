"""What ranks exchange before they write: digests, and descriptions only where these differ."""

import pytest
import torch

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.ranks.wire import to_wire
from trainfold.backends.runs.alike.replicas import descriptions
from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RanksDisagree
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.outline import announcement_of, by_rule
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.world import World
from trainfold.core.state.state import Progress, TrainState


class Counted:
    """Collectives that count the bytes that this rank gives to others."""

    def __init__(self, world):
        self._world, self.rank, self.world_size, self.sent_bytes = world, world.rank, world.world_size, 0

    def gather(self, value, **options):
        self.sent_bytes += len(to_wire(value))
        return self._world.gather(value, **options)

    def broadcast(self, value, *, source=0, **options):
        self.sent_bytes += len(to_wire(value)) if self.rank == source else 0
        return self._world.broadcast(value, source=source, **options)

    def __getattr__(self, name):
        return getattr(self._world, name)


def exchanged(world, components):
    """The bytes that this rank sent, and the descriptions of all ranks."""
    counted = Counted(world)
    mine = {
        name: by_rule(describe(each, name)[0], World(world.rank, world.world_size)) for name, each in components.items()
    }
    return counted, mine, descriptions(mine, counted.gather(announcement_of(mine)), counted)


def cut(world, leaves):
    rule = make_placement(make_mesh((world.world_size,)), [[0]])
    rows = rule.box((8, 3), (world.rank,))[0]
    return {
        f"w{i}": Shard(torch.zeros(rows[1] - rows[0], 3), (8, 3), (rows[0], 0), placement=rule) for i in range(leaves)
    }


@pytest.mark.parametrize("make", [cut, lambda _, leaves: {f"w{i}": torch.zeros(3) for i in range(leaves)}])
def test_what_ranks_exchange_does_not_grow_with_the_leaves_where_these_are_equal_or_cut_by_a_rule(make):
    """X02: digests first."""
    sent = [
        run_threads(size, lambda world, n=leaves: exchanged(world, {"ema": make(world, n)})[0].sent_bytes)
        for leaves in (1, 300)
        for size in (2, 4)
    ]
    assert len({each for sizes in sent for each in sizes}) == 1
    assert sent[0][0] < 200


def test_what_a_whole_save_exchanges_does_not_grow_with_leaves_that_are_cut():
    """X02: each rank writes where its bytes are into its own index, and sends the digest of that.

    A step that is saved again replaces a manifest, which rank 0 alone has to know.
    """

    def saved(world, leaves):
        counted, store = Counted(world), stores[leaves]
        save(TrainState(trainer=Progress(step=1), extra={"ema": cut(world, leaves)}), store, collectives=counted)
        return counted.sent_bytes

    stores = {leaves: MemoryStore() for leaves in (10, 1000)}
    for _ in ("first", "again"):
        few, many = (run_threads(4, lambda world, n=leaves: saved(world, n)) for leaves in stores)
        assert max(many) < max(few) + 40  # sizes of files have more digits
        assert max(many) < 6000


def test_ranks_with_equal_descriptions_share_one_object():
    def look(world):
        _, mine, every = exchanged(world, {"ema": cut(world, 2)})
        return all(each is mine for each in every)

    assert run_threads(3, look) == [True] * 3


def test_a_component_that_differs_is_told_by_each_rank_that_has_another_one():
    """X02: text on difference. What each rank has of its own is not exchanged: it is in that rank's index."""

    def look(world):
        _, mine, every = exchanged(
            world, {"ema": {"n": world.rank // 2}, "rng": {"n": world.rank}, "trainer": {"n": 1}}
        )
        assert every[world.rank]["ema"] == mine["ema"]
        return [[each[name].node["dict"]["n"] for each in every] for name in ("ema", "rng", "trainer")]

    assert run_threads(4, look) == [[[0, 0, 1, 1], [rank] * 4, [1, 1, 1, 1]] for rank in range(4)]


def test_ranks_with_other_components_are_refused_on_every_rank():
    def look(world):
        with pytest.raises(RanksDisagree, match="on rank 1"):
            exchanged(world, {"ema" if world.rank == 1 else "scaler": {"n": 1}})
        return True

    assert run_threads(3, look) == [True] * 3
