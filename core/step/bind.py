"""`bind_model`: the model of a state as a function, for evaluation. Calling it changes nothing."""

from typing import Any, final

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.state.state import ModelState, TrainState
from trainfold.core.step.engine.module_template import ModuleSpec, Template


@final
class BoundModel:
    """A model in evaluation mode with the parameters of one state; make one with `bind_model`.

    Args:
        template: a private skeleton of the model.
        state: the model component.
    """

    def __init__(self, template: Template, state: ModelState) -> None:
        self._template = template
        self._state = state
        template.module.eval()
        buffers = {name: value.detach().clone() for name, value in state.buffers.items()}
        template.bind(dict(state.params.alive()), buffers, state.ties)

    def __repr__(self) -> str:
        return f"BoundModel({type(self._template.module).__name__}, {len(self._state.params)} parameters)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the buffers are restored afterwards.

        Raises:
            StateDonated: if a step has consumed the state.
        """
        self._state.params.alive("state.model.params")
        self._template.keep_buffers()
        try:
            return self._template.module(*args, **kwargs)
        finally:
            self._template.undo()


def bind_model(model: torch.nn.Module, state: TrainState) -> BoundModel:
    """Return the model of a state as a function, in evaluation mode.

    Gradients are recorded as usual in PyTorch: wrap the call in ``torch.no_grad()`` if none are needed.

    Args:
        model: gives the structure; it is neither changed nor kept.
        state: its parameters are used without a copy.

    Raises:
        InvalidState: if the state has no model component.
        SpecMismatch: if the state is of another model.

    Examples:
        >>> from trainfold import init_state, optimizer
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.9))
        >>> state = init_state(model, optimizer(torch.optim.SGD, lr=0.1))
        >>> with torch.no_grad():
        ...     torch.equal(bind_model(model, state)(torch.ones(1, 2)), model.eval()(torch.ones(1, 2)))
        True
    """
    if state.model is None:
        raise InvalidState(
            "state.model", expected="a model component", found=None, fix="merge the weights into the state first"
        )
    return BoundModel(ModuleSpec(model).template(), state.model)
