"""Windows of attached loops under DDP and FSDP2: real collectives are counted, and the bits are those of loops written by hand."""

import contextlib

import pytest
import torch
from kit.adapters.collectives_cases import collectives_of
from kit.adapters.fsdp2_cases import bits, sharded
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import IncompleteWindow, InvalidArgument, NonFinite
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer as pure
from trainfold.core.step.step import make_step
from trainfold.properties.contracts import check_parallelism
from trainfold.properties.parallelism_contract import play_by_the_rules
from trainfold.ranks import Replicas, run_threads

OF = 4


def plain():
    """The same on ranks that are threads, which share one global generator."""
    model, generator = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 4)
    return model


def wrapped(kind, world_size):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(plain())
    if kind == "fsdp2":
        return sharded(world_size)
    return plain()


def batch_of(step, index, rank, rows=4):
    values = torch.randn(
        rows, 6, generator=torch.Generator().manual_seed(1000 * step + 10 * index + rank), device="cpu"
    )
    return values.to(torch.get_default_device())


def backward(model, x, of=OF):
    loss = model(x).square().mean() / of
    loss.backward()
    return loss.detach()


# --- the contract -----------------------------------------------------------------------------------------------------


def wrap_ddp(model):
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, TorchParallelism(wrapped)


def wrap_fsdp2(model, shape=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or (torch.distributed.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model, mesh=mesh)
    return model, TorchParallelism(model)


def wrap_hsdp(model):
    return wrap_fsdp2(model, (2, torch.distributed.get_world_size() // 2))


def wrap_tensor_parallel(model):
    """Two shares of the data, each read by two ranks that have half of the rows; FSDP2 cuts these again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"])
    return model, TorchParallelism(model)


WRAPS = {"ddp": wrap_ddp, "fsdp2": wrap_fsdp2, "hsdp": wrap_hsdp, "tp": wrap_tensor_parallel}


def both_norms(kind):
    """The norm of real gradients, and that of torch."""
    model, ranks = WRAPS[kind](plain()[0])
    backward(model, batch_of(0, 0, ranks.coordinates.data.rank))
    gradients = [each.grad for each in model.parameters()]
    wanted = nn.utils.get_total_norm(gradients)
    return ranks.norm(gradients).item(), (wanted.full_tensor() if kind != "ddp" else wanted).item()


def evidence_of(collectives, kinds):
    return {kind: (play_by_the_rules(WRAPS[kind]), both_norms(kind)) for kind in kinds}


@pytest.mark.slow(4)
def test_torch_parallelism_keeps_its_promises_under_ddp_and_fsdp2(processes):
    """A03: the setting comes back also after an error. Four ranks are two replicas of two parts; of three, one has no row of the weight."""
    for size, kinds in ((3, ["ddp", "fsdp2"]), (4, ["hsdp", "tp"])):
        ran = processes.run(size, evidence_of, kinds, collectives=PATIENT)
        for kind in kinds:
            check_parallelism(lambda *_, kind=kind: [each[kind][0] for each in ran], world_sizes=(size,))  # noqa: B023
            assert [mine for mine, _ in (each[kind][1] for each in ran)] == [ran[0][kind][1][1]] * size


def test_torch_parallelism_keeps_its_promises_on_one_process():
    check_parallelism(
        lambda _, play: [play(lambda model: (model, TorchParallelism(model)))],
        world_sizes=(1,),
    )


# --- what runs on two ranks, in one world for each kind ----------------------------------------------------------------


def everything(collectives, kind, folder):
    found = {"counts": count_windows(collectives, kind), "bits": both_ways(collectives, kind)}
    found |= {"stopped": stop_on_all(collectives, kind), "open": leave_open(collectives, kind)}
    if kind == "fsdp2":
        found |= {"mixed": leave_open(collectives, kind, is_mixed=True), "resumed": resumed(collectives, folder)}
        found["parts"] = in_parts(collectives)
    if kind == "ddp":
        found |= {"sums": live_and_pure(collectives), "inner": of_the_inner(collectives)}
        found["later"] = registered_later(collectives)
    return found


@pytest.fixture(scope="module")
def two_ranks(processes, tmp_path_factory):
    """What each rank found, by kind; a world is started once."""
    folder = str(tmp_path_factory.mktemp("runs"))
    return {kind: processes.run(2, everything, kind, folder, collectives=PATIENT) for kind in ("ddp", "fsdp2")}


# --- collectives ------------------------------------------------------------------------------------------------------


def count_windows(collectives, kind):
    model = wrapped(kind, collectives.world_size)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = collectives.rank

    def window(of):
        for index in range(of):
            with live.microbatch(of=of):
                backward(model, batch_of(0, index, rank), of)
        live.drop_window()

    def by_hand(of):
        for index in range(of):
            backward(model, batch_of(0, index, rank), of)
        model.zero_grad()

    def backward_inside_only():
        """The trap: DDP decides in the forward."""
        for index in range(OF):
            loss = model(batch_of(0, index, rank)).square().mean() / OF
            with live.parallelism.gradient_sync(enabled=index == OF - 1):
                loss.backward()
        model.zero_grad()

    window(1)
    inside = collectives_of(backward_inside_only)
    return [collectives_of(lambda: window(OF)), collectives_of(lambda: by_hand(1)), collectives_of(lambda: by_hand(OF)), inside]  # fmt: skip


@pytest.mark.slow(3)
def test_only_the_boundary_communicates_gradients(two_ranks):
    """A03, A04, P15, S33: with DDP 1 all-reduce for 4 microbatches, as many as for one; 4 by hand without no_sync, or if only the backward is inside."""
    for window, alone, by_hand, inside in (each["counts"] for each in two_ranks["ddp"]):
        assert window["all_reduce"] == alone["all_reduce"] == 1
        assert by_hand["all_reduce"] == OF
        assert inside["all_reduce"] == OF


def registered_later(collectives):
    """A second wrapper, registered after the first window; and what a check exchanges."""
    first, second = wrapped("ddp", 2), wrapped("ddp", 2)
    live = attach(first, torch.optim.SGD(first.parameters(), lr=0.1))
    x = batch_of(0, 0, collectives.rank)
    with live.microbatch():
        loss = backward(first, x)
    checked = collectives_of(lambda: live.check(loss, weight=4, clip_norm=1.0))
    live.register("second", second)

    def window():
        for _ in range(OF):
            with live.microbatch(of=OF):
                backward(second, x)

    return collectives_of(window), checked


def test_a_wrapper_that_is_registered_later_synchronises_at_the_boundary_too(two_ranks):
    """A03, A05: and the denominator of the loss is reduced once a step, with the loss; the norm of equal gradients costs no call."""
    for window, checked in (each["later"] for each in two_ranks["ddp"]):
        assert window["all_reduce"] == 1
        assert checked["all_reduce"] == 1


def test_fsdp2_reduces_each_group_once_a_window(two_ranks):
    """A03, A04, P15: three groups make 3 reduce-scatters for 4 microbatches, and not 12."""
    for window, alone, by_hand, _ in (each["counts"] for each in two_ranks["fsdp2"]):
        assert window["reduce_scatter"] == alone["reduce_scatter"] == 3
        assert by_hand["reduce_scatter"] == 3 * OF


def in_parts(collectives):
    """Two parts of a model, each sharded on its own, as the chunks of a pipeline stage."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (collectives.world_size,))
    parts = [fully_shard(nn.Sequential(nn.Linear(6, 6)), mesh=mesh) for _ in range(2)]
    named = [nn.ModuleDict({name: part}) for name, part in zip(("first", "second"), parts, strict=True)]
    parameters = [each for part in parts for each in part.parameters()]
    live, seen = attach(named, torch.optim.SGD(parameters, lr=0.1)), []
    for index in range(2):
        with live.microbatch(of=2):
            backward(nn.Sequential(*parts), batch_of(0, index, collectives.rank), of=2)
        seen.append([each.grad is not None for each in parameters])
    return seen


def test_all_parts_of_a_model_synchronise_at_the_boundary(two_ranks):
    """A03, P15: a list of modules."""
    for inside, boundary in (each["parts"] for each in two_ranks["fsdp2"]):
        assert not any(inside)
        assert all(boundary)


# --- bits -------------------------------------------------------------------------------------------------------------


def train_with_live(model, optimizer, rank, *, steps=3):
    live = attach(model, optimizer)
    checked = None
    for step in range(steps):
        total = torch.zeros(())
        for index in range(OF):
            with live.microbatch(of=OF) as is_boundary:
                total += backward(model, batch_of(step, index, rank))
            if is_boundary:
                checked = live.check(total, clip_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
            live.advance(samples=4)
    assert live.progress.step == steps
    return checked.grad_norm


def train_by_hand(model, optimizer, rank, *, steps=3):
    norm = None
    for step in range(steps):
        for index in range(OF):
            last = index == OF - 1
            if isinstance(model, nn.parallel.DistributedDataParallel):
                around = contextlib.nullcontext() if last else model.no_sync()
            else:
                around = contextlib.nullcontext()
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
            with around:
                backward(model, batch_of(step, index, rank))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def both_ways(collectives, kind):
    found = []
    for train in (train_with_live, train_by_hand):
        model = wrapped(kind, collectives.world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(collectives.rank)
        norm = train(model, optimizer, collectives.rank)
        found.append((bits(model, optimizer), norm))
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_window_has_the_bits_of_a_loop_written_by_hand(two_ranks, kind):
    """A04: three steps of four microbatches with clipping, and the norm of all ranks."""
    for mine, by_hand in (each["bits"] for each in two_ranks[kind]):
        assert mine == by_hand


def test_a_window_on_one_process_has_the_bits_of_a_loop_written_by_hand():
    found = []
    for train in (train_with_live, train_by_hand):
        model = plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found.append((train(model, optimizer, 0), bits(model, optimizer)))
    assert found[0] == found[1]


def resumed(collectives, folder):
    """Six steps of two microbatches under FSDP2, saved in the background; and the last three again, from a checkpoint."""

    def run(name, until, seed):
        torch.manual_seed(seed)
        model = sharded(collectives.world_size, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        live = attach(model, optimizer)
        with CheckpointManager(
            f"{folder}/{name}", every=3, mode="async", at_end=False, collectives=collectives
        ) as manager:
            manager.restore(live)
            while live.progress.step < until:
                with live.microbatch(of=2) as is_boundary:
                    loss = backward(model, batch_of(live.progress.step, 0, collectives.rank), of=2)
                if is_boundary:
                    live.check(loss, clip_norm=0.05)
                    optimizer.step()
                    optimizer.zero_grad()
                live.advance(samples=4)
                manager.step(live)
        return bits(model, optimizer)

    whole = run("whole", 6, 0)
    run("parts", 4, 0)
    return whole, run("parts", 6, 5)


def test_a_run_of_windows_resumes_exactly_under_fsdp2(two_ranks):
    """V13: with dropout, clipping and saves in the background."""
    for whole, parts in (each["resumed"] for each in two_ranks["fsdp2"]):
        assert parts == whole


# --- sums and their weights ---------------------------------------------------------------------------------------------


ROWS = ((1, 3, 2, 4), (5, 1, 1, 2), (2, 2, 3, 1))  # of each microbatch, by rank: every share has another weight


def train_sums(model, optimizer, rank, *, of=OF, parallelism=None):
    live = attach(model, optimizer, parallelism=parallelism)
    for step in range(3):
        total, weight = 0.0, 0
        for index in range(of):
            with live.microbatch(of=of):
                x = batch_of(step, index, rank, rows=ROWS[rank][index])
                loss = model(x).square().sum()
                loss.backward()
            total, weight = total + float(loss.detach()), weight + 3 * len(x)
            if index < of - 1:
                live.advance(samples=len(x))
        checked = live.check(total, weight=weight, clip_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=len(x))
    return checked.loss, checked.grad_norm, checked.weight


def pure_steps(rank, **how):
    def loss_fn(model, batch):
        return Loss(sum=model(batch).square().sum(), weight=3 * len(batch))

    model, adamw = plain(), pure(torch.optim.AdamW, lr=0.1)
    state, step = init_state(model, adamw), make_step(model, loss_fn, adamw, accumulate=OF, clip_norm=0.5, **how)
    for number in range(3):
        window = [batch_of(number, index, rank, rows=ROWS[rank][index]) for index in range(OF)]
        state, metrics = step(state, window)
    return [each.tolist() for each in state.model.params.values()], metrics


def as_lists(model):
    return [each.tolist() for each in model.state_dict().values()]


def test_sums_on_one_process_have_the_bits_of_the_pure_step():
    """A01, A02: one denominator for the window."""
    model = plain()
    loss, norm, weight = train_sums(model, torch.optim.AdamW(model.parameters(), lr=0.1), 0)
    wanted, metrics = pure_steps(0)
    assert as_lists(model) == wanted
    assert (loss, norm, weight) == (metrics["loss"], metrics["grad_norm"], metrics["weight"])


def live_and_pure(collectives):
    model = nn.parallel.DistributedDataParallel(plain())
    found = train_sums(model, torch.optim.AdamW(model.parameters(), lr=0.1), collectives.rank)
    wanted, metrics = pure_steps(collectives.rank, collectives=collectives)
    return as_lists(model.module), found, wanted, [metrics[name] for name in ("loss", "grad_norm", "weight")]


def test_sums_under_ddp_have_the_bits_of_the_pure_step_on_two_ranks(two_ranks):
    """A02: shares and microbatches of other sizes; halving and doubling are exact, so the order of division makes no difference."""
    for mine, found, wanted, metrics in (each["sums"] for each in two_ranks["ddp"]):
        assert mine == wanted
        assert list(found) == metrics


def test_sums_of_silent_replicas_have_the_bits_of_the_pure_step():
    """A parallelism whose backward does not communicate: `check` sums the gradients, in rank order on any number of ranks."""

    def play(ranks):
        model = plain()
        found = train_sums(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), ranks.rank, parallelism=Replicas(ranks)
        )
        return as_lists(model), found

    def steps(ranks):
        wanted, metrics = pure_steps(ranks.rank, collectives=ranks)
        return wanted, tuple(metrics[name] for name in ("loss", "grad_norm", "weight"))

    assert run_threads(3, play) == run_threads(3, steps)


# --- what is refused --------------------------------------------------------------------------------------------------


def stop_on_all(collectives, kind):
    """Rank 1 has a loss that is not finite, and later a gradient."""
    model = wrapped(kind, collectives.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    before, texts = bits(model, optimizer), []
    for poison in ("loss", "gradient"):
        x = batch_of(0, 0, collectives.rank)
        with live.microbatch():
            loss = model(x).square().mean()
            (loss * (torch.inf if poison == "gradient" and collectives.rank == 1 else 1.0)).backward()
        reported = loss.detach() * (torch.nan if poison == "loss" and collectives.rank == 1 else 1.0)
        try:
            live.check(reported)
        except NonFinite as error:
            texts.append((str(error), error.step, error.rank))
        live.drop_window()
    after = bits(model, optimizer)
    grads = [each.grad is None for each in model.parameters()]
    return before == after, all(grads), texts, live.progress.step


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_number_that_is_not_finite_stops_every_rank_before_anything_changes(two_ranks, kind):
    """A09, R09: the same error on every rank names the step and the rank whose loss it is."""
    for is_same, is_clear, texts, step in (each["stopped"] for each in two_ranks[kind]):
        assert is_same
        assert is_clear
        assert step == 0
        (of_loss, at, where), (of_gradient, _, _) = texts
        assert "not finite on ranks [1]" in of_loss
        assert (at, where) == (0, 1)
        assert "gradient norm" in of_gradient


def leave_open(collectives, kind, *, is_mixed=False):
    model = wrapped(kind, collectives.world_size)
    if is_mixed:  # then the gradients of a window are sums in another dtype
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(collectives.world_size, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    found = {}
    with live.microbatch(of=2):
        backward(model, batch_of(0, 0, collectives.rank))
    found["check"] = refusal(lambda: live.check(1.0))
    found["step"] = refusal(lambda: live.advance(samples=4, steps=1))
    found["save"] = refusal(live.capture)
    with contextlib.suppress(ZeroDivisionError), live.microbatch(of=2):
        _ = 1 / 0
    found["shown"] = repr(live)
    live.drop_window()
    found["dropped"] = refusal(live.capture)
    # the same window, with torch's own means
    if kind == "fsdp2":
        model.set_requires_gradient_sync(False)
    with model.no_sync() if kind == "ddp" else contextlib.nullcontext():
        backward(model, batch_of(0, 0, collectives.rank))
    found["by hand"] = refusal(live.capture)
    live.drop_window()
    found["by hand, dropped"] = refusal(live.capture)
    with live.microbatch():
        pass
    found["put back"] = kind != "fsdp2" or not model._get_fsdp_state()._fsdp_param_groups[0].reduce_grads
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_nothing_is_saved_inside_a_window(two_ranks, kind):
    """A06, F52: also where FSDP2 holds the gradients of a window and ``.grad`` stays None; dropping it leaves nothing behind."""
    mixed = [each["mixed"] for each in two_ranks["fsdp2"]] if kind == "fsdp2" else []
    for found in [each["open"] for each in two_ranks[kind]] + mixed:
        for name in ("check", "step", "save"):
            assert found[name].startswith("IncompleteWindow"), found
            assert "1 of 2 microbatches" in found[name]
        assert "inside an accumulation window" in found["shown"]
        assert found["by hand"].startswith("IncompleteWindow"), found
        assert found["dropped"] == found["by hand, dropped"] == "nothing"
        assert found["put back"]


def of_the_inner(collectives):
    """The wrapper is not attached, so nothing says that gradients are summed."""
    model = nn.parallel.DistributedDataParallel(plain()).module
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return refusal(lambda: live.check(1.0))


def test_ranks_that_nothing_tells_of_are_refused(two_ranks):
    for each in two_ranks["ddp"]:
        assert "attach the wrapper itself" in each["inner"]


def test_a_microbatch_that_fails_does_not_count_and_is_run_again():
    """A03: the setting before comes back, and so does the place in the window."""
    model = plain()
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(2):
        with contextlib.suppress(ZeroDivisionError), live.microbatch(of=2):
            _ = 1 / 0
        with live.microbatch(of=2) as is_boundary:
            backward(model, batch_of(0, index, 0), 2)
        assert is_boundary == (index == 1)


def test_a_window_may_end_early_and_counts_itself():
    """A07: at the end of the data `of` is what is left, and the boundary is there."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    boundaries = []
    for left in range(6, 0, -1):
        with live.microbatch(of=min(OF, left) if left < 3 else OF) as is_boundary:
            backward(model, batch_of(0, left, 0))
        boundaries.append(is_boundary)
        live.advance(samples=4)
    assert boundaries == [False, False, False, True, False, True]
    assert (live.progress.step, live.progress.samples) == (2, 24)
    live.capture()
    with pytest.raises(InvalidArgument, match="of"), live.microbatch(of=0):
        pass


def test_check_finds_what_cannot_be_right():
    model = plain()
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match=r"live\.check: .*found none of them with one; call it after backward"):
        live.check(1.0)
    backward(model, batch_of(0, 0, 0))
    with pytest.raises(InvalidArgument, match="clip_norm"):
        live.check(1.0, clip_norm=0)
    with pytest.raises(NonFinite, match="drop_window"):
        live.check(float("nan"))
    with live.microbatch(of=2):
        backward(model, batch_of(0, 0, 0))
    with pytest.raises(IncompleteWindow, match="1 of 2"):
        live.check(1.0)


def on_a_gpu(collectives):
    """One rank whose gradients are on a GPU, and whose sums are exchanged there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for train in (train_with_live, train_by_hand):
        model = plain().cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.device("cuda"):
            norm = train(model, optimizer, 0)
        found.append((bits(model, optimizer), norm))
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_window_on_a_gpu_has_the_bits_of_a_loop_written_by_hand(processes):
    ((mine, by_hand),) = processes.run(1, on_a_gpu, collectives=PATIENT)
    assert mine == by_hand
