"""`CheckpointWeights`: the weights of another run, or of a component of it such as its average, a rank's part at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, final

import torch

from trainfold.backends.formats.detect import detect_format
from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.runs.one_view import chosen_in
from trainfold.backends.stores.local import LocalStore, Run, open_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.checks import count
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointForeign, CheckpointMissing, InvalidState
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.manifest import Manifest, TensorRecord
from trainfold.core.layout.leaf_spec import LeafSpec, leaf_specs
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.resume.compare import saved_ties
from trainfold.core.resume.reads import ComponentReads, TensorRead, tensor_reads
from trainfold.core.resume.request import resume_request
from trainfold.core.state.names.tensor_names import weight_name
from trainfold.core.state.names.wrapper_names import canonical_name, names_alone
from trainfold.core.weights.detected import reader_of
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import Wanted

_BATCH_BYTES: Final = 64 << 20  # read at once, side by side


@final
class CheckpointWeights:
    """The weights in a checkpoint of another run. A rank reads only what it holds, and every byte is checked.

    Args:
        run: a directory, or a store.
        step: an explicit step; None for the newest checkpoint that has the component.
        component: ``"model"``, or a module or a flat dict of tensors that was saved under ``extra``, such as an average of the weights.

    Examples:
        >>> import torch, trainfold
        >>> from trainfold.stores import MemoryStore
        >>> model = torch.nn.Linear(2, 1)
        >>> base = MemoryStore()
        >>> live = trainfold.attach(model)
        >>> _ = trainfold.save(live.capture(), base)
        >>> live = trainfold.attach(torch.nn.Linear(2, 1), weights=CheckpointWeights(base))
        >>> live.take_weights()
        >>> torch.equal(live.capture().model.params["weight"], model.weight)
        True
    """

    def __init__(self, run: Run, *, step: int | None = None, component: str = "model") -> None:
        self._store = open_store(run)
        self._step = None if step is None else count("step", step, least=0, fix="name a saved step")
        self._component = component
        self._chosen: Manifest | None = None
        self._named: tuple[Manifest, list[str | None]] | None = None  # names that were looked for last

    def __repr__(self) -> str:
        return f"CheckpointWeights({self._store.url!r}, step={self._step}, component={self._component!r})"

    @property
    def run(self) -> Store:
        """The other run."""
        return self._store

    @property
    def step(self) -> int | None:
        """The step that was asked for, or is pinned; None for the newest."""
        return self._step

    def pinned(self) -> "CheckpointWeights":
        """The same weights, of the checkpoint that is the newest now.

        Raises:
            CheckpointMissing: as in `supply`.
        """
        return self.known_as(self._manifest())

    def known_as(self, manifest: Manifest) -> "CheckpointWeights":
        """The same weights of a checkpoint whose manifest was read and proved already. It has the component."""
        found = CheckpointWeights(self._store, step=manifest.head.step, component=self._component)
        found._chosen = manifest
        return found

    @property
    def identity(self) -> str:
        """Which checkpoint it is; the same wherever the run lies. Empty if it is not pinned."""
        head = None if self._chosen is None else self._chosen.head
        return (
            ""
            if head is None
            else f"run {head.run_id}, step {head.step}, timeline {head.timeline}, revision {head.revision}"
        )

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of each tensor that this rank holds.

        Raises:
            CheckpointMissing: if there is no whole checkpoint with the component.
            CheckpointDamaged: if bytes are not those that were written.
        """
        manifest = self._manifest()
        table, others = self._table(manifest), self._other_names(manifest)
        names = self._names(manifest, table)
        reader = PlanReader(self._store, f"step-{manifest.head.step:08d}", manifest)
        batch: dict[int, tuple[str, Box | None]] = {}
        total_bytes = 0
        for index, record, name in _each_wanted(table, names, others, wanted):
            each = wanted[name]
            if record.shape != each.shape:
                yield name, torch.empty(record.shape, device="meta")  # it is refused for its shape, and not read
                continue
            if total_bytes >= _BATCH_BYTES or index in batch:
                yield from _read(reader, table, batch)
                batch, total_bytes = {}, 0
            batch[index] = name, None if each.is_whole else each.box
            total_bytes += size_bytes(record.dtype, tuple(stop - start for start, stop in each.box))
        yield from _read(reader, table, batch)

    def specs(self) -> dict[str, LeafSpec]:
        """Name -> dtype and shape of each tensor of the component.

        Raises:
            CheckpointMissing: as in `supply`.
        """
        manifest = self._manifest()
        table, others = self._table(manifest), self._other_names(manifest)
        found = zip(table, self._names(manifest, table), strict=True)
        return leaf_specs(
            {name: each for each, first in found if first is not None for name in (first, *others.get(first, ()))}
        )

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """See `OpenSource`: the checkpoint that is the newest now, or the one that was named.

        Raises:
            CheckpointMissing: as in `supply`.
        """
        manifest = self._manifest()
        table = self._table(manifest)
        directory = f"step-{manifest.head.step:08d}"
        reader = PlanReader(self._store, directory, manifest)
        index_of = {name: index for index, name in enumerate(self._names(manifest, table)) if name is not None}

        def planned(name: str, box: Box) -> dict[int, TensorRead]:
            index = index_of[name]
            return tensor_reads(table, {index: (name, None if box == whole_box(table[index].shape) else box)})

        def read(name: str, box: Box) -> torch.Tensor:
            return reader.read(ComponentReads({}, planned(name, box)), {})[index_of[name]]

        def read_into(name: str, box: Box, memory: torch.Tensor) -> None:
            reader.read_into([(planned(name, box)[index_of[name]], memory)])

        yield OpenWeights(
            leaf_specs({name: table[index] for name, index in index_of.items()}),
            read,
            identity=digest_of(
                "\n".join(f"{each.path} {shard.digest}" for each in table for shard in each.shards).encode()
            ),
            ties=_ties(manifest, self._component),
            read_into=read_into,
            buffers=frozenset(name for name, index in index_of.items() if ".buffers[" in table[index].path),
        )

    def _manifest(self) -> Manifest:
        if self._chosen is not None:
            return self._chosen
        request = resume_request(step=self._step, components=[self._component])
        chosen = chosen_in(self._store, request, [self._component])
        if not isinstance(chosen, Manifest):
            if chosen[0].error == "CheckpointForeign":
                where, found = chosen[0].where, chosen[0].found
                raise CheckpointForeign(where, expected="a run of trainfold", found=found, fix=self._fix(where))
            raise CheckpointMissing(
                self._store.url,
                expected=f"a whole checkpoint with {self._component}",
                found="; ".join(map(str, chosen)),
                fix="name another run, step or component",
            )
        return chosen

    def _other_names(self, manifest: Manifest) -> dict[str, list[str]]:
        """First name -> the other names of a tied tensor."""
        others: dict[str, list[str]] = {}
        for alias, first in _ties(manifest, self._component).items():
            others.setdefault(first, []).append(alias)
        return others

    def _names(self, manifest: Manifest, table: Sequence[TensorRecord]) -> list[str | None]:
        """The first name of each tensor; None for one that is not at the top of the component.

        A module has the names that it was saved under. A flat dict has no classes that say what wraps: it has the names of the model in the same checkpoint where those
        differ by nothing else than what may be the prefixes of wrappers, and names without these where the model has no such name. In a checkpoint without a model they are
        those of `names_alone`.

        Raises:
            InvalidState: if two tensors of a flat dict, or of the model, are one of its names without the prefixes.
        """
        if self._named is None or self._named[0] is not manifest:
            self._named = manifest, self._names_of(manifest, table)
        return self._named[1]

    def _names_of(self, manifest: Manifest, table: Sequence[TensorRecord]) -> list[str | None]:
        names = [weight_name(each.path) for each in table]
        flat = f"{self._component}["
        are_flat = [each.path.startswith(flat) for each in table]
        if not any(are_flat):
            return names  # nearly always
        model = manifest.component("model")
        named = (weight_name(each.path) for each in (() if model is None else model.tensors[0]))
        known = {name for name in named if name is not None}
        known.update(_ties(manifest, "model"))
        full: dict[str, list[str]] = {}
        for name in sorted(known):
            full.setdefault(canonical_name(name), []).append(name)
        path_of: dict[str, str] = {}
        alone = None if known else names_alone([name for name in names if name is not None])

        def of_flat(name: str, path: str) -> str:
            short = canonical_name(name) if alone is None else alone[name]
            first, *others = [name] if name in known else full.get(short, [short])
            if path_of.setdefault(first, path) != path or others:
                found = (
                    f"{path}, of which the model has {first} and {others[0]}"
                    if others
                    else f"{path_of[first]} and {path}"
                )
                raise InvalidState(
                    f"{self._store.url}: {self._component}", expected="one tensor for each name", found=f"{found}, which are {short} without the prefixes of wrappers",
                    fix="save the module itself under extra, in place of its state_dict()")  # fmt: skip
            return first

        return [of_flat(name, each.path) if name is not None and is_flat else name for name, is_flat, each in zip(names, are_flat, table, strict=True)]  # fmt: skip

    def _fix(self, where: str) -> str:
        """What reads the place instead."""
        found = detect_format(where) if isinstance(self._store, LocalStore) else None
        return f"use {reader_of(found)}" if found is not None and reader_of(found) else "name another run"

    def _table(self, manifest: Manifest) -> tuple[TensorRecord, ...]:
        found = manifest.component(self._component)
        if found is not None and len(found.nodes) == 1:
            return tuple(found.tensors[0])
        names = ", ".join(each.name for each in manifest.components)
        raise InvalidState(
            f"{self._store.url}/step-{manifest.head.step:08d}: {self._component}",
            expected="a component that all ranks have in common",
            found=f"one with {names}" if found is None else "one that each rank has of its own",
            fix="name another step or component",
        )


def _each_wanted(
    table: Sequence[TensorRecord],
    names: Sequence[str | None],
    others: Mapping[str, Sequence[str]],
    wanted: Mapping[str, Wanted],
) -> Iterator[tuple[int, TensorRecord, str]]:
    """Each tensor that is wanted, with its name; once for each of its names that are tensors of their own where it is wanted."""
    for index, (record, first) in enumerate(zip(table, names, strict=True)):
        mine = [] if first is None else [name for name in (first, *others.get(first, ())) if name in wanted]
        for name in {wanted[name].tied_to or name: name for name in reversed(mine)}.values():
            yield index, record, name


def _ties(manifest: Manifest, component: str) -> dict[str, str]:
    """Other name -> first name of each tied tensor, as the component was saved."""
    found = manifest.component(component)
    pairs = [] if found is None else saved_ties(found.nodes[0])
    return dict(pairs)


def _read(
    reader: PlanReader, table: Sequence[TensorRecord], batch: Mapping[int, tuple[str, Box | None]]
) -> Iterator[tuple[str, torch.Tensor]]:
    found = reader.read(ComponentReads({}, tensor_reads(table, batch)), {})
    for index in list(found):
        yield batch[index][0], found.pop(index)
