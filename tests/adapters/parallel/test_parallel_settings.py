"""Settings that change the bits of a training on ranks are compared at a resume."""

import warnings

import pytest
import torch
from kit.adapters.fsdp2_cases import Model, sharded
from kit.depth import IS_DEEP
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import InvalidArgument

pytestmark = pytest.mark.slow(2)


def drifts_of(collectives, folder, model, *, saves=False):
    """The warnings of a resume."""
    live = attach(model)
    with (
        warnings.catch_warnings(record=True) as caught,
        CheckpointManager(folder, collectives=collectives, every=None, at_end=False) as manager,
    ):
        warnings.simplefilter("always")
        manager.restore(live)
        if saves:
            live.advance(samples=1)
            manager.save(live)
    return [str(each.message) for each in caught if each.category.__name__ == "ResumeDrift"]


def ddp(hook=None, **options):
    model = nn.parallel.DistributedDataParallel(Model(), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def tensor_parallel():
    """All ranks read the same data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(Model(), init_device_mesh("cpu", (2,)), {"first": ColwiseParallel()})


def back(collectives, folder):
    """FSDP2 in place of DDP, and DDP with other buckets."""
    drifts_of(collectives, folder, ddp(), saves=True)
    return [
        drifts_of(collectives, folder, make())
        for make in (
            lambda: sharded(collectives.world_size),
            ddp,
            lambda: ddp(bucket_cap_mb=1),
            lambda: ddp(find_unused_parameters=True),
        )
    ]


def parts(*half, divided=()):
    """A model of ten parts, of which some have mixed precision, and some another divisor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    for index, each in enumerate(model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if index in half else MixedPrecisionPolicy()
        fully_shard(each, mesh=mesh, mp_policy=policy)
        if index in divided:
            each.set_gradient_divide_factor(4.0)
    return model


def rounds(tensor):
    tensor.copy_(tensor.to(torch.bfloat16).to(tensor.dtype))


def summed(world_size, *, of=("first", "second", ""), hook=None, scatter=None, **options):
    """FSDP2 that sums gradients otherwise than by default, in some of its modules."""
    model = sharded(world_size, **options)
    for each in map(model.get_submodule, of):
        if hook is not None:
            each.set_all_reduce_hook(hook)
        if scatter is not None:
            each.set_custom_reduce_scatter(scatter)
        if hook is scatter is None:
            each.set_force_sum_reduction_for_comms(True)
    return model


def sums(collectives, folder):
    """With hooks saved, resumed by the same, by others and by none."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class OwnReduceScatter(DefaultReduceScatter):
        pass

    size = collectives.world_size
    drifts_of(collectives, folder, summed(size, hook=rounds), saves=True)
    assert drifts_of(collectives, folder, summed(size, hook=rounds)) == []
    return {
        "no hook": drifts_of(collectives, folder, sharded(size)),
        "hook of a part": drifts_of(collectives, folder, summed(size, hook=rounds, of=["first"])),
        "scatter": drifts_of(collectives, folder, summed(size, hook=rounds, scatter=OwnReduceScatter())),
    }


def changes(collectives, folder):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    size = collectives.world_size
    drifts_of(collectives, folder, sharded(size), saves=True)
    found = {
        "same": drifts_of(collectives, folder, sharded(size)),
        "ddp": drifts_of(collectives, folder, ddp()),
        "reshard": drifts_of(collectives, folder, sharded(size, reshard_after_forward=False)),
        "half": drifts_of(collectives, folder, sharded(size, mp_policy=half)),
    }
    found["back"], found["same ddp"], found["buckets"], found["unused"] = back(collectives, folder + "-ddp")
    found["summed"] = drifts_of(collectives, folder, summed(size))
    if size == 2:
        found |= sums(collectives, folder + "-sums")
        drifts_of(collectives, folder + "-parts", parts(0, 8), saves=True)
        assert drifts_of(collectives, folder + "-parts", parts(0, 8)) == []
        found["ninth part"] = drifts_of(collectives, folder + "-parts", parts(0, 9))
        drifts_of(collectives, folder + "-divided", parts(divided=(0, 8)), saves=True)
        assert drifts_of(collectives, folder + "-divided", parts(divided=(0, 8))) == []
        found["ninth divided"] = drifts_of(collectives, folder + "-divided", parts(divided=(0, 9)))
        found["tp"] = drifts_of(collectives, folder, tensor_parallel())
        drifts_of(collectives, folder + "-tp", tensor_parallel(), saves=True)
        assert drifts_of(collectives, folder + "-tp", tensor_parallel()) == []
        found["tp back"] = drifts_of(collectives, folder + "-tp", sharded(size))
        found["hook"] = drifts_of(collectives, folder, ddp(fp16_compress_hook))
        divided = sharded(size)
        divided.set_gradient_divide_factor(4.0)  # of the root alone
        found["part divided"] = drifts_of(collectives, folder, divided)
        with pytest.raises(InvalidArgument, match=r"found 2 and 4; call set_gradient_divide_factor on every module"):
            _ = TorchParallelism(divided).gradient_divisor
        for each in (divided.first, divided.second):
            each.set_gradient_divide_factor(4.0)
        found["divided"] = drifts_of(collectives, folder, divided)
        assert TorchParallelism(divided).gradient_divisor == 4.0
        assert TorchParallelism(sharded(size)).gradient_divisor == size
    elif size == 4:
        found["mesh"] = drifts_of(collectives, folder, sharded(size, mesh_shape=(2, 2)))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4] if IS_DEEP else [2, 4])
def test_another_precision_mesh_or_hook_is_said_and_what_has_the_same_bits_is_not(processes, tmp_path, world_size):
    """W09: none of them is in a tensor, and each changes the sums of the training."""
    for rank, found in enumerate(processes.run(world_size, changes, str(tmp_path), collectives=PATIENT)):
        drifts = {name: each for name, each in found.items() if each}
        if rank:
            assert not drifts, "one rank says it"
            continue
        more = {
            2: {
                "no hook",
                "hook of a part",
                "scatter",
                "hook",
                "tp",
                "tp back",
                "divided",
                "part divided",
                "ninth part",
                "ninth divided",
            },
            3: {"summed", "ddp", "back", "buckets", "unused"},
            4: {"summed", "ddp", "back", "buckets", "unused", "mesh"},
        }
        assert drifts.keys() == {"half", *more[world_size]}
        assert "attached.model.(precision): saved nothing, wanted param bfloat16, reduce float32" in drifts["half"][0]
        if world_size == 2:
            assert "attached.model.(ranks): saved [2], wanted [1]" in drifts["tp"][0]
            assert "attached.model.(ranks): saved [1], wanted [2]" in drifts["tp back"][0]
            assert "attached.model.(hooks): saved nothing, wanted ['fp16_compress_hook']" in drifts["hook"][0]
            assert "attached.model.(hooks): saved ['rounds'], wanted nothing" in drifts["no hook"][0]
            assert "attached.model.(hooks): saved ['rounds'], wanted ['', 'rounds', '']" in drifts["hook of a part"][0]
            assert "wanted ['rounds, OwnReduceScatter']" in drifts["scatter"][0].replace("sums.<locals>.", "")
            assert "attached.model.(divisor): saved nothing, wanted 4.0" in drifts["divided"][0]
            assert "attached.model.(divisor): saved nothing, wanted [4.0, None]" in drifts["part divided"][0]
            assert len(drifts["ninth divided"]) == 1
            assert "attached.model.(divisors): saved [4.0, None" in drifts["ninth divided"][0]
            assert "attached.model.(parts): saved" in drifts["ninth part"][0]
        else:
            assert "attached.model.(hooks): saved nothing, wanted ['sums alone']" in drifts["summed"][0]
            assert "attached.model.(wrapper): saved FSDP2, wanted DDP" in drifts["ddp"][0]
            assert "attached.model.(wrapper): saved DDP, wanted FSDP2" in drifts["back"][0]
            assert "attached.model.(buckets): saved 26214400, wanted 1048576" in drifts["buckets"][0]
            assert (
                "attached.model.(buckets): saved 26214400, wanted 26214400, find_unused_parameters"
                in drifts["unused"][0]
            )
        if world_size == 4:
            assert "attached.model.(ranks): saved [4], wanted [2, 2]" in drifts["mesh"][0]


def alone(collectives, folder):
    return drifts_of(collectives, folder, sharded(collectives.world_size))


def test_another_number_of_ranks_has_another_mesh_without_a_word(processes, tmp_path):
    processes.run(2, save_once, str(tmp_path), collectives=PATIENT)
    for world_size in (1, 3):
        assert processes.run(world_size, alone, str(tmp_path), collectives=PATIENT) == [[]] * world_size


def save_once(collectives, folder):
    return drifts_of(collectives, folder, sharded(collectives.world_size), saves=True)
