"""What FSDP2 does with tensors behind the back of a reader: gathered copies, padded memory, replaced memory, updates without a trace."""

import threading
import time

import pytest
import torch
from kit.adapters.fsdp2_cases import OPTIMIZERS, Model, bits, sharded, train, whole
from kit.depth import IS_DEEP
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

import trainfold
from trainfold import metrics as M
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.shard import Shard

pytestmark = pytest.mark.slow(1)


def started(collectives, *, optimizer="adamw", steps=2, **options):
    model = sharded(collectives.world_size, **options)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    live = attach(model, stepper)
    train(model, stepper, live, DisabledManager(collectives=collectives), steps=steps)
    return model, stepper, live


def restored(collectives, folder, **options):
    """The bits that the checkpoint has, loaded into new objects."""
    model = sharded(collectives.world_size, seed=9, **options)
    stepper = OPTIMIZERS["adamw"](model.parameters())
    live = attach(model, stepper)
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.restore(live)
    return bits(model, stepper)


# --- gathered copies --------------------------------------------------------------------------------------------------


def after_forwards(collectives, folder):
    found = {}
    for name, options in (("default", {}), ("kept", {"reshard_after_forward": False})):
        model, stepper, live = started(collectives, **options)
        wanted = bits(model, stepper)
        with torch.no_grad():
            model.eval()(torch.ones(2, 6))
        plain = sum(type(each) is nn.Parameter for each in model.parameters())
        with CheckpointManager(f"{folder}/{name}", collectives=collectives) as manager:
            manager.save(live)
        model.train()
        train(model, stepper, live, DisabledManager(collectives=collectives), steps=3)  # it still trains
        found[name] = plain, restored(collectives, f"{folder}/{name}") == wanted
        with torch.no_grad():
            model(torch.ones(2, 6))
        again = attach(model, stepper)  # parameters have their places back before they are named
        found[name] += (all(isinstance(each, Shard) for each in again.capture().model.params.values()),)
        with torch.no_grad():
            model(torch.ones(2, 6))
        again.restore(live.capture())
        found[name] += (bits(model, stepper) is not None,)
    return found


def test_gathered_copies_that_a_forward_left_are_freed_before_anything_is_named(processes, tmp_path):
    """X06: the root keeps gathered parameters after a forward in evaluation, and with ``reshard_after_forward=False`` every module does."""
    for found in processes.run(2, after_forwards, str(tmp_path), collectives=PATIENT):
        for name, (plain, same, cut, again) in found.items():
            assert plain > 0, f"{name}: the forward left gathered copies, so that the test tests something"
            assert same, name
            assert cut, name
            assert again, name


def with_evaluate(collectives, folder):
    ends = []
    for is_evaluated in (False, True):
        torch.manual_seed(collectives.rank)
        model, stepper, live = started(collectives)
        torch.manual_seed(3 + collectives.rank)
        with CheckpointManager(f"{folder}/{is_evaluated}", every=1, mode="async", collectives=collectives) as manager:
            for steps in (3, 4, 5):
                train(model, stepper, live, manager, steps=steps)
                if is_evaluated:
                    batches = [torch.ones(2, 6)] * (1 + collectives.rank)
                    found = trainfold.evaluate(
                        lambda batch, model=model: {"loss": model(batch).square()},
                        batches,
                        {"loss": M.Mean()},
                        collectives=collectives,
                    )
                    assert found.batches == 3
        ends.append(bits(model, stepper))
    return ends, restored(collectives, f"{folder}/True")


def test_an_evaluation_beside_async_saves_changes_neither_the_run_nor_what_is_saved(processes, tmp_path):
    """Q05: ranks have another number of batches, and the dropout of the training draws from the same streams."""
    for (alone, evaluated), saved in processes.run(2, with_evaluate, str(tmp_path), collectives=PATIENT):
        assert alone == evaluated == saved


# --- memory -----------------------------------------------------------------------------------------------------------


