"""`BoundOptimizer`: a torch optimizer that works on the tensors of an `OptimizerState`, so that a step need not walk leaves.

It is mutable, and one step at a time uses it. The torch optimizer's ``state[p]`` dicts are the dicts of
``OptimizerState.slots``, and its parameters alias the tensors of the state.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch

from trainfold.core.errors import InvalidState, MastersRebuilt, UnsupportedOptimizer
from trainfold.core.optim.param_groups import check_partition
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.masters import check_masters, is_low_precision, make_masters
from trainfold.core.state.state import OptimizerState, ParamGroup

_ABSENT = object()


@final
class BoundOptimizer:
    """A torch optimizer on given parameters, bound to one `OptimizerState` after another.

    Args:
        kind: the `OptimizerState.kind` that it accepts.
        cls: the torch class.
        hyper: the arguments of its constructor.
        masters: whether low-precision parameters have fp32 masters.
        params: FQN -> parameter. It reads gradients from ``targets`` and writes the parameters.
    """

    def __init__(
        self,
        kind: str,
        cls: type[torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        *,
        masters: bool,
        params: dict[str, torch.nn.Parameter],
    ) -> None:
        self._kind = kind
        self._cls = cls
        self._hyper = dict(hyper)
        self._params = params
        self._with_masters = masters
        self._low = [name for name, value in params.items() if masters and is_low_precision(value)]
        self.targets = dict(params)
        for name in self._low:
            value = params[name]
            empty = torch.empty(0, dtype=torch.float32, device=value.device)
            self.targets[name] = torch.nn.Parameter(empty, requires_grad=value.requires_grad)
        self._names: dict[torch.Tensor, str] = {target: name for name, target in self.targets.items()}
        self._ranks: dict[torch.Tensor, int] = {target: rank for rank, target in enumerate(self.targets.values())}
        self._pairs = [(params[name], self.targets[name]) for name in self._low]
        self._torch: torch.optim.Optimizer | None = None
        self._groups: tuple[ParamGroup, ...] = ()
        self._covered: tuple[tuple[str, ...], ...] | None = None
        self._slots: dict[str, Any] | None = None
        self._masters: dict[str, torch.Tensor] | None = None
        self._order: list[str] = []

    def holds(self, state: OptimizerState) -> bool:
        """Whether the state is the last one collected, so that it is bound already."""
        if self._slots is None or state.kind != self._kind:
            return False
        masters = None if state.masters is None else state.masters.alive()
        same_tensors = state.slots.alive() is self._slots and masters is self._masters
        return same_tensors and self._fits(state.groups)

    def bind(self, state: OptimizerState) -> None:
        """Bind the tensors of a state, without a copy; the next `apply` writes to them.

        Raises:
            InvalidState: if the state belongs to another optimizer or model, or a parameter lacks some of its slots.
        """
        if state.kind != self._kind:
            raise InvalidState(
                "state.optimizer.kind",
                expected=self._kind,
                found=state.kind,
                fix="make the step with the optimizer that the state was made with, or make a new optimizer state",
            )
        members = tuple(group.params for group in state.groups)
        if members != self._covered:  # usually the same objects as in the last step, so that no names are compared
            check_partition(state.groups, self._params)
            self._covered = members
        self._bind_masters(state)
        slots = state.slots.alive()
        check_slots(slots, state.groups, self._params)
        self.use_groups(state.groups)
        inner = self._torch_optimizer().state
        inner.clear()
        for name, target in self.targets.items():
            if name in slots:
                inner[target] = dict(slots[name])
        self._order = []
        self._slots = self._read_slots()

    def use_groups(self, groups: tuple[ParamGroup, ...]) -> None:
        """Use the hyperparameters of a state; they override the arguments of the constructor.

        If the groups have other members, the slots are lost: `holds` returns False, and the caller must call `bind`.
        """
        if groups is self._groups:
            return
        if self._torch is None or not self._fits(groups):
            members = [{**group.hyper, "params": [self.targets[name] for name in group.params]} for group in groups]
            self._torch = self._cls(members, **self._hyper)
        for group, mine in zip(self._torch_optimizer().param_groups, groups, strict=True):
            group.update(mine.hyper)
        self._groups = groups

    def gather(self) -> None:
        """Add the gradients of low-precision parameters to those of their masters, and clear them."""
        for param, master in self._pairs:
            if param.grad is not None:
                grad = param.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

    def apply(self, lr_factor: float) -> None:
        """Step on the gradients of ``targets``; write parameters, masters and slots in place."""
        optimizer = self._torch_optimizer()
        for group, mine in zip(optimizer.param_groups, self._groups, strict=True):
            if "lr" in mine.hyper:
                base = mine.hyper["lr"]
                group["lr"] = base if lr_factor == 1.0 else base * lr_factor
        optimizer.step()
        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([param for param, _ in self._pairs], [master for _, master in self._pairs])

    def collect(self, lease: Lease) -> OptimizerState:
        """Return the state after `apply`, under a lease; its leaves are the tensors that the next `apply` writes to."""
        self._slots = self._read_slots()
        self._groups = self._read_groups()
        masters: Leaves[torch.Tensor] | None = None
        if self._with_masters:
            self._masters = dict(self._masters or {})
            masters = Leaves.leased(self._masters, lease)
        return OptimizerState(self._kind, Leaves.leased(self._slots, lease), self._groups, masters)

    def release(self) -> None:
        """Release every tensor."""
        if self._torch is not None:
            self._torch.state.clear()
        for _, master in self._pairs:
            master.grad = None
            master.data = torch.empty(0, dtype=torch.float32, device=master.device)
        self._slots = self._masters = None

    def _fits(self, groups: tuple[ParamGroup, ...]) -> bool:
        """Whether the existing torch optimizer can use these groups by copying their values.

        A hyperparameter that a group no longer has must return to the constructor's value, not keep an earlier state's.
        """
        return groups is self._groups or [(group.params, group.hyper.keys()) for group in groups] == [
            (group.params, group.hyper.keys()) for group in self._groups
        ]

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        assert self._torch is not None, "call bind first"
        return self._torch

    def _bind_masters(self, state: OptimizerState) -> None:
        if not self._with_masters:
            if state.masters is not None:
                raise InvalidState(
                    "state.optimizer.masters",
                    expected="None, because the optimizer was made with masters=False",
                    found=f"{len(state.masters)} masters",
                    fix="make the optimizer with masters=True, or set masters=None and lose their precision",
                )
            self._masters = None
            return
        self._masters = _masters_of(state, self._params)
        for name in self._low:
            self.targets[name].data = self._masters[name]

    def _read_slots(self) -> dict[str, Any]:
        inner = self._torch_optimizer().state
        if len(inner) != len(self._order):  # a parameter got its first gradient: restore the order of the model
            self._check_keys(inner)
            ordered = sorted(inner.items(), key=lambda item: self._ranks[item[0]])
            inner.clear()
            inner.update(ordered)
            self._order = [self._names[target] for target in inner]
        return dict(zip(self._order, inner.values(), strict=True))

    def _check_keys(self, inner: Mapping[Any, Any]) -> None:
        odd = [key for key in inner if not isinstance(key, torch.Tensor)]
        if odd:
            raise UnsupportedOptimizer(
                self._kind,
                expected="an optimizer that keeps its state by parameter",
                found=f"state under {odd[:4]}",
                fix="use the optimizer itself in your own loop, with trainfold.attach(model, optimizer)",
            )

    def _read_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups; new ones if the optimizer itself changed a hyperparameter (the scaled lr does not count)."""
        pairs = list(zip(self._groups, self._torch_optimizer().param_groups, strict=True))
        if all(
            value is mine.hyper.get(key, _ABSENT)
            for mine, group in pairs
            for key, value in group.items()
            if key not in ("params", "lr")
        ):
            return self._groups
        return tuple(
            attrs.evolve(mine, hyper={**group_hyper(group), **{k: v for k, v in mine.hyper.items() if k == "lr"}})
            for mine, group in pairs
        )


