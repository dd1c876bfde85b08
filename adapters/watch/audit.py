"""`Audit`: finds state of a live run that changes with training and that no component saves."""

import logging
from collections.abc import Collection, Mapping
from typing import Any, final

import torch

from trainfold.adapters.batches.feed import generators_of
from trainfold.adapters.components.component import Stateful
from trainfold.adapters.loaders.choose import loaders_by_path
from trainfold.adapters.sharded.dtensor import local_part, named_shards
from trainfold.adapters.watch.facts import (
    Look,
    lists_in,
    plain_text,
    submodule_path,
    token_of_rows,
    token_of_value,
    values_in,
)
from trainfold.backends.ranks.launcher import log_for_all, warn_for_all
from trainfold.core.component_names import BUILTIN_COMPONENTS
from trainfold.core.errors import HiddenState, HiddenStateRefused, InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.layout.shard import Shard
from trainfold.core.state.audit import (
    LENGTH,
    MODE,
    NUMBER,
    TEXT,
    Fact,
    appeared,
    attributes_of,
    changed,
    component_of,
    hidden_state_text,
    listed,
)
from trainfold.core.state.components import select
from trainfold.core.state.state import OfRankZero, Opaque, OptimizerState, OwnOptimizerState, PerRank, TrainState

_LOG = logging.getLogger("trainfold")


@final
class Audit:
    """Compares the attached objects at the attach and at later saves, and names what has changed.

    After the first step it notes what that step has made. It then looks at the first save after a training step, and at the
    2nd, 4th, 8th ... of these saves, so that a long run pays next to nothing and later changes are found as well. If something
    new has appeared, it also looks at the next save. At other boundaries it only records the mode of the model.

    Args:
        attached: component -> object: the model, the optimizer, the schedulers, everything under ``extra``.
        loader: a loader, several by name, or None.
        accepted: attributes that need not be saved.
        is_strict: whether to refuse the save instead of warning.
    """

    def __init__(self, attached: Mapping[str, Any], loader: Any, *, accepted: Collection[str], is_strict: bool) -> None:
        self._attached = dict(attached)
        self._loaders = loaders_by_path(loader)
        self._accepted = _names_given(accepted)
        self._is_strict = is_strict
        self._named: dict[str, str] = {}
        self._saves, self._next = 0, 1
        self._step = 0
        self._again = False  # whether to look at the next save as well
        self._is_new = True  # no step since the attach, or since a restore
        self._reported: frozenset[str] = frozenset()  # attributes that a resume has named already
        self._modes: dict[str, bool] | None = None  # the mode of each submodule, at the first step
        self._mode = False  # the mode of the model, at the last step
        self._before = self._look()

    @property
    def unsaved(self) -> dict[str, str]:
        """Attribute -> what it holds, for everything found so far; this goes into the manifest."""
        return listed(self._named)

    def restored(self, step: int, reported: Collection[str] = ()) -> None:
        """Start over after a restore: what the restore changed has not changed by training.

        Args:
            step: the step of the run.
            reported: the attributes that the state lists as unsaved; the resume has already named them, with their fixes.
        """
        self._step = step
        self._is_new = True
        self._reported = frozenset(reported)
        self._before = self._look()
        self._modes = None

    def attach(self, name: str, target: Any) -> None:
        """Include one more object."""
        self._attached[name] = target
        self._before = {**self._look(), **self._before}

    def stepped(self) -> None:
        """Record, after a step, whether the model is in training mode."""
        model = self._attached["model"]
        self._mode = model.training
        if self._modes is None:
            self._modes = self._modes_now()
        if self._is_new:
            self._is_new = False
            look = self._looked()
            kept = changed(self._before, look.facts)
            self._before = {**self._before, **{path: fact for path, fact in look.facts.items() if path not in kept}}

    def check(self, state: TrainState, step: int, chosen: Collection[str] | None = None) -> None:
        """Look at a run being saved, if a look is due.

        Args:
            state: the state being saved.
            step: the step of the run.
            chosen: the saved components; None for all. Components left out on purpose are not named.

        Raises:
            HiddenStateRefused: if the run was attached with ``strict=True``, at this save and at each one after it.
        """
        if step > self._step:
            self._step = step
            self._saves += 1
            is_due = self._saves == self._next
            if is_due or self._again:
                self._next *= 2 if is_due else 1
                self._again = is_due
                self._name_new(state if chosen is None else select(state, _known(chosen, state)), step, chosen)
        if self._is_strict and self._named:
            raise HiddenStateRefused(
                "live",
                expected="every state that changes with training in a component (strict=True)",
                found=f"{hidden_state_text(self._named, step=step)}\n",
                fix="save it, or accept it by name; nothing was written",
            )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _name_new(self, state: TrainState, step: int, chosen: Collection[str] | None) -> None:
        look = self._looked()
        found = changed(self._before, look.facts)
        self._again = self._again and bool(appeared(self._before, look.facts))
        self._before = dict(look.facts)
        if found:
            saved = _Saved(state)
            found = {path: each for path, each in found.items() if not saved.has(path, each, look.tokens.get(path))}
        found |= self._changed_modes()
        if chosen is not None:
            found = {path: each for path, each in found.items() if component_of(path) in chosen}
        named = attributes_of(found, accepted=self._accepted)
        new = {path: what for path, what in named.items() if path not in self._named}
        self._named |= new
        unreported = {path: what for path, what in new.items() if path not in self._reported}
        if unreported and not self._is_strict:
            _warn(hidden_state_text(unreported, step=step))

    def _look(self) -> dict[str, Fact]:
        return self._looked().facts

    def _looked(self) -> Look:
        """Look at the objects, without a state of the run."""
        roots = {name: each for name, each in self._attached.items() if each is not None}
        modules = {name: each for name, each in roots.items() if isinstance(each, torch.nn.Module)}
        known: dict[int, Any] = {id(each): each for each in roots.values()}
        addresses: set[int] = set()
        for module in modules.values():
            known |= {id(each): each for each in module.modules()}
            named = named_shards(module)
            for value in (*named.params.values(), *named.buffers.values()):
                known[id(value)] = value
                addresses |= _address(value)
        known |= {id(each): each for loader in self._loaders.values() for each in generators_of(loader).values()}
        look = Look(known, addresses)
        for name, module in modules.items():
            look.module(name, module)
        for name, each in roots.items():
            if name not in modules and not _is_passed_by(each):
                look.holder(name, each)
        for path, loader in self._loaders.items():
            look.loader(loader, path)
        return look

    def _modes_now(self) -> dict[str, bool]:
        return {
            submodule_path(name, root, path): each.training
            for name, root in self._attached.items()
            if isinstance(root, torch.nn.Module)
            for path, each in root.named_modules()
        }

    def _changed_modes(self) -> dict[str, Fact]:
        """The submodules whose mode differs from the first step, although the root module's mode does not."""
        before, now = self._modes or {}, self._modes_now()
        found: dict[str, Fact] = {}
        if "model" in before and self._mode != before["model"]:
            found["model.training"] = Fact(MODE, str(self._mode))
        for path, mode in now.items():
            root = path.split(".")[0]
            if path != root and before.get(path, mode) != mode and before[root] == now[root]:
                parent = path.rpartition(".")[0]
                if f"{parent}.training" not in found:
                    found[f"{path}.training"] = Fact(MODE, str(mode))
        return found


