"""Torch's wrappers leave no trace in a state; unsupported ones are refused by name."""

import copy
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.core.step_cases import adamw, assert_same_bits, make_batch, make_net, net_loss
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainfold.backends.ranks.in_process import run_threads
from trainfold.core import tree
from trainfold.core.errors import (
    InvalidArgument,
    InvalidBatch,
    InvalidState,
    NonFinite,
    SharedStorage,
    SpecMismatch,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.rng import fold_in, forked_rng, make_key
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.state import OptimizerState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step


def make_mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
        model.add_module("head", torch.nn.Linear(3, 1))
        return model


def mlp_loss(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


class Wrapper(ActivationWrapper):
    """A user's own kind of one of torch's wrappers."""

    def forward(self, x):
        return self._checkpoint_wrapped_module(x)


def test_wrappers_do_not_show_in_a_state():
    """B11: the same names with and without a wrapper, at any depth."""
    plain, wrapped = make_net(), make_net()
    wrapped.head = Wrapper(wrapped.head)
    wrapped = Wrapper(wrapped)
    assert_same_bits(init_state(plain, adamw()), init_state(wrapped, adamw()))
    state, _ = make_step(wrapped, net_loss, adamw())(init_state(plain, adamw()), make_batch(0))
    assert "embed.weight" in state.model.params


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    model.head = checkpoint_wrapper(model.head)
    return checkpoint_wrapper(model)


@pytest.mark.parametrize("wrap", [compiled, checkpointed])
def test_the_wrappers_of_torch_leave_no_trace_in_a_state_nor_in_its_steps(wrap):
    """B11: the same names; and the same bits of a step, if the wrapper does not change the arithmetic."""
    plain, wrapped = make_mlp(), wrap(make_mlp())
    assert any(name.startswith(("_orig_mod.", "_checkpoint_wrapped")) for name, _ in wrapped.named_modules())
    state = init_state(plain, adamw())
    assert_same_bits(state, init_state(wrapped, adamw()))
    batch = torch.ones(3, 2)
    assert_same_bits(
        make_step(plain, mlp_loss, adamw())(state, batch)[0], make_step(wrapped, mlp_loss, adamw())(state, batch)[0]
    )


@pytest.mark.usefixtures("process_group")
def test_a_model_that_communicates_is_named_and_refused_while_its_weights_are_welcome():
    """B11: a step with DDP would average over the ranks a second time; its names are still canonical."""
    plain, wrapped = make_mlp(), DistributedDataParallel(make_mlp())
    state = init_state(wrapped, adamw())
    assert_same_bits(init_state(plain, adamw()), state)
    with pytest.raises(InvalidArgument, match=r"^model: .*DistributedDataParallel; pass the module inside"):
        make_step(wrapped, mlp_loss, adamw())
    inside = torch.nn.Sequential(plain, DistributedDataParallel(make_mlp()))
    with pytest.raises(InvalidArgument, match=r"^model\.1: "):
        make_step(inside, mlp_loss, adamw())
    make_step(wrapped.module, mlp_loss, adamw())(state, torch.ones(3, 2))


@pytest.mark.usefixtures("process_group")
def test_a_model_that_fsdp_sharded_is_refused():
    sharded = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InvalidArgument, match=r"FSDPLinear; pass the module inside"):
        make_step(sharded, mlp_loss, adamw())


@given(st.lists(st.sampled_from(["module", "_orig_mod", "h", "0", "_checkpoint_wrapped_module"]), min_size=1))
def test_a_canonical_name_is_canonical(parts):
    name = canonical_name(".".join(parts))
    assert canonical_name(name) == name


def test_tied_parameters_are_one_leaf_and_stay_tied():
    """B19: a tie is stored once, trained as one leaf, and checked when a state is bound to a model."""
    model = make_net()
    state = init_state(model, adamw())
    assert state.model.ties == (("head.weight", "embed.weight"),)
    assert "head.weight" not in state.model.params
    untied = make_net()
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(SpecMismatch, match=r"head\.weight"):
        make_step(untied, net_loss, adamw())(state, make_batch(0))


def test_parameters_that_share_storage_without_being_tied_are_reported():
    """B19: shared storage that a state cannot represent is found at the start."""
    model = make_net()
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach())
    with pytest.raises(SharedStorage, match=r"embed\.weight"):
        init_state(model, adamw())


