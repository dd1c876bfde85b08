"""`reading_rank_zero`: rank 0 reads the weights of a state that ranks hold in parts, a tensor at a time; the other ranks send it theirs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeVar, final

import torch

from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.alike.stages import check_several
from trainfold.backends.weights.opened import unchanged
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.codec import as_tensor, torch_dtype
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import by_rule, described_by, outline_of
from trainfold.core.format.structure.unite import unite
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, intersect, row_blocks, volume, whole_box
from trainfold.core.layout.stage import Stage, ranks_by_stage
from trainfold.core.layout.world import Collectives, Exchanges, World
from trainfold.core.resume.compare import saved_ties
from trainfold.core.save.replicas import first_disagreement, is_same, structures_differ
from trainfold.core.state.names.tensor_names import weight_name
from trainfold.core.state.state import TrainState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.holders import Holders
from trainfold.core.weights.open_weights import OpenWeights

T = TypeVar("T")
Part = tuple[str, Box]
"""A name, and a (start, stop) pair for each dimension."""

ROUND_BYTES: Final = 16 << 20  # what comes to rank 0 at once
_MODEL: Final = "model"
_ASK: Final = "ask for weights of other ranks"
_DESCRIBE: Final = "describe its weights"
_GIVE: Final = "give weights to rank 0"


def reading_rank_zero(world: Collectives, state: TrainState, action: Callable[[OpenWeights], T], *, doing: str) -> T:
    """Run an action on rank 0, with the weights of all ranks, and return its result on every rank. All ranks call.

    Memory: what the action keeps and, on each rank, a few times `ROUND_BYTES`; on rank 0 also the part that it reads.

    Args:
        world: the ranks.
        state: of this rank, with a model: the parts that it holds, or the stages of a pipeline.
        action: reads what it needs, on rank 0, and checks at its end. No rank leaves before it ends.
        doing: what it does, in words.

    Raises:
        Exception: on the rank that fails, its error; on the others it is `RankFailed`.
        InvalidArgument: for a state without a model, and for one rank of several that calls alone.
        InvalidState: if the ranks have not each tensor once.
        RanksDisagree: if stages do not make one model.
    """
    ranks, found = _Ranks(world, state), list[T]()
    failure: Exception | None = None
    if world.rank:
        ranks.serve()
    else:
        try:
            found.append(action(ranks.opened()))
        except Exception as error:
            if ranks.is_broken:  # no rank makes another call
                raise
            failure = error
        ranks.broadcast(None)

    def outcome() -> T:
        if failure is not None:
            raise failure
        return found[0]

    return on_rank_zero(world, outcome, doing=doing)


@final
class _Ranks:
    """The weights of all ranks, as each of them knows them.

    Attributes:
        is_broken: whether a call of the ranks has failed: no rank makes another one.
    """

    def __init__(self, world: Collectives, state: TrainState) -> None:
        self._world = world
        self.is_broken = False
        self._leaves: Mapping[str, Any] = {}
        texts: list[bytes] = []

        def describe_mine() -> tuple[str, Stage | None]:
            mine, self._leaves = _described(world, state)
            texts.append(outline_of(mine))
            return digest_of(texts[0]), state.stage

        told = on_all_ranks(world, describe_mine, doing=_DESCRIBE)
        digests = [digest for digest, _ in told]
        is_first = digests.index(digests[world.rank]) == world.rank
        sent = world.gather(texts[0].decode() if is_first else "", doing=_DESCRIBE)
        known = {digest: described_by(text.encode()) for digest, text in zip(digests, sent, strict=True) if text}
        every = [known[digest] for digest in digests]
        if stages := ranks_by_stage([stage for _, stage in told]):
            united = unite(_MODEL, [(ranks, every[ranks[0]]) for ranks in stages.values()], world.world_size)
            check_several(united.several, {_MODEL: self._leaves}, world)
            every = [united.described] * world.world_size
        self._model = every[0]
        for rank, other in enumerate(every):
            if other is not self._model:
                _check_alike(self._model, other, rank)
        self._holders = Holders(tuple(each.tensors for each in every))
        self._holders.check()
        self._paths = {name: path for path in self._model.tensors if (name := weight_name(path)) is not None}
        self._tensors = {path: _local(leaf, path) for path, leaf in self._leaves.items()}
        self._check_mine = unchanged(state)

    def opened(self) -> OpenWeights:
        """The weights, for rank 0."""
        asking = _Asking(self)
        is_all_here = all(self.is_here(name, whole_box(self.spec(name).shape)) for name in self._paths)
        return OpenWeights(
            {name: self.spec(name) for name in self._paths},
            asking.read,
            read_into=None if is_all_here else asking.read_into,
            ties=dict(saved_ties(self._model.node)),
            buffers=frozenset(name for name, path in self._paths.items() if ".buffers[" in path),
            check=self._check_all,
            expect=asking.expect,
        )

    def serve(self) -> None:
        """Give rank 0 what it asks for, until it has ended."""
        while (asked := self.broadcast(())) is not None:
            if asked:
                self.give(asked)
            else:
                self.check()

    def spec(self, name: str) -> LeafSpec:
        """Of a whole tensor."""
        found = self._model.tensors[self._paths[name]]
        return LeafSpec(found.dtype, found.shape)

    def is_here(self, name: str, box: Box) -> bool:
        """Whether this rank has all of a part itself."""
        path = self._paths[name]
        return not volume(box) or (path in self._leaves and intersect(box, self._held(path)) == box)

    def here(self, name: str, box: Box) -> torch.Tensor:
        """A part that this rank has."""
        path = self._paths[name]
        if not volume(box):
            return torch.empty([stop - start for start, stop in box], dtype=torch_dtype(self.spec(name).dtype))
        return self._tensors[path][_within(self._held(path), box)]

    def _held(self, path: str) -> Box:
        leaf = self._leaves[path]
        return leaf.box if isinstance(leaf, Shard) else whole_box(tuple(leaf.shape))

    def give(self, asked: Sequence[Part], into: Sequence[torch.Tensor] = ()) -> None:
        """A round, in which all ranks take part.

        Args:
            asked: what rank 0 needs.
            into: on rank 0, where it is put, part by part.
        """
        me, world = self._world.rank, self._world
        pieces = [self._holders.parts(self._paths[name], box) for name, box in asked]
        go: list[list[memoryview]] = [[] for _ in range(world.world_size)]
        sizes = [0] * world.world_size
        if not me:
            for (name, _), parts in zip(asked, pieces, strict=True):
                for rank, part in parts:
                    sizes[rank] += self.size_bytes(name, part) if rank else 0

        def prepare() -> None:
            for (name, _), parts in zip(asked, pieces, strict=True):
                go[0].extend(tensor_bytes(self.here(name, part)) for rank, part in parts if me and rank == me)

        assert isinstance(world, Exchanges), "checked when there were parts of other ranks"
        with _Noted(self):
            on_all_ranks(world, prepare, doing=_GIVE)
            come = world.exchange(go, sizes, doing=_GIVE)
        read = [0] * world.world_size
        for (name, box), parts, whole in zip(asked, pieces, into, strict=False):
            for rank, part in parts:
                place = whole[_within(box, part)]
                if not rank:
                    place.copy_(self.here(name, part))
                    continue
                given = (
                    place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                )
                start, read[rank] = read[rank], read[rank] + place.nbytes
                tensor_bytes(given)[:] = come[rank][start : read[rank]]
                if given is not place:
                    place.copy_(given)

    def broadcast(self, asked: Sequence[Part] | None) -> Sequence[Part] | None:
        """What rank 0 asks for; nothing for a look at all tensors, and None at the end."""
        with _Noted(self):
            return self._world.broadcast(asked, doing=_ASK)

    def check(self) -> None:
        """See whether a rank's tensors were written to; all ranks take part.

        Raises:
            InvalidState: on that rank; `RankFailed` on the others.
        """
        with _Noted(self):
            on_all_ranks(self._world, self._check_mine, doing="see whether weights were written to")

    def _check_all(self) -> None:
        self.broadcast(())
        self.check()

    def size_bytes(self, name: str, box: Box) -> int:
        """Of a part."""
        return size_bytes(self.spec(name).dtype, tuple(stop - start for start, stop in box))


@final
class _Asking:
    """What rank 0 reads: from its own memory, or in rounds of all ranks, in which small parts that it needs next come along."""

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks
        self._next: Iterator[Part] = iter(())
        self._ready: dict[Part, list[torch.Tensor]] = {}

    def expect(self, parts: Iterator[Part]) -> None:
        """See `OpenWeights.expect`."""
        self._next = (each for each in parts if not self._ranks.is_here(*each))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `OpenWeights.read`."""
        if self._ranks.is_here(name, box):
            return self._ranks.here(name, box)
        part = name, box
        if part in self._ready or self._ranks.size_bytes(*part) <= ROUND_BYTES:
            return self._small(part)
        found = self._empty(part)
        self._read_large(part, found)
        return found

    def read_into(self, name: str, box: Box, memory: torch.Tensor) -> None:
        """See `OpenWeights.read_into`."""
        if self._ranks.is_here(name, box) or self._ranks.size_bytes(name, box) <= ROUND_BYTES:
            memory.copy_(self.read(name, box))
        else:
            self._read_large((name, box), memory)

    def _small(self, part: Part) -> torch.Tensor:
        """A part that comes in one round, with others that are needed next."""
        if part not in self._ready:
            wanted, room = [part], ROUND_BYTES - self._ranks.size_bytes(*part)
            self._pass(part)
            for each in self._next:
                room -= self._ranks.size_bytes(*each)
                if room < 0:
                    self._next = chain([each], self._next)
                    break
                wanted.append(each)
            found = list(map(self._empty, wanted))
            self._ranks.broadcast(wanted)
            self._ranks.give(wanted, found)
            for each, tensor in zip(wanted, found, strict=True):
                self._ready.setdefault(each, []).append(tensor)
        first, *rest = self._ready.pop(part)
        if rest:  # it is needed twice
            self._ready[part] = rest
        return first

    def _read_large(self, part: Part, memory: torch.Tensor) -> None:
        """A part that comes in several rounds."""
        self._pass(part)
        name, box = part
        for block in row_blocks(box, STORED[self._ranks.spec(name).dtype].itemsize, ROUND_BYTES):
            place = memory[_within(box, block)]
            if self._ranks.is_here(name, block):
                place.copy_(self._ranks.here(name, block))
            else:
                self._ranks.broadcast([(name, block)])
                self._ranks.give([(name, block)], [place])

    def _pass(self, part: Part) -> None:
        """Expect a part no longer, if it is the next one."""
        first = next(self._next, part)
        if first != part:
            self._next = chain([first], self._next)

    def _empty(self, part: Part) -> torch.Tensor:
        name, box = part
        return torch.empty([stop - start for start, stop in box], dtype=torch_dtype(self._ranks.spec(name).dtype))


