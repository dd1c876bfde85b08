"""What the checkpoints and the logs of two runs show about where they part."""

from collections.abc import Mapping

import attrs

from trainfold.adapters.cli.flights.read_run import ReadRun, recorded_environment
from trainfold.adapters.cli.flights.replay_run import first_of_ranks
from trainfold.core.flight.causes.evidence import Evidence, LeafApart
from trainfold.core.flight.causes.known_states import SavedState, of_states
from trainfold.core.flight.causes.known_steps import of_steps, only_rank
from trainfold.core.format.leaf_texts import leaf_texts
from trainfold.core.state.audit import UNSAVED, unsaved_of
from trainfold.core.state.notes import CONVERTED, FROZEN_LIST, LINEAGE, RATES


def evidence_of(runs: tuple[ReadRun, ReadRun]) -> Evidence:
    """What is known of two runs without running them again.

    Args:
        runs: the runs, with their logs as far as they count.
    """
    (mine, theirs), flights = ({*run.saved} for run in runs), (runs[0].flights, runs[1].flights)
    found = first_of_ranks(*flights, after=0)
    known = Evidence()
    if mine and theirs:
        first = _saved(runs[0], min(mine)), _saved(runs[1], min(theirs))
        pairs = ((_saved(runs[0], at), _saved(runs[1], at)) for at in sorted(mine & theirs))
        known = of_states(first, pairs, None if found is None else found[1].step)
        known = attrs.evolve(known, leaves=_sized(runs, known))
    if found is not None:
        known = attrs.evolve(known, difference=found[1], rank=only_rank(flights, *found))
    return of_steps(*flights, known)


def _saved(run: ReadRun, step: int) -> SavedState:
    manifest = run.checkpoint(step).manifest
    environment = recorded_environment(manifest)
    unset = {*environment, CONVERTED, LINEAGE, FROZEN_LIST, UNSAVED, RATES}
    settings = {key: repr(value) for key, value in manifest.contract.items() if key not in unset}
    names = frozenset(each.name for each in manifest.components)
    unsaved = tuple(unsaved_of(manifest.contract))
    noted = manifest.contract.get(RATES)
    rates = (
        {f"first rates of {group}": repr(began) for group, began in noted.items()} if isinstance(noted, Mapping) else {}
    )
    return SavedState(
        step, leaf_texts(manifest), settings, environment, names, manifest.world_size, bool(manifest.omitted), unsaved, rates
    )  # fmt: skip


def _sized(runs: tuple[ReadRun, ReadRun], known: Evidence) -> tuple[LeafApart, ...]:
    """The leaves that differ, the largest difference first; then those whose difference has no size."""
    if known.apart_at is None:
        return ()
    from trainfold.adapters.cli.formats.leaf_values import leaf_distances  # late: it imports torch

    a, b = (run.checkpoint(known.apart_at) for run in runs)
    apart = leaf_distances(a, b, [leaf.path for leaf in known.leaves])
    leaves = (
        LeafApart(path, str(apart[path]), apart[path].differing, apart[path].max_abs, apart[path].max_ulps)
        if path in apart
        else LeafApart(path, text)
        for path, text in ((leaf.path, leaf.text) for leaf in known.leaves)
    )
    return tuple(sorted(leaves, key=lambda leaf: (leaf.differing is None, -(leaf.size or 0.0), leaf.path)))
