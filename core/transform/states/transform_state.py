"""`transform_state`: a state whose model has other names and pieces, with its optimizer, if that updates each element for itself."""

import attrs

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, TrainState
from trainfold.core.transform.states.made_contract import check_trained_alike, frozen_of, frozen_outside, made_contract
from trainfold.core.transform.states.made_model import MadeModel
from trainfold.core.transform.states.made_optimizer import made_optimizer
from trainfold.core.transform.transform import Transform, transform_given


def transform_state(state: TrainState, transform: Transform) -> TrainState:
    """Return a state whose model has the names and pieces that a transform makes, and the optimizer with it.

    Laws: with the inverse it is the state again, to the bit, but for the contract's settings of modules that the other pieces do not have. A step of it is the
    same step, because the moments of a fused projection are those of its parts, put together: to the bit with torch's loop and ``foreach``. A fused kernel on a
    CPU rounds the last elements of a tensor otherwise than the others: there, and in the norm of all gradients, which is summed in the order of the tensors, the
    last bits differ. What is tied stays tied; a name
    that a rule leaves out comes back as the other name of the one that it keeps.

    Args:
        state: of which this process has everything. It is not changed.
        transform: one that has an inverse, so that it only gives names, and puts together, takes apart and rearranges: no cast, no merge of adapters.

    Returns:
        The state. What only has another name is the tensor of the state; all else is fresh memory. The contract says the same of the new names. A parameter whose
        values come from outside and that has another name counts as one of the state, so that a checkpoint has it. The other components stay as they are.

    Raises:
        InvalidArgument: for a transform without an inverse, a state without a model or in parts, and one with components under ``extra``, which may have the names too.
        InvalidState: naming the parameter: if the optimizer is not one of those that update each element for itself, as Adafactor and Muon are not; if the parts
            of a tensor are in several groups, have other counters or slots, or are frozen and trained; if one of the names of a tied tensor gets other pieces
            than the others; and as `transform_tensors`.

    Examples:
        >>> import torch, trainfold
        >>> from trainfold.transforms import merge
        >>> model = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 3), "k": torch.nn.Linear(2, 3)})
        >>> state = trainfold.init_state(model, trainfold.optimizer(torch.optim.AdamW, lr=0.1), seed=0)
        >>> fused = transform_state(state, merge(["q.{kind}", "k.{kind}"], "qk.{kind}"))
        >>> {name: tuple(each.shape) for name, each in fused.model.params.items()}
        {'qk.weight': (6, 2), 'qk.bias': (6,)}
    """
    model = _checked(state, transform)
    made = MadeModel(model, transform)
    kinds = {name: {each in model.params for each in sources} for name, sources in made.sources.items()}
    if mixed := next((name for name, each in kinds.items() if len(each) > 1), None):
        raise InvalidState(mixed, expected="parts that are all parameters, or all buffers", found=", ".join(made.sources[mixed]), fix="leave out the rule")  # fmt: skip
    params = [name for name, each in kinds.items() if each == {True}]
    frozen, optimizer = frozen_of(state), None
    if state.optimizer is not None:
        check_trained_alike(frozen, made, params)
        optimizer = made_optimizer(state.optimizer, made, params)
    values = made.values({**model.params, **model.buffers}, made.sources)
    whole = ModelState(
        Leaves({name: values[name] for name in params}),
        Leaves({name: each for name, each in values.items() if kinds[name] != {True}}),
        tuple(made.ties.items()),
    )
    return state.evolve(
        model=whole,
        optimizer=optimizer,
        contract=made_contract(state, made, optimizer, frozen),
        origin=attrs.evolve(state.origin, frozen=frozen_outside(state, made)),
    )


def _checked(state: TrainState, transform: Transform) -> ModelState:
    """The model of a state that can be transformed.

    Raises:
        InvalidArgument: if it cannot.
    """
    if transform_given("transform", transform).inverse is None:
        raise InvalidArgument("transform", expected="a transform that has an inverse, so that no value changes", found=str(transform),
                              fix="leave out what casts, drops or merges adapters; weights alone are cast by trainfold.weights.Transformed(source, rules)")  # fmt: skip
    model = state.model
    leaves = {} if model is None else {**model.params, **model.buffers}
    cut = next((name for name, each in leaves.items() if isinstance(each, Shard)), None)
    if model is None or cut is not None or state.stage is not None:
        found = (
            "none" if model is None else str(state.stage) if cut is None else f"the part that this rank has of {cut}"
        )
        raise InvalidArgument("state", expected="a whole model", found=found, fix="load the run in one process, and transform it there")  # fmt: skip
    if state.extra:
        raise InvalidArgument("state.extra", expected="nothing, because it may have the names of the model too", found=", ".join(state.extra),
                              fix="leave it out: state.evolve(extra={}); and make it again of the new state")  # fmt: skip
    return model
