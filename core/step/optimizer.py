"""Optimizers as pairs of pure functions, made from any `torch.optim.Optimizer` class."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, UnsupportedOptimizer
from trainfold.core.optim.param_groups import GroupRule, Matcher, assign, check_hyper, matcher
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.masters import make_masters, refresh_masters
from trainfold.core.state.state import OptimizerState, ParamGroup
from trainfold.core.step.engine.bound_optimizer import BoundOptimizer, group_hyper

__all__ = ["Optimizer", "optimizer", "refresh_masters"]

Params = Mapping[str, torch.Tensor]


@final
@attrs.frozen(eq=False)
class Optimizer:
    """A pair of pure functions ``(init, update)``; make one with `optimizer`. It unpacks as the pair.

    Attributes:
        cls: the torch class that computes.
        hyper: the arguments of its constructor; once a state exists, the hyperparameters in the state count.
        groups: the rules for param groups, checked, each with its hyperparameters.
        masters: whether low-precision parameters have fp32 masters.
    """

    cls: type[torch.optim.Optimizer]
    hyper: Mapping[str, Any]
    groups: tuple[tuple[Matcher, Mapping[str, Any]], ...] = ()
    masters: bool = False

    @property
    def kind(self) -> str:
        """The name of the class, which a state carries."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))

    def init(self, params: Params) -> OptimizerState:
        """Return the state before the first step, with slots only if the torch class makes them at once.

        Args:
            params: FQN -> tensor; neither changed nor kept.

        Raises:
            InvalidArgument: if there is no parameter, if a rule sets a hyperparameter that the class does not have, or
                if the class refuses a value.
        """
        if not params:
            raise InvalidArgument(
                "params", expected="at least one", found="none", fix="pass the parameters of the model"
            )
        masters = make_masters(params) if self.masters else None
        full: Params = masters if masters is not None else {}
        targets = {name: _parameter(full.get(name, value)) for name, value in params.items()}
        members = assign(params, self.groups)
        given = [{**hyper, "params": [targets[name] for name in names]} for hyper, names in members]
        try:
            inner = self.cls(given, **self.hyper)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(
                self.kind, expected="arguments that the class takes", found=str(error), fix="correct the arguments"
            ) from error
        for hyper, _ in members:
            if unknown := [key for key in hyper if key not in inner.defaults]:
                raise InvalidArgument(
                    "groups", expected=f"among {sorted(inner.defaults)}", found=unknown, fix="correct the name"
                )
        names_of: dict[torch.Tensor, str] = {target: name for name, target in targets.items()}
        return OptimizerState(
            kind=self.kind,
            slots=Leaves({names_of[target]: dict(slots) for target, slots in inner.state.items()}),
            groups=tuple(
                ParamGroup(tree.map_tensors(torch.clone, group_hyper(group)), names)
                for group, (_, names) in zip(inner.param_groups, members, strict=True)
            ),
            masters=masters,
        )

    def update(
        self,
        grads: Mapping[str, torch.Tensor | None],
        opt_state: OptimizerState,
        params: Params,
        *,
        lr_factor: float = 1.0,
    ) -> tuple[dict[str, torch.Tensor], OptimizerState]:
        """Do one step; the arguments do not change.

        Law: k updates give the bits of k steps of the mutable torch optimizer.

        Args:
            grads: FQN -> gradient; a parameter without a gradient does not change, as in torch.
            opt_state: its ``groups[i].hyper`` are the hyperparameters of the step.
            params: FQN -> tensor.
            lr_factor: a factor of each group's learning rate.

        Returns:
            The new parameters and the new state.

        Raises:
            InvalidState: if the arguments do not belong together.
        """
        if unknown := [name for name in grads if name not in params]:
            raise InvalidState("grads", expected="names of params", found=unknown, fix="use the same FQNs")
        fresh = {name: _parameter(value.detach().clone()) for name, value in params.items()}
        bound = self.bound_to(fresh)
        bound.bind(tree.map_tensors(lambda leaf: leaf.detach().clone(), opt_state))
        for name, grad in grads.items():
            if grad is not None:
                target = bound.targets[name]
                target.grad = grad.detach().to(target.dtype, copy=True)
        bound.apply(lr_factor)
        return {name: value.detach() for name, value in fresh.items()}, bound.collect(Lease())

    def bound_to(self, params: dict[str, torch.nn.Parameter]) -> BoundOptimizer:
        """Return a mutable instance on these parameters, for a step that updates in place."""
        return BoundOptimizer(self.kind, self.cls, self.hyper, masters=self.masters, params=params)