class _Saved:
    """The small values in the components of a state, to recognise them elsewhere."""

    def __init__(self, state: TrainState) -> None:
        self._tokens: set[str] = set()
        self._named: set[tuple[str, str]] = set()
        self._values: dict[str, set[str]] = {}
        self._free: set[str] = set()
        self._lengths: set[tuple[str, str]] = set()
        parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "dataset": state.dataset, **state.extra}
        for name, part in parts.items():
            held = _bare(part)
            for key, value in values_in(held):
                token = token_of_value(value)
                if token is not None:
                    self._tokens.add(token)
                if isinstance(value, bool | int | float | str):
                    self._named.add((key.strip("_"), plain_text(value)))
                    if name != "dataset":  # trainfold itself makes the numbers of a position
                        self._values.setdefault(name, set()).add(plain_text(value))
                    if not isinstance(held, dict) or name.endswith(("_extra_state", "_own_state")):
                        self._free.add(plain_text(value))
            for key, rows in lists_in(held):
                self._lengths.add((key.strip("_"), str(len(rows))))
                self._tokens.add(token_of_rows(rows) or "")

    def has(self, path: str, fact: Fact, token: str | None) -> bool:
        """Whether the value at a path is saved: a tensor or generator with the same bits, or a number under its name or by its object."""
        if fact.kind not in (NUMBER, TEXT, LENGTH):
            return token in self._tokens
        root, name = path.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0], path.rpartition(".")[2].split("[")[0]
        if fact.kind == LENGTH:
            return (name.strip("_"), fact.value) in self._lengths
        known = (name.strip("_"), fact.value) in self._named or fact.value in self._values.get(root, ())
        return known or fact.value in self._free


def _known(chosen: Collection[str], state: TrainState) -> list[str]:
    """The chosen components that a state can have."""
    return [name for name in chosen if name in BUILTIN_COMPONENTS or name in state.extra]


def _names_given(accepted: object) -> tuple[str, ...]:
    if (
        isinstance(accepted, str)
        or not isinstance(accepted, Collection)
        or not all(isinstance(each, str) for each in accepted)
    ):
        raise InvalidArgument(
            "attach.unsaved",
            expected="names of attributes",
            found=shown(accepted),
            fix="list the names as the warning prints them, such as ['model.history']",
        )
    return tuple(accepted)


def _bare(part: Any) -> Any:
    """A captured component as plain containers, without trainfold's own nodes."""
    if isinstance(part, Opaque | PerRank | OfRankZero):
        return _bare(part.value)
    if isinstance(part, Shard):
        return part.tensor
    if isinstance(part, OptimizerState):
        return {"groups": [dict(group.hyper) for group in part.groups]}  # its slots belong to parameters
    if isinstance(part, OwnOptimizerState):
        parts = {"base": part.base, "own": part.own, "loose": part.loose, "attributes": part.attributes}
        return {**_bare(parts), "held": _bare(dict(part.held))}
    if isinstance(part, dict):
        return {key: _bare(child) for key, child in part.items()}
    return [_bare(child) for child in part] if type(part) is list else part


def _is_passed_by(target: Any) -> bool:
    """Whether the audit does not look into an object: its state is torch's responsibility, or its attributes are unknown."""
    if isinstance(target, torch.optim.Optimizer):
        return False
    method = getattr(type(target), "state_dict", None)
    is_torchs = (getattr(method, "__module__", None) or "").startswith("torch.")
    return isinstance(target, tuple) or is_torchs or not isinstance(target, Stateful)


def _address(value: torch.Tensor) -> set[int]:
    try:
        return {local_part(value).untyped_storage().data_ptr()} - {0}
    except (RuntimeError, NotImplementedError):  # it has no memory
        return set()


def _warn(text: str) -> None:
    """Warn, and log the names if the program has a log. Without one, Python would print both to the terminal."""
    warn_for_all(text, HiddenState)
    if _LOG.hasHandlers():
        lines = [each.strip() for each in text.splitlines() if each.startswith("  ")]
        log_for_all("state that no component saves: %s", "; ".join(lines))
