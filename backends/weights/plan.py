"""`planned`: which source each tensor of a model comes from, before anything is read; the ranks agree on it."""

from collections.abc import Mapping
from typing import Final, final

import attrs

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.core.digest import digest_of
from trainfold.core.errors import RanksDisagree
from trainfold.core.json_values import Json
from trainfold.core.layout.slices import whole_box
from trainfold.core.layout.world import Collectives
from trainfold.core.weights.several.cover import Coverage, cover
from trainfold.core.weights.several.lineage import lineage_of, lineage_source
from trainfold.core.weights.several.several_sources import specs_of
from trainfold.core.weights.several.source_text import described, pinned, sources_in
from trainfold.core.weights.source import Wanted, WeightSource

_DOING: Final = "plan to take its weights from outside"


@final
@attrs.frozen
class PlannedWeights:
    """A decision about weights that all ranks have made.

    Attributes:
        source: pinned to the checkpoints that it has now.
        coverage: which source each tensor comes from.
        lineage: the same for checkpoints, as rank 0 calls the sources.
    """

    source: WeightSource
    coverage: Coverage
    lineage: Json

    @property
    def sources(self) -> dict[str, str]:
        """Tensor -> the source that it comes from, the same on all ranks."""
        found = {name: lineage_source(self.lineage, name) for name in self.coverage.sources}
        return {name: source for name, source in found.items() if source is not None}


def planned(
    source: WeightSource, wanted: Mapping[str, Wanted], world: Collectives, *, is_dry: bool = False
) -> PlannedWeights:
    """Decide which source each tensor comes from, for the tensors of all ranks; every rank calls. Nothing is read.

    Args:
        source: of the weights.
        wanted: what this rank wants, which may be a part of the model.
        world: the ranks.
        is_dry: whether a decision with problems is returned, and not raised.

    Raises:
        InvalidState: with every reason why the weights cannot be taken so. On ranks that have none it is `RankFailed`.
        RanksDisagree: if ranks have found other checkpoints of another run, or other tensors.
    """
    whole = _of_all_ranks(wanted, world)
    mine: list[tuple[WeightSource, Coverage]] = []

    def plan() -> tuple[list[str], str, Json]:
        found = pinned(source)
        specs = specs_of(found)
        coverage = cover(specs, whole)
        if not is_dry:
            coverage.check()
        mine.append((found, coverage))
        identities = [identity for each in sources_in(found) if (identity := getattr(each, "identity", ""))]
        texts = [described(each.source, whole=True) for each in specs]
        sources = {name: text for text, use in zip(texts, coverage.uses, strict=True) for name in use.fills}
        return identities, digest_of(repr([each.fills for each in coverage.uses]).encode()), lineage_of(sources)

    every = on_all_ranks(world, plan, doing=_DOING)
    odd = next((rank for rank, each in enumerate(every) if each[:2] != every[0][:2]), None)
    if odd is not None:
        first, other = ("; ".join(each[0]) or "other tensors of a source" for each in (every[0], every[odd]))
        raise RanksDisagree(
            "weights",
            expected="the same weights on every rank",
            found=f"{first} on rank 0, and {other} on rank {odd}",
            fix="name the step: CheckpointWeights(run, step=...), or let rank 0 read for all: trainfold.weights.FirstRank(source, collectives)",
        )
    return PlannedWeights(*mine[0], every[0][2])


def _of_all_ranks(wanted: Mapping[str, Wanted], world: Collectives) -> dict[str, Wanted]:
    """The tensors of the model whole: those of all ranks, of which each may have a stage."""
    forms = {name: (each.dtype, each.shape, each.tied_to) for name, each in wanted.items()}
    if world.world_size > 1:
        digests = world.gather(digest_of(repr(forms).encode()), doing=_DOING)
        if len(set(digests)) > 1:
            every = world.gather(forms, doing=_DOING)
            forms = {name: form for each in every for name, form in each.items()}  # in one order on all ranks
    return {
        name: Wanted(dtype, tuple(shape), whole_box(tuple(shape)), tied) for name, (dtype, shape, tied) in forms.items()
    }
