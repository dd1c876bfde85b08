"""Edge cases of evaluations: accumulators that depend on the data, threads, generators, installed packages, released memory."""

import contextlib
import contextvars
import functools
import gc
import itertools
import os
import sys
import threading
import types
import weakref
from collections import UserDict, deque
from pathlib import Path

import pytest
import torch
from kit.adapters.evaluate_cases import (
    GLOBAL_MODEL,
    SUM,
    Chain,
    Counting,
    Fielded,
    batches_of,
    numbers,
    summed,
)

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.errors import InvalidArgument


class BySource:
    """Hits of each source, by its name: the structure of its accumulators depends on the data."""

    def __init__(self, *, additive):
        self.additive = additive

    def zero(self):
        return {}

    def observe(self, acc, name, hits):
        return {**acc, name: acc.get(name, 0) + hits.sum()}

    def merge(self, one, other):
        none = torch.zeros((), dtype=torch.int64)
        return {key: one.get(key, none) + other.get(key, none) for key in sorted({**one, **other})}

    def result(self, acc):
        return {key: int(hits) for key, hits in sorted(acc.items())} or None


@pytest.mark.parametrize("additive", [False, True])
def test_accumulators_whose_structure_depends_on_the_data_keep_their_own(additive):
    """Q03: the hits of one source are never counted for another; a rank without data does not disagree."""
    hits = [
        ("wiki", torch.tensor([3])),
        ("code", torch.tensor([5])),
        ("web", torch.tensor([7])),
        ("wiki", torch.tensor([1])),
    ]
    suite = {"hits": BySource(additive=additive), "mean": M.Mean()}

    def work(ranks):
        mine = hits[ranks.rank :: ranks.world_size]
        return trainfold.evaluate(lambda batch: {"hits": batch, "mean": batch[1]}, mine, suite, collectives=ranks)

    for world in (1, 2, 3, 5):
        assert run_threads(world, work) == [{"hits": {"code": 5, "web": 7, "wiki": 4}, "mean": 4.0}] * world


@pytest.mark.parametrize("kind", [dict, set, deque])
def test_what_another_thread_changes_meanwhile_is_no_failure(kind):
    """A loader's thread that fills its queue."""

    class Loader(list):
        def __init__(self):
            super().__init__([numbers(3)])
            self.queue = kind()
            self.stop = False
            self.thread = threading.Thread(target=self.fill)
            self.thread.start()

        def fill(self):
            for index in itertools.count():
                if self.stop:
                    return
                {dict: dict.setdefault, set: set.add, deque: deque.append}[kind](self.queue, (index,))
                if len(self.queue) > 3000:
                    self.queue.clear()

    loader = Loader()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            assert trainfold.evaluate(summed, loader, SUM) == {"sum": 3.0}
    finally:
        sys.setswitchinterval(before)
        loader.stop = True
        loader.thread.join()


def without_gradients():
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(3):
            yield numbers(3)


class WithoutGradients:
    def __iter__(self):
        return without_gradients()


@pytest.mark.parametrize("made", [without_gradients, WithoutGradients])
@pytest.mark.parametrize("wrapped", [lambda batches: batches, functools.partial(map, torch.clone)])
@pytest.mark.parametrize("cut", ["steps", "time", "error"])
def test_a_generator_that_is_left_changes_nothing_afterwards(made, wrapped, cut):
    """Q06: the values it would restore at its close, after the evaluation, are restored within the evaluation."""
    batches = wrapped(made())
    if cut == "steps":
        trainfold.evaluate(summed, batches, SUM, steps=1)
    elif cut == "time":
        ticks = itertools.count()
        trainfold.evaluate(summed, trainfold.evaluation.time_limit(batches, secs=2, clock=lambda: next(ticks)), SUM)
    else:
        with pytest.raises(ZeroDivisionError):
            trainfold.evaluate(lambda _: 1 / 0, batches, SUM)
    assert torch.is_grad_enabled()
    torch.manual_seed(77)
    state = torch.get_rng_state()
    del batches
    gc.collect()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2])
def test_a_result_that_no_rank_can_have_is_nobodys_failure(world):
    """Q03: every rank raises the same error, and the collectives remain usable."""

    def work(ranks):
        classes = torch.tensor([0, 5])
        with pytest.raises(InvalidArgument, match="Confusion"):
            trainfold.evaluate(lambda _: {"c": (classes, classes)}, [0], {"c": M.Confusion(2)}, collectives=ranks)
        return trainfold.evaluate(summed, [numbers(3)], SUM, collectives=ranks)

    assert run_threads(world, work) == [{"sum": 3.0 * world}] * world


def test_a_forward_that_takes_a_batch_apart_has_it_whole_when_it_is_repeated():
    """Q05: many programs contain `labels = batch.pop("labels")`."""

    def taking(batch):
        return {"sum": batch["x"] * batch.pop("y") + batch["more"].pop()}

    def work(ranks, kind):
        batches = [kind({"x": numbers(2), "y": numbers(2), "more": [numbers(2)]}) for _ in range(2 - ranks.rank)]
        return trainfold.evaluate(taking, batches, SUM, collectives=ranks, steps=3)

    assert run_threads(2, functools.partial(work, kind=dict)) == [{"sum": 6.0}] * 2
    batches = [UserDict({"x": numbers(2), "y": numbers(2), "more": [numbers(2)] * 3})]
    assert trainfold.evaluate(taking, batches, SUM, steps=3) == {"sum": 2.0}


INSTALLED = """
import torch
model = torch.nn.Dropout().train()
seen = []
def helper(batch):
    seen.append(model.training)
    return {"sum": model(batch)}
def forward(batch):
    return helper(batch)
"""