def leaves_of(collectives):
    model, stepper, live = started(collectives)
    state = live.capture()
    found = {}
    for name, parameter in model.named_parameters():
        leaf = state.model.params[name]
        slot = state.optimizer.slots[name]["exp_avg"]
        local = parameter._local_tensor
        cut = tuple(slice(start, stop) for start, stop in leaf.box)
        found[name] = (
            tuple(leaf.shape) == tuple(parameter.shape),
            leaf.tensor.data_ptr() == local.data_ptr(),
            slot.tensor.data_ptr() == stepper.state[parameter]["exp_avg"]._local_tensor.data_ptr(),
            torch.equal(whole(parameter.detach())[cut], leaf.tensor),
            torch.equal(whole(stepper.state[parameter]["exp_avg"])[cut], slot.tensor),
            leaf.tensor.numel(),
            local.untyped_storage().nbytes() // local.element_size(),
            parameter.data_ptr(),
        )
    return found


def test_a_leaf_is_the_memory_of_this_rank_and_no_copy_even_where_a_part_is_uneven_padded_or_empty(processes):
    ranks = processes.run(2, leaves_of, collectives=PATIENT)
    for found in ranks:
        for name, (*same, _, _, address) in found.items():
            assert all(same), (name, same)
            assert address == 0, "a DTensor has no address of its own"
    assert [found["last.weight"][5] for found in ranks] == [8, 0], "one row on two ranks: the second has none"
    assert ranks[1]["first.bias"][5:7] == (3, 4), "three numbers in memory for four"


def replaced(collectives, folder):
    model, stepper, live = started(collectives)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    errors = {"copied": refusal(live.capture)}
    model.load_state_dict(state, assign=True)
    errors["assigned"] = refusal(live.capture)
    stepper = OPTIMIZERS["adamw"](model.parameters())  # made of the new parameters, it can be attached
    live = attach(model, stepper)
    train(model, stepper, live, DisabledManager(collectives=collectives), steps=1)
    wanted = bits(model, stepper)
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.save(live)
    return errors, restored(collectives, folder) == wanted


def test_parameters_that_a_load_has_replaced_are_found_out_and_those_written_in_place_are_not(processes, tmp_path):
    for errors, same in processes.run(2, replaced, str(tmp_path), collectives=PATIENT):
        assert errors["copied"] == "nothing"
        assert "a tensor of shape" in errors["assigned"]
        assert "that the model does not have" in errors["assigned"]
        assert same


# --- updates without a trace ------------------------------------------------------------------------------------------


def overtaken(collectives, folder):
    """Each save is overtaken by the next steps and by an average, both by foreach, which moves no version counter."""
    model = sharded(collectives.world_size)
    average = sharded(collectives.world_size)
    stepper = OPTIMIZERS["foreach"](model.parameters())
    live = attach(model, stepper, extra={"ema": average})
    mine, theirs = list(model.parameters()), list(average.parameters())
    versions = [each._local_tensor._version for each in mine]
    train(model, stepper, live, DisabledManager(collectives=collectives), steps=1)
    found = {"moved": [each._local_tensor._version for each in mine] != versions}
    events = []
    with CheckpointManager(
        folder, mode="async", collectives=collectives, hold_check=True, on_event=lambda event: events.append(str(event))
    ) as manager:
        for _ in range(3):
            wanted = bits(model, stepper), bits(average)
            manager.save(live)
            torch._foreach_lerp_([each.detach() for each in theirs], [each.detach() for each in mine], 0.1)
            train(model, stepper, live, DisabledManager(collectives=collectives), steps=live.progress.step + 1)
            torch._foreach_mul_([each.detach() for each in theirs], 0.5)
            manager.drain()
    model, average = sharded(collectives.world_size, seed=9), sharded(collectives.world_size, seed=9)
    stepper = OPTIMIZERS["foreach"](model.parameters())
    live = attach(model, stepper, extra={"ema": average})
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.restore(live)
    own = sum(each._local_tensor.nbytes for each in average.parameters())
    found["same"] = (bits(model, stepper), bits(average)) == wanted
    found["copied"] = [int(each.split(" bytes copied")[0].split()[-1]) for each in events if "bytes copied" in each]
    return found, own


def test_the_step_of_an_optimizer_announces_itself_and_a_foreach_average_is_copied_in_the_call(processes, tmp_path):
    for found, own in processes.run(2, overtaken, str(tmp_path), collectives=PATIENT):
        assert not found["moved"], "a foreach step leaves no trace, so that the test tests something"
        assert found["same"]
        for copied in found["copied"]:
            assert own <= copied < 2 * own, "the average, buffers and counters: neither parameters nor slots"


