"""`ReplicaRow`: what a rank has alike with other ranks at one step, as whole numbers; what the rows of all ranks say; and which ranks are in the minority."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import attrs

from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.errors import RanksDisagree
from trainfold.core.json_values import canonical_json

_PAIRS: Final = 24  # of a name and a digest; more names share the last pair
_PENDING, _DONE, _TORN = range(3)
_HEX: Final = 15  # digits of a digest that fit a number below 2**63

Digests = Mapping[str, Mapping[str, str]]
"""Name -> leaf path -> digest; ranks that hold other leaves, or other parts, have other names."""


@final
@attrs.frozen
class ReplicaRow:
    """What a rank knows of a check of replicas that is under way.

    Attributes:
        step: whose values are compared.
        digests: of the leaves; None while they are computed.
        is_torn: whether they cannot be known, because something wrote to a leaf before it was read.
    """

    step: int
    digests: Digests | None = None
    is_torn: bool = False

    def numbers(self) -> tuple[int, ...]:
        """The row of this rank; as many numbers on every rank.

        Examples:
            >>> agreed_rows([ReplicaRow(7, {"model": {"w": digest}}).numbers() for digest in "aab"]).doubtful == {*numbered(["model"])}
            True
        """
        state = _TORN if self.is_torn else _PENDING if self.digests is None else _DONE
        found: list[int] = []
        digests = self.digests or {}
        for number, names in numbered(digests).items():
            found += [number, _number([text for name in names for pair in digests[name].items() for text in pair])]
        return (self.step, state, *found, *[0] * (2 * _PAIRS - len(found)))


@final
@attrs.frozen
class AgreedRows:
    """What the rows of all ranks say, the same on each.

    Attributes:
        is_over: whether all ranks have their digests, or one of them cannot have them.
        is_torn: whether one of them cannot.
        doubtful: the numbers, from `numbered`, of what differs between ranks that have it.
    """

    is_over: bool
    is_torn: bool = False
    doubtful: frozenset[int] = frozenset()


def agreed_rows(rows: Sequence[tuple[int, ...]]) -> AgreedRows:
    """What all ranks act on.

    Args:
        rows: `ReplicaRow.numbers` of each rank.

    Raises:
        RanksDisagree: if the ranks compare different steps.

    Examples:
        >>> agreed_rows([ReplicaRow(7, {}).numbers(), ReplicaRow(7).numbers()])
        AgreedRows(is_over=False, is_torn=False, doubtful=frozenset())
    """
    steps, states = [row[0] for row in rows], {row[1] for row in rows}
    if len(set(steps)) > 1:
        raise RanksDisagree("the step", expected="the same on every rank", found=f"{steps}, by rank",
                            fix="call the manager at the same boundaries on every rank")  # fmt: skip
    if _PENDING in states:
        return AgreedRows(is_over=False)
    if _TORN in states:
        return AgreedRows(is_over=True, is_torn=True)
    found: dict[int, set[int]] = {}
    for row in rows:
        for number, digest in zip(row[2::2], row[3::2], strict=True):
            found.setdefault(number, set()).add(digest)
    return AgreedRows(is_over=True, doubtful=frozenset(number for number, each in found.items() if len(each) > 1))


def numbered(names: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """The number that stands for each name in a row; one for all names that have no place of their own.

    Examples:
        >>> [names for _, names in numbered(["model", "optimizer"]).items()]
        [('model',), ('optimizer',)]
    """
    known = sorted(names)
    groups = [(name,) for name in known[: _PAIRS - 1]] + ([tuple(known[_PAIRS - 1 :])] if len(known) >= _PAIRS else [])
    return {_number([*each]): each for each in groups}


def differing_leaves(ranks: Sequence[Digests]) -> dict[tuple[str, str], dict[int, str]]:
    """The leaves, by name and path, that ranks which hold them have otherwise: rank -> digest, in the order of the first rank that has one.

    Args:
        ranks: what each rank has.

    Examples:
        >>> differing_leaves([{"model": {"v": "a", "w": "a"}}, {"model": {"v": "a", "w": "b"}}, {}])
        {('model', 'w'): {0: 'a', 1: 'b'}}
    """
    found: dict[tuple[str, str], dict[int, str]] = {}
    for rank, each in enumerate(ranks):
        for name, leaves in each.items():
            for path, digest in leaves.items():
                found.setdefault((name, path), {})[rank] = digest
    return {leaf: held for leaf, held in found.items() if len(set(held.values())) > 1}


def minority(held: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that have a leaf otherwise than the largest group of ranks; no rank if two groups are the largest.

    Args:
        held: rank -> digest.

    Examples:
        >>> minority({0: "a", 1: "b", 2: "a"}), minority({0: "a", 1: "b"}), minority({0: "a", 1: "b", 2: "c", 3: "a"})
        ((1,), (), (1, 2))
    """
    (most, count), *others = Counter(held.values()).most_common()
    if any(each == count for _, each in others):
        return ()
    return tuple(rank for rank, digest in held.items() if digest != most)


def drift_error(
    drifted: Mapping[tuple[str, str], Mapping[int, str]], *, step: int, equal_at: int | None
) -> RanksDisagree:
    """The error for replicas that have drifted apart.

    Args:
        drifted: from `differing_leaves`; the first leaf is named.
        step: whose values were compared.
        equal_at: the last step whose values were found equal; None if there is not one.

    Examples:
        >>> print(drift_error({("model", "w"): {0: "a", 1: "b", 2: "a"}}, step=200, equal_at=100).found)
        other bits on rank 1 than on ranks 0 and 2
    """
    (_, path), held = next(iter(drifted.items()))
    odd = minority(held)
    others = [rank for rank in held if rank not in odd]
    if odd:
        found, suspects = f"other bits on {_ranks(odd)} than on {_ranks(others)}", f"memory and device of {_ranks(odd)}"
    else:
        groups = [[rank for rank in held if held[rank] == each] for each in dict.fromkeys(held.values())]
        found = f"other bits on {' than on '.join(map(_ranks, groups))}, and no majority that says which are damaged"
        suspects = "memory and devices of these ranks"
    more = f", and {len(drifted) - 1} more leaves differ" if len(drifted) > 1 else ""
    trusted = "that was saved before this run began" if equal_at is None else f"of step {equal_at} or before"
    return RanksDisagree(
        path,
        expected=f"the same bits at step {step} on {_ranks(list(held))}",
        found=f"{found}{more}",
        fix=f"end this run, check the {suspects}, and resume from a checkpoint {trusted}: manager.restore(live, step=...). If it comes back on "
        "any machine, the ranks are trained differently: look for gradients that are not summed, or declare what differs on purpose: "
        "attach(..., sharing={'name': 'each_rank'})",
    )


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _number(parts: Sequence[str]) -> int:
    """Never 0, which stands for nothing."""
    return 1 + int(digest_of(canonical_json([*parts])).removeprefix(DIGEST_PREFIX)[:_HEX], 16)