def test_non_persistent_buffers_are_no_state():
    """B17: they are not in the state, and each step starts with unchanged ones (the model asserts it)."""
    assert list(init_state(make_net(), adamw()).model.buffers) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_a_buffer_that_the_forward_assigns_anew_is_carried_on():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.w

    def loss_fn(model, x):
        return Loss(sum=model(x).sum(), weight=len(x))

    sgd = optimizer(torch.optim.SGD, lr=0.5)
    for donate in (False, True):
        step = make_step(Counter(), loss_fn, sgd, donate=donate)
        state = init_state(Counter(), sgd)
        for index in range(3):
            before = state if not donate else None
            state, _ = step(state, torch.ones(2))
            assert state.model.buffers["count"] == index + 1
            assert before is None or before.model.buffers["count"] == index


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m, o: make_step(m, net_loss, o, accumulate=0), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, o, clip_norm=0.0), InvalidArgument),
        (lambda m, o: make_step(net_loss, net_loss, o), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, (o.init, o.update), donate=True), InvalidArgument),
        (lambda m, o: make_step(copy.deepcopy(m).to("meta"), net_loss, o), InvalidState),
        (lambda m, o: make_step(torch.nn.LazyLinear(2), net_loss, o), InvalidState),
        (lambda m, o: make_step(m, lambda *_: 1.0, o)(init_state(m, o), make_batch(0)), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(optimizer=None), make_batch(0)), InvalidState),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(optimizer={}), make_batch(0)), InvalidState),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(rng={}), make_batch(0)), InvalidState),
        (
            lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": torch.ones(2), "y": torch.ones(3)}),
            InvalidBatch,
        ),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": torch.ones(0)}), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": 3}), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), [torch.ones(2), torch.ones(2)]), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o, accumulate=7)(init_state(m, o), make_batch(0)), InvalidBatch),
        (lambda m, o: make_step(torch.nn.Linear(2, 2), net_loss, o)(init_state(m, o), make_batch(0)), SpecMismatch),
    ],
)
def test_what_cannot_work_has_a_named_error(call, error):
    with pytest.raises(error):
        call(make_net(), adamw())


def test_the_contract_is_plain_scalars():
    contract = make_step(make_net(), net_loss, adamw(), accumulate=2, clip_norm=1).contract
    assert contract == {"step.accumulate": 2, "step.clip_norm": 1.0}


def test_states_that_were_rebuilt_from_leaves_go_on_with_the_same_bits():
    """Like the result of a load: equal leaves in new containers; the worker binds them again."""
    model = make_net()
    step = make_step(model, net_loss, adamw(), donate=True)
    straight, resumed = init_state(model, adamw()), init_state(model, adamw())
    for index in range(3):
        straight, _ = step(straight, make_batch(index))
        resumed, _ = step(tree.map_tensors(torch.clone, resumed), make_batch(index))
    assert isinstance(resumed.optimizer, OptimizerState)
    assert isinstance(resumed.model.params, Leaves)
    assert_same_bits(straight, resumed)


