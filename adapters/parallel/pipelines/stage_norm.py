"""`StageNorm`: the norm of the gradients of all stages of a pipeline, in which the gradient of a weight that stages share counts once."""

import hashlib
from collections.abc import Sequence
from functools import reduce
from typing import Any, Final, Protocol, TypeAlias, final

import torch

from trainfold.core.format.codec import DENSE
from trainfold.core.state.names.wrapper_names import name_in

# the stage and the name there of the parameter of each gradient; no name if it is in no stage
Owners: TypeAlias = list[tuple[int, str | None]]
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class HasModule(Protocol):
    """What a norm needs to know of a stage."""

    @property
    def submod(self) -> torch.nn.Module:
        """Its module."""

    @property
    def stage_index(self) -> int:
        """Its index in the pipeline."""

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""


class HasNorm(Protocol):
    """How the modules of the stages are trained."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are that ranks exchange."""

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Of gradients that are cut, over their ranks."""


@final
class StageNorm:
    """Adds the norms of the gradients of all stages as one process does: in the order of the stages, in the dtype of all of them.

    A name that several stages have is one weight, and its gradient counts on the first stage that has it. The other copies only have to be
    finite. Stages exchange digests of the names once, and again when another set of parameters has gradients.

    Args:
        stages: of this rank, in the order of the pipeline.
        inner: how their modules are trained.
        group: of the pipeline; None for all ranks.
    """

    def __init__(self, stages: Sequence[HasModule], inner: HasNorm, group: Any) -> None:
        self._stages = stages
        self._inner = inner
        self._group = group
        self._known: Owners | None = None
        self._copies: set[tuple[int, str | None]] = set()

    def of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm, on every rank of the pipeline.

        Args:
            gradients: of this rank, in the order of the stages.
        """
        count, is_cut = self._stages[0].num_stages, not set(map(type, gradients)) <= DENSE
        owners = self._owners(gradients)
        while True:
            slots = self._slots(owners, is_cut=is_cut)
            sizes = [min(len(slots.get(slot, ())), 1 if is_cut else len(owners)) for slot in range(2 * count)]
            held = {each.dtype.to_real() for each in gradients}
            is_other, *told = self._sums([owners != self._known, *(each in held for each in _DTYPES), *sizes])
            if not is_other:
                break
            self._exchange(owners)
        kinds, sizes = told[: len(_DTYPES)], told[len(_DTYPES) :]
        every = torch.zeros(sum(sizes), dtype=torch.float64, device=self._inner.device)
        for slot, norms in self._norms(gradients, slots, is_cut=is_cut).items():
            every[sum(sizes[:slot]) : sum(sizes[: slot + 1])] = norms
        torch.distributed.all_reduce(every, group=self._group)  # each place has one number and zeros: the sum is exact
        dtypes = [each for each, number in zip(_DTYPES, kinds, strict=True) if number]
        counted, copies = every[: sum(sizes[:count])], every[sum(sizes[:count]) :]
        total: torch.Tensor = torch.linalg.vector_norm(
            counted.to(reduce(torch.promote_types, dtypes or [torch.float32]))
        )
        total += (0 * copies).sum()  # NaN if a copy is not finite
        return total

    def _owners(self, gradients: list[torch.Tensor]) -> Owners:
        first = self._stages[0].stage_index
        found: dict[int, tuple[int, str | None]] = {}
        for stage in self._stages:
            for name, parameter in stage.submod.named_parameters():
                if parameter.grad is not None:  # a weight of several stages of this rank is that of the first
                    found.setdefault(id(parameter.grad), (stage.stage_index, name_in(stage.submod, name)))
        return [found.get(id(each), (first, None)) for each in gradients]

    def _slots(self, owners: Owners, *, is_cut: bool) -> dict[int, list[int]]:
        """Slot -> the places of its gradients. That of a gradient which counts is its stage, or the first of this rank if some are cut; those of copies follow."""
        count, first = self._stages[0].num_stages, self._stages[0].stage_index
        found: dict[int, list[int]] = {}
        for place, owner in enumerate(owners):
            slot = (first if is_cut else owner[0]) + (count if owner in self._copies else 0)
            found.setdefault(slot, []).append(place)
        return found

    def _norms(
        self, gradients: list[torch.Tensor], slots: dict[int, list[int]], *, is_cut: bool
    ) -> dict[int, torch.Tensor]:
        """Slot -> the norm of each of its gradients; one norm for all of them if some are cut."""
        if is_cut:  # in the same order on all ranks that hold parts of them, which communicate
            return {
                slot: self._inner.norm([gradients[each] for each in slots[slot]]).reshape(1) for slot in sorted(slots)
            }
        norms = torch._foreach_norm(gradients) if gradients else []  # noqa: SLF001  # what torch's get_total_norm calls
        return {slot: torch.stack([norms[place] for place in places]) for slot, places in slots.items()}

    def _exchange(self, owners: Owners) -> None:
        """Note which names of this rank an earlier stage has a gradient of, too."""
        mine: dict[int, list[int]] = {}
        for stage, name in owners:
            if name is not None:
                mine.setdefault(stage, []).append(_digest(name))
        sizes = self._sums([len(mine.get(stage, ())) for stage in range(self._stages[0].num_stages)])
        row = [0] * sum(sizes)
        for stage, digests in mine.items():
            row[sum(sizes[:stage]) : sum(sizes[: stage + 1])] = digests
        first: dict[int, int] = {}
        every = iter(self._sums(row))
        for stage, size in enumerate(sizes):
            for _ in range(size):
                first.setdefault(next(every), stage)
        self._known = owners
        self._copies = {(stage, name) for stage, name in owners if name is not None and first[_digest(name)] != stage}

    def _sums(self, numbers: Sequence[int]) -> list[int]:
        row = torch.tensor(numbers, dtype=torch.int64, device=self._inner.device)
        torch.distributed.all_reduce(row, group=self._group)
        found: list[int] = row.tolist()
        return found


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
