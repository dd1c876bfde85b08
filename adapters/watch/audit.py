"""`Audit`: finds state of a live run that changes with training and that no component saves (W07)."""

import logging
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any, final

import torch

from trainfold.adapters.components.component import Stateful
from trainfold.adapters.draws.feed import generators_of
from trainfold.adapters.loaders.choose import loaders_by_path
from trainfold.adapters.watch.facts import Look, lists_in, path_of, text_of, token_of_rows, token_of_value, values_in
from trainfold.core.errors import HiddenState, HiddenStateRefused, InvalidArgument
from trainfold.core.json_values import shown
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
from trainfold.core.state.components import BUILTIN_COMPONENTS, select
from trainfold.core.state.fqn import named_tensors
from trainfold.core.state.state import Opaque, OptimizerState, OwnOptimizerState, TrainState

_LOG = logging.getLogger("trainfold")


@final
class Audit:
    """Looks at the attached objects when they are attached and when the run is saved, and names what has changed.

    It looks after the first step for what that has made, at the first save after a training step, and then at the 2nd, 4th, 8th ... of
    them, so that a long run pays nothing and what begins to change later is found as well. Where something has appeared, the next save
    is looked at too. At other boundaries it does nothing but note the mode of the model.

    Args:
        attached: component -> object: the model, the optimizer, the schedulers, whatever is under ``extra``.
        loader: or several by name, or None.
        accepted: attributes that need not be saved.
        is_strict: whether to refuse a save in place of a warning.
    """

    def __init__(self, attached: Mapping[str, Any], loader: Any, *, accepted: Collection[str], is_strict: bool) -> None:
        self._attached = dict(attached)
        self._loaders = loaders_by_path(loader)
        self._accepted = _names_given(accepted)
        self._is_strict = is_strict
        self._named: dict[str, str] = {}
        self._saves, self._next = 0, 1
        self._step = 0
        self._again = False  # whether the next save is looked at as well
        self._is_new = True  # no step since the attach, or since a restore
        self._said: frozenset[str] = frozenset()  # what a resume has named already
        self._modes: dict[str, bool] | None = None  # of each submodule, at the first step
        self._mode = False  # of the model, at the last step
        self._before = self._look()

    @property
    def unsaved(self) -> dict[str, str]:
        """Attribute -> what it holds, of all that was found so far, for the manifest."""
        return listed(self._named)

    def begin_anew(self, step: int, said: Collection[str] = ()) -> None:
        """A state was restored: what changed by that has not changed by training.

        Args:
            step: the run's.
            said: the attributes that the state lists as unsaved, which the resume has named with their cures.
        """
        self._step = step
        self._is_new = True
        self._said = frozenset(said)
        self._before = self._look()
        self._modes = None

    def attach(self, name: str, target: Any) -> None:
        """One more object."""
        self._attached[name] = target
        self._before = {**self._look(), **self._before}

    def stepped(self) -> None:
        """Note, after a step, whether the model trains."""
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
        """Look, if it is time to, at a run that is being saved.

        Args:
            state: what is saved.
            step: the run's.
            chosen: the components that are saved; None for all. What is left out on purpose is not named.

        Raises:
            HiddenStateRefused: where the run was attached with ``strict=True``: at this save and at each one after it.
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
        unheard = {path: what for path, what in new.items() if path not in self._said}
        if unheard and not self._is_strict:
            _say(hidden_state_text(unheard, step=step))

    def _look(self) -> dict[str, Fact]:
        return self._looked().facts

    def _looked(self) -> Look:
        """What can be known of the objects without a state of the run."""
        roots = {name: each for name, each in self._attached.items() if each is not None}
        modules = {name: each for name, each in roots.items() if isinstance(each, torch.nn.Module)}
        known: dict[int, Any] = {id(each): each for each in roots.values()}
        addresses: set[int] = set()
        for module in modules.values():
            known |= {id(each): each for each in module.modules()}
            named = named_tensors(module)
            for value in (*named.params.values(), *named.buffers.values()):
                known[id(value)] = value
                addresses |= _address(value)
        known |= {id(each): each for loader in self._loaders.values() for each in generators_of(loader).values()}
        look = Look(known, addresses)
        for name, module in modules.items():
            look.module(name, module)
        for name, each in roots.items():
            if name not in modules and not _says_all(each):
                look.holder(name, each)
        for path, loader in self._loaders.items():
            look.loader(loader, path)
        return look

    def _modes_now(self) -> dict[str, bool]:
        return {
            path_of(name, path): each.training
            for name, root in self._attached.items()
            if isinstance(root, torch.nn.Module)
            for path, each in root.named_modules()
        }

    def _changed_modes(self) -> dict[str, Fact]:
        """Submodules in another mode than at the first step, where the model itself is in the mode of then."""
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
    """What the components of a state hold that is small, to recognise it elsewhere."""

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
                    self._named.add((key.strip("_"), text_of(value)))
                    if name != "dataset":  # the numbers of a position are ours
                        self._values.setdefault(name, set()).add(text_of(value))
                    if not isinstance(held, dict) or name.endswith(("_extra_state", "_own_state")):
                        self._free.add(text_of(value))
            for key, rows in lists_in(held):
                self._lengths.add((key.strip("_"), str(len(rows))))
                self._tokens.add(token_of_rows(rows) or "")

    def has(self, path: str, fact: Fact, token: str | None) -> bool:
        """Whether what is at a path is saved: the same bits of a tensor or a generator; a number under its name, or by its object."""
        if fact.kind not in (NUMBER, TEXT, LENGTH):
            return token in self._tokens
        root, name = path.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0], path.rpartition(".")[2].split("[")[0]
        if fact.kind == LENGTH:
            return (name.strip("_"), fact.value) in self._lengths
        known = (name.strip("_"), fact.value) in self._named or fact.value in self._values.get(root, ())
        return known or fact.value in self._free


def _known(chosen: Collection[str], state: TrainState) -> list[str]:
    """Those of the chosen components that a state may have."""
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
            fix="list them as the warning names them, as in ['model.history']",
        )
    return tuple(accepted)


def _bare(part: Any) -> Any:
    """A captured component without our own nodes."""
    if isinstance(part, Opaque):
        return _bare(part.value)
    if isinstance(part, OptimizerState):
        return {"groups": [dict(group.hyper) for group in part.groups]}  # its slots are those of parameters
    if isinstance(part, OwnOptimizerState):
        parts = {"base": part.base, "own": part.own, "loose": part.loose, "attributes": part.attributes}
        return {**_bare(parts), "held": _bare(dict(part.held))}
    if isinstance(part, dict):
        return {key: _bare(child) for key, child in part.items()}
    return [_bare(child) for child in part] if type(part) is list else part


def _says_all(target: Any) -> bool:
    """Whether the state of an object is torch's business, or its insides are not known."""
    if isinstance(target, torch.optim.Optimizer):
        return False
    method = getattr(type(target), "state_dict", None)
    is_torchs = (getattr(method, "__module__", None) or "").startswith("torch.")
    return isinstance(target, tuple) or is_torchs or not isinstance(target, Stateful)


def _address(value: torch.Tensor) -> set[int]:
    try:
        return {value.untyped_storage().data_ptr()} - {0}
    except (RuntimeError, NotImplementedError):  # without memory of its own
        return set()


def _say(text: str) -> None:
    """Warn; a log has the names too, where a program keeps one: without one, Python would print both to the terminal."""
    warnings.warn(text, HiddenState, stacklevel=_stacklevel())
    if _LOG.hasHandlers():
        lines = [each.strip() for each in text.splitlines() if each.startswith("  ")]
        _LOG.warning("state that no component saves: %s", "; ".join(lines))


def _stacklevel() -> int:
    """How far out the user's call is."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 (the way to the caller's frame)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("trainfold.", "contextlib")):
        level, frame = level + 1, frame.f_back
    return level