def test_a_model_that_cannot_be_copied_is_refused_with_the_attribute_that_is_in_the_way():
    with pytest.warns(FutureWarning):
        normed = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"model\.0\.weight: .*parametrizations"):
        make_step(torch.nn.Sequential(normed), net_loss, adamw())
    locked = make_net()
    locked.guard = threading.Lock()
    with pytest.raises(InvalidArgument, match=r"model\.guard: .*lock"):
        make_step(locked, net_loss, adamw())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_step_computes_in_the_modes_of_a_model_in_training(donate, frozen, in_eval):
    """A loop that puts a normalisation into eval mode after ``model.train()`` is matched bit for bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model.train(not in_eval)
    if frozen:
        model[1].eval()
    sgd = optimizer(torch.optim.SGD, lr=0.1)

    def loss_fn(module, batch):
        return Loss(sum=module(batch).square().sum(), weight=len(batch))

    state = init_state(model, sgd)
    x = torch.randn(8, 3)
    after, _ = make_step(model, loss_fn, sgd, donate=donate)(state, x)
    loop = copy.deepcopy(model)
    if in_eval:
        loop.train()
    loss = loss_fn(loop, x)
    (loss.sum / loss.weight).backward()
    torch.optim.SGD(loop.parameters(), lr=0.1).step()
    for name, value in loop.state_dict().items():
        mine = after.model.params[name] if name in after.model.params else after.model.buffers[name]
        assert torch.equal(mine, value), name
    assert model[1].training is not (frozen or in_eval)


def test_a_loss_function_that_finds_its_own_loss_not_finite_is_skipped_like_any_other():
    """A09."""

    def loss_fn(model, batch):
        raise NonFinite("my loss", expected="a finite one", found="inf", fix="look at the batch")

    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(NonFinite) as caught:
        make_step(model, loss_fn, sgd)(init_state(model, sgd), torch.ones(5, 2))
    assert caught.value.skipped.trainer.samples == 5


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("frozen_masters", [False, True])
def test_a_step_that_failed_has_not_happened_wherever_it_failed(donate, frozen_masters):
    """A09: a schedule that raises once leaves no gradient, buffer change or binding behind."""
    calls = []

    def schedule(step):
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("the schedule failed")
        return 0.5

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = model.bfloat16() if frozen_masters else model
    adamw = optimizer(torch.optim.AdamW, lr=0.1, masters=frozen_masters)

    def loss_fn(module, batch):
        return Loss(sum=module(batch).square().sum(), weight=len(batch))

    step = make_step(model, loss_fn, adamw, schedule=schedule, donate=donate)
    x = torch.randn(8, 3, dtype=model[0].weight.dtype)
    state, _ = step(init_state(model, adamw), x)
    before = fingerprint(state)
    with pytest.raises(RuntimeError, match="the schedule failed"):
        step(state, x)
    assert fingerprint(state) == before
    wanted, said = make_step(model, loss_fn, adamw, schedule=schedule)(state, x)
    after, metrics = step(state, x)
    assert metrics == said
    assert fingerprint(after) == fingerprint(wanted)


def test_an_update_that_failed_leaves_no_gradient_behind():
    """A09: a user's function raises once, after the backward; a retry with the same arguments gives the same bits."""
    failures = [ValueError("the update failed")]

    def update(grads, opt_state, params):
        if failures:
            raise failures.pop()
        return {name: params[name] - 0.1 * grads[name] for name in params}, opt_state

    pair = (lambda _: {}, update)
    model = torch.nn.Linear(2, 1)
    state = init_state(model, pair)
    step = make_step(model, lambda m, b: Loss(sum=m(b).square().sum(), weight=len(b)), pair, clip_norm=0.1)
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match="the update failed"):
        step(state, x)
    first, said = step(state, x)
    second, again = step(state, x)
    assert said == again
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize("factor", [math.nan, math.inf, "0.5", None, torch.ones(2)])
def test_a_schedule_that_gives_no_finite_number_is_refused_before_anything_is_updated(factor):
    """A09: the guard against non-finite numbers checks the factor too."""
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    state = init_state(model, sgd)
    step = make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=len(b)), sgd, schedule=lambda _: factor)
    with pytest.raises(InvalidArgument, match=r"schedule\(0\)"):
        step(state, torch.ones(2, 2))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_weight_that_is_a_mask_or_has_a_graph_counts_as_its_sum(accumulate):
    """A01, A02: the normaliser is a number; no gradient flows through it, for any split of the window."""
    torch.manual_seed(0)
    model, sgd = torch.nn.Linear(2, 1), optimizer(torch.optim.SGD, lr=0.1)
    batch = {"x": torch.randn(8, 2), "mask": (torch.arange(8) % 3 > 0).float()}
    state = init_state(model, sgd)

    def by_mask(module, part):
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=part["mask"])

    def by_number(module, part):
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=int(part["mask"].sum()))

    def by_graph(module, part):
        weight = part["mask"].sum() + 0 * module(part["x"]).sum()
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=weight)

    found = [make_step(model, fn, sgd, accumulate=accumulate)(state, batch)[1] for fn in (by_mask, by_number, by_graph)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("weight", [None, "8", [8]])
def test_a_weight_that_is_no_number_is_refused(weight):
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidArgument, match="weight"):
        make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=weight), sgd)(
            init_state(model, sgd), torch.ones(2, 2)
        )


@pytest.mark.parametrize("name", ["loss", "grad_norm", "lr", "weight"])
def test_a_metric_with_a_name_that_the_step_reports_under_is_refused(name):
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    step = make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=len(b), metrics={name: (1, 1)}), sgd)
    with pytest.raises(InvalidArgument, match=name):
        step(init_state(model, sgd), torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore::trainfold.core.errors.SameBatch")
def test_ranks_draw_from_keys_of_their_own():
    """H03: a step draws from (seed, step, microbatch, rank), so two ranks with equal rows have different masks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    x = torch.ones(2, 4)

    def loss_fn(module, batch):
        drawn.append(module(batch).detach())
        return Loss(sum=module(batch).sum(), weight=len(batch))

    def on_rank(collectives):
        return make_step(model, loss_fn, sgd, collectives=collectives)(init_state(model, sgd), x)[1]

    drawn = []
    run_threads(2, on_rank)
    assert not torch.equal(drawn[0], drawn[1])
    wanted = []
    for rank in range(2):
        with forked_rng(fold_in(make_key(0), f"step 0 microbatch 0 rank {rank}")):
            wanted.append(copy.deepcopy(model).train()(x).detach())
    assert all(any(torch.equal(one, other) for other in drawn) for one in wanted)
