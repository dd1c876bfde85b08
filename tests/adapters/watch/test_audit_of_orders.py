"""What a sampler keeps is state too, unless it is recomputed for each epoch; the ways of saving it that work (W07)."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from trainfold.adapters.live.attach import attach
from trainfold.adapters.watch.overwritten import is_remade, use_of
from trainfold.core.errors import HiddenState, HiddenStateRefused

LENGTH, BATCH = 12, 4


class Data(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Order(Sampler):
    """Yields indices from ``order``, which it keeps."""

    def __init__(self):
        self.order = list(range(LENGTH))

    def __len__(self):
        return LENGTH


class InPlace(Order):
    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


class FromTheOld(Order):
    def __iter__(self):
        self.order = [self.order[each] for each in torch.randperm(LENGTH)]
        return iter(self.order)


class ForTheNext(Order):
    def __iter__(self):
        yield from self.order
        self.order = torch.randperm(LENGTH).tolist()


class BuiltOnce(Order):
    def __init__(self):
        super().__init__()
        self.is_built = False

    def __iter__(self):
        if not self.is_built:
            self.order = list(range(LENGTH))
            self.is_built = True
        random.shuffle(self.order)
        return iter(self.order)


class ByHelper(Order):
    def shuffled(self):
        return random.sample(self.order, LENGTH)

    def __iter__(self):
        self.order = self.shuffled()
        return iter(self.order)


class Rotates(Order):
    def __init__(self):
        self.order = torch.arange(LENGTH)

    def __iter__(self):
        self.order += 1
        return iter((self.order % LENGTH).tolist())


class Queues(Order):
    """The order of each class goes on from epoch to epoch."""

    def __init__(self):
        self.order = {each: list(range(each, LENGTH, 2)) for each in range(2)}

    def __iter__(self):
        for each in range(LENGTH):
            queue = self.order[each % 2]
            queue.append(queue.pop(0))
            if each % 3 == 0:
                queue.append(queue.pop(0))
            yield queue[-1]


class InPlaceOfTheEpoch(Order):
    def set_epoch(self, epoch):
        random.Random(epoch).shuffle(self.order)

    def __iter__(self):
        return iter(self.order)


class Anew(Order):
    def __iter__(self):
        self.order = list(range(LENGTH))
        random.shuffle(self.order)
        return iter(self.order)


class AnewByHelper(Order):
    def build(self):
        self.order = torch.randperm(LENGTH)
        return self.order

    def __iter__(self):
        return iter(self.build().tolist())


class AnewEitherWay(Order):
    shuffle = True

    def __iter__(self):
        if self.shuffle:
            self.order = torch.randperm(LENGTH).tolist()
        else:
            self.order = list(range(LENGTH))
        yield from self.order


class AnewOfTheEpoch(Order):
    shuffle = True

    def set_epoch(self, epoch):
        if self.shuffle:
            self.make(epoch)

    def make(self, epoch):
        self.order = []
        self.order += random.Random(epoch).sample(range(LENGTH), LENGTH)

    def __iter__(self):
        return iter(self.order)


class AnewGenerator(Order):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.rng = random.Random(self.epoch)
        return iter(self.rng.sample(self.order, LENGTH))


class Copies(Order):
    def __iter__(self):
        order = list(self.order)
        random.shuffle(order)
        return iter(order)


def made(kind, seed=0):
    random.seed(seed)
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    sampler = kind()
    loader = DataLoader(Data(), batch_size=BATCH, sampler=sampler)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def train(live, optimizer, steps, *, each=lambda live: None):
    """Train until a step, and call ``each`` at each boundary; returns the samples of each step."""
    seen = []
    model = live.modules[0]
    for batch in live.batches(steps=steps):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=len(batch))
        each(live)
        seen.append(batch[:, 0].tolist())
    return seen


STATEFUL = [InPlace, FromTheOld, ForTheNext, BuiltOnce, ByHelper, Rotates, Queues, InPlaceOfTheEpoch]


@pytest.mark.parametrize("kind", STATEFUL)
def test_an_order_that_goes_on_from_the_one_before_is_named_once_with_a_cure(kind):
    """W07: changed in place, or a new list made from the old one; named in the epoch after the change at the latest."""
    model, optimizer, loader = made(kind)
    live = attach(model, optimizer, loader=loader)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(live, optimizer, 12, each=lambda live: live.capture())
    assert [each.category for each in heard] == [HiddenState]
    assert "  loader.sampler.order: " in str(heard[0].message)
    assert "set_epoch(epoch)" in str(heard[0].message)
    assert next(iter(live.contract()["unsaved"])) == "loader.sampler.order"


def test_strict_refuses_a_save_of_an_order_in_place_at_the_end_of_an_epoch():
    """It would be the first save, and the one that a resume loads."""
    model, optimizer, loader = made(InPlace)
    live = attach(model, optimizer, loader=loader, strict=True)
    train(live, optimizer, 3)
    with pytest.raises(HiddenStateRefused, match=r"loader\.sampler\.order: an order or weights"):
        live.capture()


@pytest.mark.parametrize("kind", [Anew, AnewByHelper, AnewEitherWay, AnewOfTheEpoch, AnewGenerator, Copies])
def test_an_order_that_is_made_anew_is_no_hidden_state_and_resumes_exactly(kind):
    model, optimizer, loader = made(kind)
    live = attach(model, optimizer, loader=loader, strict=True)
    states = []
    whole = train(live, optimizer, 8, each=lambda live: states.append(live.capture()))
    for step in (2, 3, 6):
        model, optimizer, loader = made(kind)
        live = attach(model, optimizer, loader=loader, strict=True)
        live.restore(states[step - 1])
        assert train(live, optimizer, 8, each=lambda live: live.capture()) == whole[step:]


class Buckets(Sampler):
    """The usual sampler of buckets: a list of batches, shuffled in place."""

    def __init__(self, count):
        self.batches = [[2 * each, 2 * each + 1] for each in range(count)]

    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("count", [6, 5000])
def test_a_list_of_batches_is_read_whole_and_may_be_long(count):
    sampler = Buckets(count)
    loader = DataLoader(torch.zeros(2 * count, 2), batch_sampler=sampler)
    model = nn.Linear(2, 1)
    live = attach(model, loader=loader)
    live.advance(samples=0)
    live.capture()
    middle = len(sampler.batches) // 2
    sampler.batches[middle], sampler.batches[1] = sampler.batches[1], sampler.batches[middle]
    live.advance(samples=0)
    with pytest.warns(HiddenState, match=r"loader\.batch_sampler\.batches: an order or weights"):
        live.capture()


class Weighted(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.full((2,), float(index))


def test_weights_that_follow_the_losses_are_named_and_the_cure_is_exact():
    def start(extra, strict):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        sampler = WeightedRandomSampler(torch.ones(LENGTH, dtype=torch.double), LENGTH)
        loader = DataLoader(Weighted(), batch_size=BATCH, sampler=sampler)
        pair = (lambda: sampler.weights, lambda value: setattr(sampler, "weights", value))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        live = attach(model, optimizer, loader=loader, extra={"weights": pair} if extra else {}, strict=strict)
        return live, optimizer, sampler

    def whole(live, optimizer, sampler, states, epochs=3):
        seen = []
        for _ in live.epochs(epochs):
            for batch in live.batches():
                loss = live.modules[0](batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(batch[:, 0].tolist())
                live.advance()
                states.append(live.capture())
            sampler.weights = torch.rand(LENGTH, dtype=torch.double)  # stands for the training
        return seen

    with pytest.warns(HiddenState, match=r"loader\.sampler\.weights: an order or weights"):
        whole(*start(extra=False, strict=False), [])
    states = []
    want = whole(*start(extra=True, strict=True), states)
    for step in range(1, 9):
        live, optimizer, sampler = start(extra=True, strict=True)
        live.restore(states[step - 1])
        assert whole(live, optimizer, sampler, []) == want[step:]


def test_an_order_that_is_saved_is_not_named():
    model, optimizer, loader = made(InPlace)
    sampler = loader.sampler
    pair = (lambda: {"order": tuple(sampler.order)}, print)
    live = attach(model, optimizer, loader=loader, extra={"order": pair}, strict=True)
    train(live, optimizer, 9, each=lambda live: live.capture())
    model, optimizer, loader = made(InPlace)
    live = attach(model, optimizer, loader=loader, unsaved=["loader.sampler.order"], strict=True)
    train(live, optimizer, 9, each=lambda live: live.capture())


class Own(Order):
    def __init__(self, name):
        self.name = name
        setattr(self, name, torch.Generator().manual_seed(3))

    def __iter__(self):
        return iter(torch.randperm(LENGTH, generator=getattr(self, self.name)).tolist())


def test_a_sampler_s_own_generator_is_saved_under_the_name_that_the_cure_says():
    model, optimizer, loader = made(lambda: Own("mine"))
    live = attach(model, optimizer, loader=loader)
    with pytest.warns(HiddenState, match=r"a random generator of a sampler: call it self\.generator"):
        train(live, optimizer, 3, each=lambda live: live.capture())
    states = []
    model, optimizer, loader = made(lambda: Own("generator"))
    live = attach(model, optimizer, loader=loader, strict=True)
    whole = train(live, optimizer, 8, each=lambda live: states.append(live.capture()))
    for step in (2, 3, 6):
        model, optimizer, loader = made(lambda: Own("generator"))
        live = attach(model, optimizer, loader=loader, strict=True)
        live.restore(states[step - 1])
        assert train(live, optimizer, 8) == whole[step:]


class Counts(Dataset):
    """It has a ``state_dict``, which a plain DataLoader never calls."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.reads += 1
        return torch.ones(2)

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