@pytest.mark.parametrize("folder", ["site-packages/mine", "dist-packages/mine", "trainfold_of_mine"])
@pytest.mark.parametrize("wrapped", [lambda f: f, functools.partial, torch.no_grad(), functools.lru_cache])
def test_a_function_of_an_installed_package_is_the_users_own_where_it_is_what_is_evaluated(tmp_path, folder, wrapped):
    """Q06: users also evaluate projects that they installed as packages."""
    module = types.ModuleType("mine.code")
    exec(compile(INSTALLED, tmp_path / folder / "code.py", "exec"), vars(module))
    trainfold.evaluate(wrapped(module.forward), [numbers(2)], SUM)
    assert module.seen == [False]
    assert module.model.training


def test_folders_beside_a_librarys_are_none_of_its():
    """If the name of one is a prefix of the other's."""
    beside = Path(trainfold.__file__).parent.with_name("trainfold_experiments") / "train.py"
    for path in (beside, Path(os.__file__).parent.with_name("python3.99-mine") / "train.py"):
        module = types.ModuleType("train")
        exec(compile(INSTALLED, path, "exec"), vars(module))
        trainfold.evaluate(lambda batch, module=module: module.forward(batch), [numbers(2)], SUM)
        assert module.seen == [False]


@pytest.mark.parametrize("kind", ["cached", "cached property", "partial method", "context", "method of a dict"])
def test_modules_behind_what_functools_and_builtins_make_are_found(kind):
    """Q06."""
    model = Counting()

    class Holder:
        def __init__(self):
            variable.set(model)

        @functools.cached_property
        def cached(self):
            return GLOBAL_MODEL

        def run(self, which, batch):
            return {"loss": (which(batch), 1)}

        partly = functools.partialmethod(run, model)

    variable = contextvars.ContextVar("variable")
    holder, get = Holder(), {"model": model}.get
    forward = {
        "cached": functools.lru_cache(lambda batch: {"loss": (model(batch.batch), 1)}),
        "cached property": lambda batch: {"loss": (holder.cached(batch), 1)},
        "partial method": holder.partly,
        "context": lambda batch: {"loss": (variable.get()(batch), 1)},
        "method of a dict": lambda batch: {"loss": (get("model")(batch), 1)},
    }[kind]
    GLOBAL_MODEL.seen.clear()
    batch = batches_of(torch.ones(2), [])[0]
    trainfold.evaluate(forward, [Hashed(batch) if kind == "cached" else batch], {"loss": M.Ratio()})
    assert (GLOBAL_MODEL.seen if kind == "cached property" else model.seen) == [(False, False, False)]


class Hashed:
    def __init__(self, batch):
        self.batch = batch


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("where", ["forward", "loader", "metric"])
def test_an_error_keeps_nothing_alive_and_what_it_came_from(where, steps):
    """After an out-of-memory error, the memory must be free again."""
    gone = []

    def raising():
        activation = torch.ones(10)
        gone.append(weakref.ref(activation))
        try:
            {}["missing key"]
        except KeyError:
            raise MemoryError("CUDA out of memory")  # noqa: B904 this is what is tested

    class Raising(Fielded):
        def observe(self, acc, values):
            raising()

    def loader():
        yield numbers(2)
        if where == "loader":
            raising()

    def forward(batch):
        if where == "forward":
            raising()
        return {"sum": batch}

    def failing():
        with pytest.raises(MemoryError) as caught:
            trainfold.evaluate(forward, loader(), {"sum": Raising() if where == "metric" else M.Sum()}, steps=steps)
        return caught.value

    gc.disable()
    try:
        try:
            {}["handled meanwhile"]
        except LookupError:
            error = failing()
        assert error.__context__.args == ("missing key",)
        assert not error.__suppress_context__
        del error
        with contextlib.suppress(MemoryError):
            trainfold.evaluate(forward, loader(), {"sum": Raising() if where == "metric" else M.Sum()}, steps=steps)
        assert gone[1]() is None
    finally:
        gc.enable()


def test_batches_are_let_go_of_as_soon_as_they_were_evaluated():
    alive, seen = [], []

    def loader():
        for _ in range(3):
            batch = numbers(2)
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    def forward(batch):
        alive.append([ref() is not None for ref in seen])
        return {"sum": batch}

    trainfold.evaluate(forward, loader(), SUM)
    assert alive == [[True], [False, True], [False, False, True]]


def test_too_much_data_to_look_at_is_told_once_and_does_not_hide_a_sampler():
    """Q06: a generator that a sampler holds is found before the samples."""
    generator = torch.Generator().manual_seed(3)
    samples = [{f"k{key}": [index] for key in range(22)} for index in range(4900)]

    class Sampler:
        def __init__(self):
            self.samples = samples
            self.inner = Chain(Chain(Chain(generator)))

        def __len__(self):
            return 4

        def __iter__(self):
            return iter(torch.randperm(4, generator=generator).tolist())

    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=Sampler(), collate_fn=lambda _: numbers(2))
    before = generator.get_state()
    with pytest.warns(UserWarning, match="20,000 objects behind a DataLoader.*keep samples in arrays") as caught:
        trainfold.evaluate(summed, loader, SUM)
    assert len(caught) == 1
    assert torch.equal(generator.get_state(), before)


def test_a_position_that_a_loader_gives_by_reference_is_put_back():
    class Referring(list):
        def __init__(self):
            super().__init__([numbers(3)])
            self.state = {"position": 2}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

        def __iter__(self):
            self.state["position"] = 9
            return super().__iter__()

    loader = Referring()
    trainfold.evaluate(summed, loader, SUM)
    assert loader.state == {"position": 2}
