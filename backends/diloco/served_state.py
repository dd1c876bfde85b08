"""What a `DilocoServer` takes from its state: the weights as a worker has them, the rounds that go on, and what it refuses."""

import secrets
from collections.abc import Iterator, Mapping
from typing import Final, final

import attrs
import torch

from trainfold.backends.weights.server import asked
from trainfold.core.diloco.outer_step import trained_elements
from trainfold.core.diloco.rounds import Rounds, resumed
from trainfold.core.diloco.work_units import WorkUnits
from trainfold.core.errors import InvalidState
from trainfold.core.format.codec import torch_dtype
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.state import Opaque, Progress, TrainState
from trainfold.core.weights.source import Wanted

_SHORT_BYTES: Final = 4096  # of requests without names


@final
@attrs.frozen
class Rounded:
    """The weights of a state, each trained one rounded once to the dtype that a worker has."""

    state: TrainState

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the state has."""
        model = self.state.model
        assert model is not None
        trained = trained_elements(self.state)
        for name, each in wanted.items():
            tensor = model.params.get(name, model.buffers.get(name))
            if each.tied_to is not None or tensor is None:
                continue
            dtype = torch_dtype(each.dtype) if each.dtype else torch.float64
            yield name, tensor.to(dtype) if name in trained and dtype.is_floating_point else tensor


def longest_request(state: TrainState) -> int:
    """The most bytes of what a worker says in JSON: that it wants all tensors, each with a box and a dtype of its own."""
    assert state.model is not None
    tensors = {**state.model.params, **state.model.buffers}
    wanted = {
        name: Wanted("float64", tuple(each.shape), whole_box(tuple(each.shape))) for name, each in tensors.items()
    }
    tied = {alias: attrs.evolve(wanted[name], tied_to=name) for alias, name in state.model.ties}
    return 2 * len(canonical_json(asked({**wanted, **tied}))) + _SHORT_BYTES


def check_on_cpu(state: TrainState) -> None:
    """Refuse a model on a GPU or on meta."""
    assert state.model is not None
    for name, each in {**state.model.params, **state.model.buffers}.items():
        if each.device.type != "cpu":
            raise InvalidState(
                f"state.model[{name!r}]",
                expected="a tensor on the CPU, where the server adds what workers send",
                found=f"one on {each.device}",
                fix="make the state of a model on the CPU: outer_state(model.cpu())",
            )


def rounds_of(state: TrainState, size: int, total: int | None) -> Rounds:
    """The rounds that go on from the data position of a state; those of a new run if it has no rounds yet."""
    position = state.dataset.value if isinstance(state.dataset, Opaque) else None
    if isinstance(position, Mapping) and position.keys() >= {"next_index", "returned", "mark"}:
        return resumed(position, size=size, total=total)
    rounds = (state.trainer or Progress()).step
    if rounds or state.dataset is not None:
        raise InvalidState(
            "state.dataset",
            expected=f"the data position of a server, after {rounds} rounds",
            found="none" if state.dataset is None else type(state.dataset).__name__,
            fix="load the state with its dataset; or begin with the first sample on purpose, with the weights alone: "
            "state.evolve(dataset=None, trainer=trainfold.Progress())",
        )
    return Rounds(WorkUnits(size, total), secrets.token_hex(16))
