"""A torch optimizer as the ``optimizer`` component: slots by canonical name, written without torch's casts."""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, final

import attrs
import torch

from trainfold.adapters.components.component import Undo, copied, copied_containers, kind_of, nothing, wrong_kind
from trainfold.core import tree
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.leaves import Leaves
from trainfold.core.state import OptimizerState, ParamGroup

_NOT_HYPER = ("params", "param_names")
# Slots that every optimizer of torch.optim makes with zeros_like or full_like of the parameter or its gradient.
_LIKE_PARAMETER = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer"}
    | {"prev", "square_avg", "step_size", "sum"}
)


def capture_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerState:
    """An optimizer's state as a value, keyed by name; its tensors are the optimizer's own, not copies.

    A parameter that never had a gradient has no slots, as in torch (B10). Of gradients only their presence is in it.

    Args:
        optimizer: any torch optimizer.
        names: ``id(parameter)`` -> canonical name.

    Raises:
        InvalidState: if the optimizer holds a tensor that has no name, or keeps state under something else.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = capture_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), {id(model.weight): "w", id(model.bias): "b"})
        >>> state.kind, state.groups[0].params
        ('torch.optim.sgd.SGD', ('w', 'b'))
    """
    groups = tuple(
        ParamGroup(
            hyper={key: copied_containers(value) for key, value in group.items() if key not in _NOT_HYPER},
            params=tuple(_names_of(group["params"], names, f"optimizer.groups[{number}]")),
        )
        for number, group in enumerate(optimizer.param_groups)
    )
    held = [(parameter, each) for parameter, each in optimizer.state.items() if each]  # a look may leave an empty entry
    names_held = _names_of([parameter for parameter, _ in held], names, "optimizer.state")
    slots = dict(zip(names_held, _copied_slots([each for _, each in held]), strict=True))
    order = list(filter(slots.__contains__, chain.from_iterable(group.params for group in groups)))
    return OptimizerState(
        kind=kind_of(optimizer),
        slots=Leaves(zip(order, map(slots.__getitem__, order), strict=True)),
        groups=groups,
        with_grad=tuple(
            name
            for mine, theirs in zip(groups, optimizer.param_groups, strict=True)
            for name, parameter in zip(mine.params, theirs["params"], strict=True)
            if (grad := parameter.grad) is not None and grad.layout is torch.strided  # no zeros are like a sparse one
        ),
    )


def _copied_slots(held: list[Any]) -> Iterable[Any]:
    if set(map(type, held)) <= {dict} and set(map(type, chain.from_iterable(map(dict.values, held)))) <= {torch.Tensor}:
        return map(dict.copy, held)  # there are many, and nearly all are so
    return map(copied_containers, held)


def _names_of(parameters: Collection[Any], names: Mapping[int, str], where: str) -> list[str]:
    found = list(map(names.get, map(id, parameters)))
    if None in found:
        parameter = next(each for each, name in zip(parameters, found, strict=True) if name is None)
        shape = list(parameter.shape) if isinstance(parameter, torch.Tensor) else parameter
        raise InvalidState(
            where,
            expected="parameters of the attached model",
            found=f"a tensor of shape {shape} that the model does not have",
            mend="build the optimizer from the parameters of this model, after it was wrapped or moved; "
            "or attach the module that has it under extra=",
        )
    return [name for name in found if name is not None]