class LateStore:
    """Its writes wait until they may go on."""

    def __init__(self, folder):
        self.inner, self.may_go_on = LocalStore(folder), threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        assert self.may_go_on.wait(20)
        self.inner.write(name, parts, size_bytes=size_bytes)


LEAVES = {
    "clamp": "model.params['first.weight']",
    "load": "model.params['second.weight']",
    "slot": "optimizer.slots['second.weight']['exp_avg']",
}


def written_between(collectives, folder):
    model, stepper, live = started(collectives)
    writes = {
        "clamp": lambda: model.first.weight.clamp_(-1e-3, 1e-3),
        "load": lambda: model.load_state_dict({"second.weight": 3 * model.second.weight}, strict=False),
        "slot": stepper.state[model.second.weight]["exp_avg"].zero_,
    }
    found = {}
    for name, write in writes.items():
        store = LateStore(f"{folder}/{name}")
        with CheckpointManager(store, mode="async", collectives=collectives) as manager:
            wanted = bits(model, stepper)
            manager.save(live)
            with torch.no_grad():
                write()
            store.may_go_on.set()
            failure = refusal(manager.drain)
            second, saved = bits(model, stepper), manager.save(live)
            with torch.no_grad():
                write()  # what is not written to announced is copied in the call from now on
            manager.drain()
        found[name] = failure, wanted != second, saved.status, restored(collectives, f"{folder}/{name}") == second
    return found


def test_a_write_to_a_dtensor_outside_of_a_step_fails_the_save_that_it_overtakes(processes, tmp_path):
    """D01: a DTensor's operations move its own counter, and not that of the local part, which the save reads: it was saved in silence."""
    for found in processes.run(2, written_between, str(tmp_path), collectives=PATIENT):
        for name, (failure, is_changed, status, same) in found.items():
            assert failure.startswith(f"SaveFailed: {LEAVES[name]}: expected a leaf that does not change"), (
                name,
                failure,
            )
            assert is_changed, name
            assert (status, same) == ("staged", True), name


# --- kinds of sharding ------------------------------------------------------------------------------------------------


def kinds(collectives, folder):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "bf16": {"mp_policy": half},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
    }
    if collectives.world_size == 4:
        options = {"hsdp": {"mesh_shape": (2, 2)}}
        if IS_DEEP:
            options["hsdp of one"] = {"mesh_shape": (4, 1)}
    found = {}
    for name, each in options.items():
        place = f"{folder}/{name}"
        model, stepper, live = started(collectives, **each)
        with CheckpointManager(place, mode="async", collectives=collectives) as manager:
            manager.save(live)
            wanted = bits(model, stepper)
            train(model, stepper, live, manager, steps=5)
        ended = bits(model, stepper)
        model = sharded(collectives.world_size, seed=9, **each)
        stepper = OPTIMIZERS["adamw"](model.parameters())
        live = attach(model, stepper)
        with CheckpointManager(place, collectives=collectives) as manager:
            manager.restore(live)
        start = bits(model, stepper)
        train(model, stepper, live, DisabledManager(collectives=collectives), steps=5)
        found[name] = start == wanted, bits(model, stepper) == ended, restored(collectives, place) == wanted
    return found


def test_mixed_precision_and_cpu_offload_resume_exactly_and_fit_a_model_without_them(processes, tmp_path):
    for found in processes.run(2, kinds, str(tmp_path), collectives=PATIENT):
        assert found == dict.fromkeys(("bf16", "offload", "kept"), (True, True, True))


def test_replicas_of_parts_on_four_ranks_resume_exactly_and_fit_one_mesh_of_four(processes, tmp_path):
    for found in processes.run(4, kinds, str(tmp_path), collectives=PATIENT):
        assert found == dict.fromkeys(("hsdp", "hsdp of one") if IS_DEEP else ("hsdp",), (True, True, True))


