"""`Offer`: what a source has of the tensors of a model, known from dtypes and shapes alone."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.weights.source import ListedSource, Wanted, WeightSource, listed_by
from trainfold.core.weights.wrapped import Cast, Renamed


@final
@attrs.frozen
class Offer:
    """What a source says that it has.

    Attributes:
        forms: name of the model -> dtype and shape there; None where the source does not list what it has, and is taken at its word.
        others: what it has and the model has not, by the source's names.
        is_listed: whether it lists what it has.
        is_rounded: whether floating tensors come in the dtype of the model, whichever they have.
    """

    forms: Mapping[str, LeafSpec | None]
    others: tuple[str, ...] = ()
    is_listed: bool = True
    is_rounded: bool = False


def offer_of(source: WeightSource, wanted: Mapping[str, Wanted]) -> Offer:
    """Ask a source what it has; nothing is read.

    Args:
        source: of weights. `Cast` and `Renamed` list what the source in them lists.
        wanted: the tensors of the model.

    Raises:
        SourceFailed: for an error of the source's own.

    Examples:
        >>> class Two:
        ...     def specs(self):
        ...         return {"w": LeafSpec("float16", (2,)), "old": LeafSpec("float16", (1,))}
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> offer = offer_of(Cast(Two()), {"w": Wanted("float32", (2,), ((0, 2),))})
        >>> str(offer.forms["w"]), offer.others, offer.is_rounded
        ('float16[2]', ('old',), True)
    """
    if isinstance(source, Cast):
        return attrs.evolve(offer_of(source.source, wanted), is_rounded=True)
    if isinstance(source, Renamed):
        mine, asked = source.asked(wanted)
        found = offer_of(source.source, asked)
        return attrs.evolve(found, forms={mine[name]: each for name, each in found.forms.items()})
    if not isinstance(source, ListedSource):
        return Offer(dict.fromkeys(wanted), is_listed=False)
    has = listed_by(source)
    return Offer(
        {name: has[name] for name in wanted if name in has},
        tuple(name for name in has if name not in wanted),
    )
