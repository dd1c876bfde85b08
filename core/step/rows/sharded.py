"""`Sharded`: the parallelism of a pure step whose state is cut by rows over the ranks, as ``fully_shard`` (FSDP2) cuts a model."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TypeVar, cast, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.parallelism import Coordinates
from trainfold.core.layout.placement import Placement, make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.layout.world import Collectives, Exchanges
from trainfold.core.state.state import TrainState
from trainfold.core.step.rows.exchange_rows import gather_rows, sum_rows
from trainfold.core.step.rows.parts import cut_whole, held_rows, rows_of
from trainfold.core.tensor_memory import tensor_bytes

S = TypeVar("S", bound=TrainState)


@final
@attrs.frozen(eq=False)
class Sharded:
    """Every rank holds its rows of each parameter and slot, and has its own share of the data.

    A step gathers the parameters at its start, sums the gradients over the ranks at its boundary, in rank order, and updates this rank's rows.

    Laws:
        - ``ranks.whole(ranks.cut(state)) == state``, bit for bit.
        - Without clipping, a step has the bits of the same step with `Replicas`, on any number of ranks; not with a fused optimizer, which rounds
          the last elements of a tensor otherwise.
        - On two ranks, it has the bits of an attached loop whose model ``fully_shard`` has cut, with clipping too.

    Args:
        collectives: the ranks; they have `exchange` too, as those of trainfold do.

    Examples:
        >>> from trainfold import init_state, optimizer
        >>> from trainfold.ranks import run_threads
        >>> state = init_state(torch.nn.Linear(2, 5), optimizer(torch.optim.SGD, lr=0.1))
        >>> def rows(collectives):
        ...     return Sharded(collectives).cut(state).model.params["weight"].box
        >>> run_threads(2, rows)
        [((0, 3), (0, 2)), ((3, 5), (0, 2))]
    """

    collectives: Collectives

    def __attrs_post_init__(self) -> None:
        """Refuse ranks that cannot exchange parts."""
        if self.collectives.world_size > 1 and not isinstance(self.collectives, Exchanges):
            raise InvalidArgument(
                "Sharded.collectives",
                expected="collectives with a method exchange, by which ranks gather parts",
                found=type(self.collectives).__name__,
                fix="pass trainfold.TorchCollectives()",
            )

    @property
    def coordinates(self) -> Coordinates:
        """Each rank has a share of the data."""
        return self._replicas.coordinates

    @property
    def gradient_divisor(self) -> None:
        """None: a backward does not communicate."""
        return

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        """Do nothing."""
        return self._replicas.gradient_sync(enabled=enabled)

    def all_sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over the ranks, added in rank order."""
        return self._replicas.all_sum(tensors)

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of whole gradients, as that of `Replicas`; `norm_of_parts` is that of a step."""
        return self._replicas.norm(gradients)

    def norm_of_parts(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of gradients of which each rank has its rows: the norm of the norms of all gradients.

        The operations, and on two ranks the bits, are those of ``torch.nn.utils.get_total_norm`` of DTensors. A gradient without dimensions is
        whole on each rank, and counts once.
        """
        if not gradients:
            return torch.zeros(())
        squares = torch.stack(torch._foreach_norm(gradients)) ** 2  # noqa: SLF001 (torch has no public name for it)
        if self.collectives.rank:
            squares[[place for place, each in enumerate(gradients) if not each.dim()]] = 0.0
        total: torch.Tensor = torch.linalg.vector_norm(self.all_sum([squares])[0] ** 0.5)
        return total

    def local(self, leaf: Any) -> torch.Tensor:
        """The rows in a part; any other tensor itself."""
        found: torch.Tensor = leaf.tensor if isinstance(leaf, Shard) else leaf
        return found

    def fail(self, error: BaseException) -> None:
        """Make every other rank raise `RankFailed`."""
        self._replicas.fail(error)

    def cut(self, state: S) -> S:
        """Return a state of which this rank holds its rows. On one rank it is the state itself.

        Parameters, and slots of the same shape, are cut in their first dimension, in equal parts of which the last may be shorter and later ones
        empty. Buffers, counters and what lies under ``extra`` stay whole.

        Args:
            state: of whole tensors, the same on every rank. It is not changed, and shares no memory with the parts. Every rank calls.

        Raises:
            InvalidState: if the state has parts already, fp32 masters, or an optimizer state of a user's own.
            RanksDisagree: naming the first tensor that is not the same on every rank, as in a model that was made without a seed.
        """
        if self._is_alone:
            return state
        cut = cut_whole(state, self.part, self.box)
        self._check_alike(state)
        return cut

    def whole(self, state: S) -> S:
        """Return the state of whole tensors, such as for an evaluation or an export; every rank calls, and gets all of it.

        Args:
            state: of parts, also those under ``extra``.

        Raises:
            InvalidState: naming the first leaf that is not this rank's part.
            RanksDisagree: if the ranks have other parameters or another step.
        """
        if self._is_alone:
            return state
        rows_of(state, self.box)
        for path, leaf in tree.named_leaves(state.extra, "state.extra"):
            if isinstance(leaf, Shard):
                held_rows(leaf, path, self.box)
        found, structure = tree.flatten((state.model, state.optimizer, state.extra))
        parts = {str(place): leaf for place, leaf in enumerate(found) if isinstance(leaf, Shard)}
        gathered = self.gathered(
            {place: leaf.tensor for place, leaf in parts.items()},
            {place: leaf.shape for place, leaf in parts.items()},
            doing="gather the state" if state.trainer is None else f"gather the state of step {state.trainer.step}",
        )
        leaves = [gathered.get(str(place), leaf) for place, leaf in enumerate(found)]
        model, optimizer, extra = tree.unflatten(structure, leaves)
        return cast("S", state.evolve(model=model, optimizer=optimizer, extra=extra))

    def box(self, shape: tuple[int, ...]) -> Box:
        """The rows of a tensor that this rank holds; all of one without dimensions."""
        return _by_rows(self.collectives.world_size).box(shape, (self.collectives.rank,)) if shape else ()

    def part(self, rows: torch.Tensor, shape: tuple[int, ...]) -> Any:
        """Return this rank's rows as a part of a tensor of this shape; the rows themselves on one rank, or without dimensions."""
        if self._is_alone or not shape:
            return rows
        starts = tuple(start for start, _ in self.box(shape))
        return Shard(rows, shape, starts, placement=_by_rows(self.collectives.world_size))

    def gathered(
        self, rows: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], *, doing: str
    ) -> dict[str, torch.Tensor]:
        """Return whole tensors; those without dimensions are taken from this rank.

        Args:
            rows: name -> this rank's rows; the same names in the same order on every rank.
            shapes: name -> the shape of the whole.
            doing: what each rank does, for the error if one does not, or has other tensors.

        Raises:
            RanksDisagree: if a rank has other names, shapes or dtypes, or does something else.
        """
        assert isinstance(self.collectives, Exchanges)
        here, rule = self.coordinates.data, _by_rows(self.collectives.world_size)
        return gather_rows(rows, shapes, self.collectives, here=here, rule=rule, doing=doing)

    def summed_rows(self, grads: dict[str, torch.Tensor], *, doing: str) -> dict[str, torch.Tensor]:
        """Return this rank's rows of sums over the ranks, added in rank order; the whole sum of a tensor without dimensions.

        Args:
            grads: name -> this rank's tensor, whole; the same names in the same order on every rank. They are taken out, so that their memory can go.
            doing: what each rank does, for the error if one does not, or has other tensors.

        Raises:
            RanksDisagree: if a rank has other names, shapes or dtypes, or does something else.
        """
        assert isinstance(self.collectives, Exchanges)
        here, rule = self.coordinates.data, _by_rows(self.collectives.world_size)
        single = {name: each for name, each in grads.items() if not each.dim()}
        sums = dict(zip(single, self.all_sum(list(single.values())) if single else (), strict=True))
        return sums | sum_rows(grads, self.collectives, here=here, rule=rule, doing=doing)

    def _check_alike(self, state: TrainState) -> None:
        """Compare whole states before each rank keeps its rows: afterwards no rank could see a difference."""
        named = [*tree.named_leaves(state.model, "state.model"), *tree.named_leaves(state.optimizer, "state.optimizer")]
        mine = {path: digest_of(tensor_bytes(leaf.detach())) for path, leaf in named if isinstance(leaf, torch.Tensor)}
        of_each = self.collectives.gather(mine, doing="cut its state")
        for rank, theirs in enumerate(of_each):
            odd = next((path for path in {**of_each[0], **theirs} if theirs.get(path) != of_each[0].get(path)), None)
            if odd is not None:
                raise RanksDisagree(
                    odd,
                    expected="the same values on every rank, of which each keeps its rows",
                    found=f"other values on rank {rank} than on rank 0",
                    fix="call torch.manual_seed with the same number on every rank before the model is made, or load a state",
                )

    @property
    def _replicas(self) -> Replicas:
        return Replicas(self.collectives)

    @property
    def _is_alone(self) -> bool:
        return self.collectives.world_size == 1


@lru_cache(maxsize=64)
def _by_rows(world_size: int) -> Placement:
    return make_placement(make_mesh((world_size,)), [[0]])