def drifted(collectives, folder):
    model, _, live = started(collectives, mesh_shape=(2, 2))
    flat = started(collectives)[2].capture()
    flags = (
        {leaf.is_copied for leaf in live.capture().model.params.values()},
        {leaf.is_copied for leaf in flat.model.params.values()},
    )
    if collectives.rank == 3:
        model.second.weight._local_tensor[0, 0] += 1e-6
    with CheckpointManager(folder, collectives=collectives) as manager:
        return flags, refusal(lambda: manager.save(live))


def test_replicas_of_a_part_that_have_drifted_apart_are_refused_by_name(processes, tmp_path):
    for flags, error in processes.run(4, drifted, str(tmp_path), collectives=PATIENT):
        assert flags == ({True}, {False})
        assert error.startswith(
            "RanksDisagree: model.params['second.weight']: expected the bits of rank 1, which holds the same part"
        )
        assert "on rank 3" in error


def drifted_beside_the_plan(collectives, folder):
    """Two ranks cut the linears. A norm is in no plan, so that FSDP2 cuts it over a mesh of its own rank alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    parallelize_module(model, mesh["b"], {"0": ColwiseParallel(output_layouts=Replicate())})
    live = attach(fully_shard(model, mesh=mesh["a"]))
    flags = {name: leaf.is_copied for name, leaf in live.capture().model.params.items()}
    if collectives.rank == 1:
        model[1].weight._local_tensor[2] += 1e-6
    with CheckpointManager(folder, check_replicas=1, every=None, at_end=False, collectives=collectives) as manager:
        at_save = refusal(lambda: manager.save(live))
        in_loop, steps = "nothing", 0
        while in_loop == "nothing" and steps < 200:  # a comparison ends at a later boundary
            steps += 1
            live.advance(samples=1)
            in_loop = refusal(lambda: manager.step(live))
            time.sleep(0.01)
    return flags, at_save, in_loop


def test_parameters_that_no_plan_of_tensor_parallelism_names_are_replicas_of_each_other(processes, tmp_path):
    """B06, R07: their mesh has one rank of each tensor-parallel group, so that nothing in it is a replica, and a drifted bit was saved in silence."""
    for flags, *errors in processes.run(2, drifted_beside_the_plan, str(tmp_path), collectives=PATIENT):
        assert flags == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
        for error in errors:
            assert "model.params['1.weight']" in error
            assert "on rank 1" in error


def from_meta(collectives, folder):
    """The model is made without values, sharded, given memory, and restored before its first forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, stepper, live = started(collectives)
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.save(live)
    wanted = bits(model, stepper)
    train(model, stepper, live, DisabledManager(collectives=collectives), steps=5)
    ended = bits(model, stepper)
    with torch.device("meta"):
        model = Model()
    mesh = init_device_mesh("cpu", (collectives.world_size,))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    errors = refusal(lambda: attach(model))
    model.to_empty(device="cpu")
    stepper = OPTIMIZERS["adamw"](model.parameters())
    live = attach(model, stepper)
    before = [each._local_tensor.data_ptr() for each in model.parameters()]
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.restore(live)
    start = bits(model, stepper)
    train(model, stepper, live, DisabledManager(collectives=collectives), steps=5)
    stayed = before == [each._local_tensor.data_ptr() for each in model.parameters()]
    return errors, stayed, start == wanted, bits(model, stepper) == ended


def test_a_model_that_was_made_on_the_meta_device_resumes_exactly(processes, tmp_path):
    for errors, stayed, start, end in processes.run(2, from_meta, str(tmp_path), collectives=PATIENT):
        assert "on the meta device" in errors
        assert stayed, "torch pads the memory of uneven parts when it is made, and not in the first forward"
        assert start
        assert end


def keeps_gradients(collectives, folder):
    """A layer that is not used has gradients of zero, or none, and weight decay moves it only in the first case."""
    found = []
    for name, to_none in (("zeros", False), ("none", True)):
        ends = []
        for restore in (False, True):
            model = sharded(collectives.world_size, seed=9 if restore else 0)
            stepper = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)
            live = attach(model, stepper)
            with CheckpointManager(f"{folder}/{name}", collectives=collectives) as manager:
                if restore:
                    manager.restore(live)
                while live.progress.step < 4:
                    out = model(torch.ones(2, 6)) if live.progress.step < 2 else model.first(torch.ones(2, 6))
                    out.square().mean().backward()
                    stepper.step()
                    stepper.zero_grad(set_to_none=to_none)
                    live.advance(samples=2)
                    if live.progress.step == 2 and not restore:
                        manager.save(live)
            ends.append(bits(model, stepper))
        found.append(ends)
    return found


