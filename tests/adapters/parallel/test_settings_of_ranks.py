"""R07: settings of one rank alone, such as a dropout, are refused at the first save; what ranks have of their own is spared."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.live.live_cases import Limit
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.errors import InvalidArgument, OptionalLeftOut, RanksDisagree
from trainfold.ranks import Replicas, run_threads
from trainfold.stores import MemoryStore


class Scaled(nn.Module):
    def __init__(self, scale, **own):
        super().__init__()
        self.scale = scale
        self.__dict__.update(own)


def save(ranks, make, store=None, *, optional=(), parallelism=Replicas):
    """What a rank raises at its first save; None if nothing."""
    model, extra, sharing = make(ranks.rank)
    live = attach(model, extra=extra, sharing=sharing, optional=optional, parallelism=parallelism(ranks))
    with CheckpointManager(store or MemoryStore(), collectives=ranks) as manager:
        live.advance(samples=1)
        try:
            manager.save(live)
        except RanksDisagree as error:
            return str(error)


def told(make, size=2, **options):
    store = MemoryStore()
    return run_threads(size, lambda ranks: save(ranks, make, store, **options))


def dropouts(odd, values):
    def make(rank):
        return nn.Sequential(*(nn.Dropout(value if rank == odd else 0.1) for value in values)), {}, None

    return make


@given(values=st.lists(st.sampled_from([0.1, 0.2]), min_size=1, max_size=3), odd=st.integers(0, 2))
@settings(max_examples=6)
def test_a_dropout_of_one_rank_is_refused_with_the_rank_and_the_key(values, odd):
    """Equal gradients keep the weights of such ranks equal, so that nothing else shows it."""
    differs = any(value != 0.1 for value in values)
    for text in told(dropouts(odd, values), size=3):
        assert (text is not None) == differs
        assert text is None or ("contract['attached.model.*.p']" in text and f"on rank {odd or 1}: " in text)


@pytest.mark.parametrize("place", ["model", "loss", "limit"])
def test_every_object_is_compared(place):
    def make(rank):
        odd = 0.5 if rank == 1 else 0.25
        extra = {
            "loss": Scaled(odd) if place == "loss" else nn.CrossEntropyLoss(),
            "limit": Limit(most=odd if place == "limit" else 1),
        }
        return nn.Sequential(Scaled(odd) if place == "model" else nn.ReLU()), extra, None

    for text in told(make):
        assert f"contract['attached.{place}." in text
        assert "0.25; found on rank 1: 0.5" in text.replace(", found", "; found")
        assert f"sharing={{'{place}.settings': 'each_rank'}}" in text


def test_what_is_of_one_rank_is_spared():
    """By its name, as the text of an object, or by a declaration."""

    def make(rank):
        model = nn.Sequential(Scaled(1.0, tp_rank=rank, device=rank), Scaled(1.0, local_rank=rank))
        extra = {
            "log": Limit(path=f"log-{rank}", rank=rank),
            "meter": Limit(start=rank),
            "first": Limit(start=rank),
            "loss": Scaled(float(rank)),
        }
        return model, extra, {"meter": "each_rank", "first": "rank_0", "loss.settings": "each_rank"}

    assert told(make) == [None, None]


class Broken(Limit):
    def state_dict(self):
        raise RuntimeError("no state")


def test_an_optional_component_that_one_rank_lacks_is_not_compared_with_it():
    def make(rank):
        return nn.ReLU(), {"ema": Limit(decay=0.5) if rank else Broken(decay=0.25)}, None

    with pytest.warns(OptionalLeftOut, match="ema is left out"):
        assert told(make, size=3, optional=["ema"]) == [None] * 3


def test_settings_are_declared_for_what_is_attached():
    with pytest.raises(InvalidArgument, match=r"sharing\['other.settings'\]"):
        attach(nn.ReLU(), sharing={"other.settings": "each_rank"})
    with pytest.raises(InvalidArgument, match="rank_0"):
        attach(nn.ReLU(), sharing={"model.settings": "rank_0"})