@final
@attrs.frozen
class OptimizerPart:
    """A torch optimizer behind a component.

    Attributes:
        optimizer: the live optimizer; its param group dicts stay, because a scheduler holds on to them.
        names: ``id(parameter)`` -> canonical name.
        path: the component, for messages.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[int, str]
    path: str = "optimizer"

    def capture(self) -> OptimizerState:
        """The slots and hyperparameters, tensors not copied."""
        return capture_optimizer(self.optimizer, self.names)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason at once: another class, other parameters, other groups, slots missing or misshapen."""
        if not isinstance(saved, OptimizerState):
            return [wrong_kind(self.path, "the state of a torch optimizer", saved)]
        found: list[TrainfoldError] = []
        if saved.kind != kind_of(self.optimizer):
            found.append(
                self._problem("kind", kind_of(self.optimizer), saved.kind, "make the optimizer that the state is of")
            )
        params = self._params()
        mine = {frozenset(group) for group in self._groups()}
        theirs = {frozenset(group.params) for group in saved.groups}
        if mine != theirs:
            names = frozenset[str]().union(*theirs)
            found.append(
                self._problem(
                    "groups",
                    f"{len(mine)} groups of {len(params)} parameters in all",
                    f"{len(theirs)} groups of {len(names)}; missing {sorted(set(params) - names)[:8]}, "
                    f"unexpected {sorted(names - set(params))[:8]}",
                    "put the same parameters into the same groups (their order does not matter)",
                )
            )
            return found
        unknown = sorted(set(saved.slots) - set(params))
        if unknown:
            found.append(self._problem("slots", "slots of parameters in a group", unknown[:8], "repair the state"))
        found.extend(self._slot_problems(saved, params))
        return found

    def _slot_problems(self, saved: OptimizerState, params: Mapping[str, torch.Tensor]) -> list[TrainfoldError]:
        """A parameter without any slot never had a gradient; one with some of its slots is damaged (B10).

        Parameters of one group and of as many dimensions are treated alike by every optimizer of torch, so they must
        have the same slots. Somebody else's may keep more for a large parameter, or in another dtype: there, parameters
        must be of one shape and dtype to be alike, and nothing is known of the shapes of their slots.
        """
        is_torchs = kind_of(self.optimizer).startswith("torch.optim.")
        alike: dict[tuple[Any, ...], list[str]] = {}
        for number, group in enumerate(saved.groups):
            for name in group.params:
                if name in params and saved.slots.get(name):
                    value = params[name]
                    likeness = (value.dim(),) if is_torchs else (value.shape, value.dtype)
                    alike.setdefault((number, *likeness), []).append(name)
        found: list[TrainfoldError] = []
        for members in alike.values():
            keys = {key for name in members for key in saved.slots[name]}
            fitting = keys & _LIKE_PARAMETER if is_torchs else set[str]()
            for name in members:
                held = saved.slots[name]
                missing = sorted(keys - set(held))
                if missing:
                    found.append(
                        self._problem(
                            f"slots[{name!r}]",
                            f"the slots {sorted(keys)}",
                            f"{missing} missing",
                            "use another checkpoint",
                        )
                    )
                for key in sorted(fitting & set(held)):
                    shape = _shape(held[key])
                    if shape is not None and shape != params[name].shape:
                        found.append(
                            self._problem(
                                f"slots[{name!r}][{key!r}]",
                                f"shape {list(params[name].shape)}",
                                f"shape {list(shape)}",
                                "build the model as it was when the state was saved",
                            )
                        )
        return found

    def write(self, saved: Any) -> Undo:
        """Write the slots and hyperparameters straight into the optimizer.

        Not through ``load_state_dict``, which casts slots to the dtype of their parameter (B09). A slot tensor that is
        there already with the same shape, dtype and device is overwritten in place.
        """
        by_members = {frozenset(group.params): group.hyper for group in saved.groups}
        hypers = [copied(dict(by_members[frozenset(group)])) for group in self._groups()]
        slots: dict[torch.Tensor, Any] = {}
        overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (name, parameter), hyper in zip(self._params().items(), self._hyper_of(saved), strict=True):
            if name not in saved.slots:
                continue
            held = self.optimizer.state.get(parameter, {})
            slots[parameter] = {}
            for key, value in saved.slots[name].items():
                present = held.get(key)
                if _same_spec(value, present):
                    overwritten.append((present, value))
                    slots[parameter][key] = present
                else:
                    slots[parameter][key] = _placed(value, _device_of(key, parameter, hyper))
        # everything that can fail is done, and nothing was changed so far
        for present, value in overwritten:
            present.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(slots)
        for group, hyper in zip(self.optimizer.param_groups, hypers, strict=True):
            for key, value in hyper.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        return nothing

    def write_gradients(self, saved: OptimizerState) -> None:
        """Leave zeros where there was a gradient and None where there was none: the optimizer steps on the former.

        After ``zero_grad(set_to_none=False)`` weight decay and momentum go on to move a parameter that is not used.
        """
        with_grad = frozenset(saved.with_grad)
        for name, parameter in self._params().items():
            parameter.grad = torch.zeros_like(parameter) if name in with_grad else None

    def _params(self) -> dict[str, torch.Tensor]:
        """The parameters in the optimizer's order, by name."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return dict(zip(_names_of(parameters, self.names, self.path), parameters, strict=True))

    def _groups(self) -> list[tuple[str, ...]]:
        return [tuple(_names_of(group["params"], self.names, self.path)) for group in self.optimizer.param_groups]

    def _hyper_of(self, saved: OptimizerState) -> list[Mapping[str, Any]]:
        """For each of `_params`, the hyperparameters of its group."""
        by_name = {name: group.hyper for group in saved.groups for name in group.params}
        return [by_name[name] for name in self._params()]

    def _problem(self, part: str, expected: object, found: object, mend: str) -> InvalidState:
        return InvalidState(f"{self.path}.{part}", expected=expected, found=found, mend=mend)


def _shape(value: object) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _device_of(key: str, parameter: torch.Tensor, hyper: Mapping[str, Any]) -> torch.device:
    """Where torch keeps a new slot: a step counter is on the CPU unless the kernels read it."""
    if key == "step" and not (hyper.get("capturable") or hyper.get("fused")):
        return torch.device("cpu")
    return parameter.device


def _placed(value: Any, device: torch.device) -> Any:
    """A copy of a slot, on its device and with its own dtype."""
    copies = tree.map_tensors(lambda tensor: tensor.detach().to(device=device, copy=True), value)
    return tree.map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copied(leaf), copies)


def _same_spec(value: Any, present: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)):
        return False
    return value.shape == present.shape and value.dtype == present.dtype