def test_gradients_of_zero_come_back_as_such(processes, tmp_path):
    for zeros, none in processes.run(2, keeps_gradients, str(tmp_path), collectives=PATIENT):
        assert zeros[0] == zeros[1]
        assert none[0] == none[1]
        assert zeros[0] != none[0], "weight decay has moved the layers that were not used"


def on_a_gpu(collectives, folder):
    """One rank with its parameters in pinned memory of the CPU: slots come back there, and dropout draws from the GPU's stream."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh, ends, streams = init_device_mesh("cuda", (1,)), [], []
    for restore in (False, True):
        torch.manual_seed(9 if restore else 0)
        model = fully_shard(Model(), mesh=mesh, offload_policy=CPUOffloadPolicy())
        stepper = OPTIMIZERS["adamw"](model.parameters())
        live = attach(model, stepper)
        with CheckpointManager(folder, collectives=collectives) as manager:
            if restore:
                manager.restore(live)
                assert all(slot.is_cpu for slots in stepper.state.values() for slot in slots.values())
            while live.progress.step < 4:
                model(torch.ones(2, 6, device="cuda")).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
                live.advance(samples=2)
                if live.progress.step == 2 and not restore:
                    manager.save(live)
        ends.append(bits(model, stepper))
        streams.append("cuda" in live.capture().rng.value)
    return ends, streams


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cpu_offload_of_a_gpu_resumes_exactly_with_the_streams_of_the_gpu(processes, tmp_path):
    ((ends, streams),) = processes.run(1, on_a_gpu, str(tmp_path), collectives=PATIENT)
    assert ends[0] == ends[1]
    assert streams == [True, True]


# --- what is refused --------------------------------------------------------------------------------------------------


class OddSlots(torch.optim.SGD):
    """Keeps a slot of the parameter's shape that is whole on every rank."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.zeros(parameter.shape)


def refused(collectives):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor import Shard as Cut

    mesh = init_device_mesh("cpu", (2,))
    errors = {}
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    errors["partial"] = refusal(lambda: attach(model))
    rows = torch.ones((3, 2) if collectives.rank == 0 else (1, 2))
    model = nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(rows, mesh, [Cut(0)], shape=torch.Size((4, 2)), stride=(2, 1)))
    errors["by hand"] = refusal(lambda: attach(model).capture())
    for kind in (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.LBFGS):
        model = sharded(2)
        errors[kind.__name__] = refusal(lambda kind=kind, model=model: attach(model, kind(model.parameters())))
    model = Model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in (model.first, model):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    errors["early"] = refusal(lambda: attach(model, early))
    model = sharded(2)
    odd = OddSlots(model.parameters(), lr=0.1)
    live = attach(model, odd)
    model(torch.ones(2, 6)).sum().backward()
    odd.step()
    errors["odd"] = refusal(lambda: live.advance(samples=2))
    _, _, live = started(collectives)
    state = live.capture()
    other = Model()
    whole_live = attach(other, OPTIMIZERS["adamw"](other.parameters()))
    errors["into a whole one"] = refusal(lambda: whole_live.restore(state))
    errors["alone"] = refusal(lambda: save(state, MemoryStore(), collectives=trainfold.SingleProcess()))
    return errors


def test_what_cannot_be_saved_exactly_is_refused_by_name(processes):
    for errors in processes.run(2, refused, collectives=PATIENT):
        assert "Partial" in errors["partial"]
        assert "[2, 2] belong" in errors["by hand"], "three rows and one are not where the rule of cuts has them"
        for name in ("Adafactor", "Rprop", "LBFGS"):
            assert f" {name} for DTensors" in errors[name]
        assert "that the model does not have" in errors["early"]
        assert "['odd']" in errors["odd"]
        assert "whole, beside a parameter that is cut" in errors["odd"]
        assert "the part that this rank holds" in errors["into a whole one"]
        assert "slices that cover" in errors["alone"]