def group_hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a torch param group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def check_slots(
    slots: Mapping[str, Mapping[str, Any]], groups: Sequence[ParamGroup], params: Mapping[str, torch.Tensor]
) -> None:
    """Check that each parameter has all of its slots, or no slots; a state with only some of them is damaged.

    The slots of a parameter are those of all parameters of its group with the same number of dimensions and dtype.

    Raises:
        InvalidState: naming every parameter that is unknown or lacks slots, with the slots.
    """
    wrong = {name: "not a parameter of the model" for name in slots if name not in params}
    for group in groups:
        kinds: dict[tuple[int, torch.dtype], set[str]] = {}
        with_slots = [name for name in group.params if slots.get(name)]
        for name in with_slots:
            kinds.setdefault((params[name].dim(), params[name].dtype), set()).update(slots[name])
        for name in with_slots:
            lacks = kinds[params[name].dim(), params[name].dtype] - set(slots[name])
            if lacks:
                wrong[name] = f"lacks {sorted(lacks)}"
    if wrong:
        raise InvalidState(
            "state.optimizer.slots",
            expected="all the slots of a parameter, or no slots if it never had a gradient",
            found=wrong,
            fix="load the state again, because it is damaged or of another model; or leave the optimizer out",
        )


def _masters_of(state: OptimizerState, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the masters of a state; if it has lost them, warn and make new ones."""
    if state.masters is not None:
        check_masters(state.masters, params)
        return dict(state.masters)
    warnings.warn(
        MastersRebuilt(
            "state.optimizer.masters: expected fp32 masters, found none; they are cloned again from the "
            "low-precision parameters, and what was below their precision is lost"
        ),
        stacklevel=2,
    )
    return dict(make_masters(params))