def test_a_dataset_with_a_state_under_a_plain_loader_is_named_with_the_cure_that_is_used():
    def start(extra, **options):
        data = Counts()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=BATCH)
        return (
            attach(model, optimizer, loader=loader, extra={"data": data} if extra else {}, **options),
            optimizer,
            data,
        )

    live, optimizer, _ = start(extra=False)
    with pytest.warns(HiddenState, match=r"(?s)loader\.dataset\.reads: a number\n.*extra=\{'data': dataset\}") as heard:
        train(live, optimizer, 2, each=lambda live: live.capture())
    assert "the state_dict() of its object" not in str(heard[0].message)
    live, optimizer, _ = start(extra=True, strict=True)
    train(live, optimizer, 3)
    state = live.capture()
    live, _, data = start(extra=True, strict=True)
    live.restore(state)
    assert data.reads == LENGTH


# --- what the bytecode shows --------------------------------------------------------------------------------------------


class Code:
    def __iter__(self):
        try:
            self.tried = 1
        finally:
            self.last = 2
        for _ in range(3):
            self.looped = 1
        other = Code()
        other.foreign = 1
        self.counted = [self.counted for _ in range(2)]
        while True:
            self.endless = 1
            if self.endless:
                return self.recursive()

    def recursive(self):
        self.called = 1
        return self.recursive() if self.tried else self.property

    @property
    def property(self):
        return self.read


@pytest.mark.parametrize(
    ("name", "is_new"),
    [("tried", True), ("last", True), ("looped", False), ("foreign", False), ("counted", False), ("endless", True),
     ("called", True), ("read", False), ("absent", False)],
)  # fmt: skip
def test_what_each_call_writes_before_it_reads_is_told_from_the_code(name, is_new):
    assert is_remade(Code, name) == is_new


def test_what_may_be_read_before_it_is_written_is_told_from_what_each_call_makes():
    class Net:
        def forward(self):
            self.n += 1
            self.mean = self.n if self.mean is None else self.mean + self.n
            if self.table is None:
                self.table = [self.n]
            self.seen = self.read

    names = ("n", "mean", "table", "seen", "read")
    assert [use_of(Net, "forward", name).reads_old for name in names] == [True, True, True, False, True]
    assert [use_of(Net, "forward", name).always_writes for name in names] == [True, True, False, True, False]
    assert not is_remade(dict, "order")  # no code to read