OptimizerLike: TypeAlias = Optimizer | tuple[Callable[..., Any], Callable[..., Any]]
"""An optimizer of a pure step: what `optimizer` returns, or a user's own pure functions ``(init, update)``."""


def optimizer(
    cls: type[torch.optim.Optimizer], *, groups: Sequence[GroupRule] | None = None, masters: bool = False, **hyper: Any
) -> Optimizer:
    """Make pure functions from a torch optimizer class.

    Any optimizer that computes from gradients alone works. Whatever an instance keeps outside ``state`` and
    ``param_groups`` is not part of the state and is lost between steps. ``SparseAdam`` needs sparse gradients, so it
    works with ``update``, but not with a step, which measures the gradient norm.

    Args:
        cls: such as ``torch.optim.AdamW``.
        groups: ``(rule, hyperparameters)`` pairs; the first rule that matches a parameter wins, and parameters that none
            matches have the defaults. A rule is a regular expression that is searched for in the FQN, or a function:
            ``lambda name: ...``, or ``lambda name, p: p.dim() < 2`` with the tensor. It is called once for each parameter,
            when `init` makes the state.
        masters: keep fp32 masters of low-precision parameters, and round the parameters from them.
        hyper: arguments of the class, plain values.

    Returns:
        An `Optimizer`, which unpacks as ``(init, update)``.

    Raises:
        UnsupportedOptimizer: if ``cls`` is not an optimizer class, needs a closure (LBFGS), or overrides ``state_dict``.
        InvalidArgument: for a rule that is neither an expression nor such a function, or for an argument that the class
            does not have or that no checkpoint can hold.

    Examples:
        >>> init, update = optimizer(torch.optim.SGD, lr=0.5, groups=[(r"bias$", {"lr": 0.0})])
        >>> params = {"weight": torch.ones(2), "bias": torch.ones(1)}
        >>> params, state = update({"weight": torch.ones(2), "bias": torch.ones(1)}, init(params), params)
        >>> params
        {'weight': tensor([0.5000, 0.5000]), 'bias': tensor([1.])}
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UnsupportedOptimizer(
            "cls", expected="a class of torch optimizers", found=repr(cls), fix="pass the class and its arguments"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizer(
            cls.__name__,
            expected="an optimizer that computes from gradients alone",
            found="an optimizer whose step needs a closure, which evaluates the loss again",
            fix="choose an optimizer whose step(closure=None) works without one",
        )
    if cls.state_dict is not torch.optim.Optimizer.state_dict:
        raise UnsupportedOptimizer(
            cls.__name__,
            expected="an optimizer whose whole state is its slots and groups",
            found="an optimizer that overrides state_dict()",
            fix="use the optimizer itself in your own loop, with trainfold.attach(model, optimizer)",
        )
    try:
        inspect.signature(cls).bind([], **hyper)
    except TypeError as error:
        raise InvalidArgument(
            cls.__name__, expected=str(inspect.signature(cls)), found=str(error), fix="correct the arguments"
        ) from None
    rules = tuple((matcher(rule), dict(overrides)) for rule, overrides in groups or ())
    check_hyper(hyper, cls.__name__)
    for _, overrides in rules:
        check_hyper(overrides, "groups")
    return Optimizer(cls, dict(hyper), rules, masters)


def _parameter(value: torch.Tensor) -> torch.nn.Parameter:
    trains = value.is_floating_point() or value.is_complex()
    return torch.nn.Parameter(value.detach(), requires_grad=trains)


def pair_of(optimizer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an argument as the pair ``(init, update)``.

    Raises:
        InvalidArgument: if it is not such a pair; for example, if it is an instance of a torch optimizer.

    Examples:
        >>> init, update = pair_of(optimizer(torch.optim.SGD, lr=0.5))
    """
    pair = tuple(optimizer) if isinstance(optimizer, Optimizer | tuple | list) else ()
    if len(pair) != len(("init", "update")) or not all(map(callable, pair)):
        raise InvalidArgument(
            "optimizer",
            expected="what trainfold.optimizer returns, or a pair of pure functions (init, update)",
            found=type(optimizer).__qualname__,
            fix="pass trainfold.optimizer(torch.optim.AdamW, lr=...), with the class and not an instance of it",
        )
    return pair[0], pair[1]