@final
class _Noted:
    """Notes that a call of the ranks has failed."""

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ranks.is_broken = self._ranks.is_broken or kind is not None


def _described(world: Collectives, state: TrainState) -> tuple[Described, Mapping[str, Any]]:
    """What this rank has, by the rules that cut it, and its leaves.

    Raises:
        InvalidArgument: if there is no model, or other ranks have the rest of it and do not take part.
    """
    if state.model is None:
        raise InvalidArgument("weights", expected="a state with a model", found="one without", fix="pass live.capture() of the run that trains it")  # fmt: skip
    described, leaves = describe(state.model, _MODEL)
    cut = [path for path, each in leaves.items() if isinstance(each, Shard) and each.box != whole_box(each.shape)]
    if (cut or state.stage is not None) and (world.world_size == 1 or not isinstance(world, Exchanges)):
        found = f"the part that this rank has of {weight_name(cut[0])}" if cut else str(state.stage)
        raise InvalidArgument(
            "weights", expected="a whole model, or a call on all ranks that have it", found=found,
            fix="call it on all ranks, with collectives=trainfold.ranks.TorchCollectives(); or save on all ranks, and pass CheckpointWeights(run) on one")  # fmt: skip
    return by_rule(described, World(world.rank, world.world_size), is_spread=state.stage is not None), leaves


def _check_alike(first: Described, other: Described, rank: int) -> None:
    """Raise unless two ranks have the same tensors, however they are cut."""
    mine, theirs = ({path: (spec.dtype, spec.shape) for path, spec in each.tensors.items()} for each in (first, other))
    if mine != theirs or not is_same(first.node, other.node):
        raise structures_differ(*first_disagreement(_MODEL, first, other), rank)


def _within(box: Box, part: Box) -> tuple[slice, ...]:
    """Where a part of a box is in a tensor that has the box alone."""
    return tuple(slice(low - start, high - start) for (start, _), (low, high) in zip(box, part, strict=True))


def _local(leaf: Any, path: str) -> torch.Tensor:
    return as_tensor(leaf.tensor if isinstance(leaf, Shard) else leaf, path).detach()
