"""`ModuleParts`: several modules as one model, such as the chunks of a pipeline stage on this rank, with the names of the whole model."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article
from trainfold.core.state.fqn import named_tensors


@final
class ModuleParts(torch.nn.Module):
    """The parts of a model. Each tensor has the name that it has in its part, so parts that keep the names of the whole model are saved as it is.

    Args:
        parts: the modules; no two tensors may have one name.
    """

    _trainfold_unnamed = True

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)


def as_module(model: Any) -> Any:
    """Return a list or tuple of modules as one module, and anything else as it is.

    Raises:
        InvalidArgument: for a list that is empty, or holds anything but modules, or one of them twice.

    Examples:
        >>> from trainfold.core.state.fqn import named_tensors
        >>> encoder = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2)})
        >>> decoder = torch.nn.ModuleDict({"decoder": torch.nn.Linear(2, 1, bias=False)})
        >>> list(named_tensors(as_module([encoder, decoder])).params)
        ['encoder.weight', 'encoder.bias', 'decoder.weight']
    """
    if not isinstance(model, list | tuple):
        return model
    is_whole = model and all(isinstance(each, torch.nn.Module) for each in model)
    if not is_whole or len({id(each) for each in model}) != len(model):
        raise InvalidArgument(
            "attach.model",
            expected="a module, or a list of different modules",
            found=f"{with_article(type(model).__name__)} of {[type(each).__qualname__ for each in model]}",
            fix="pass the modules themselves, each once; other objects belong under extra=",
        )
    return ModuleParts(model)


def check_uncounted(extra: Mapping[str, Any], stages: Sequence[torch.nn.Module]) -> None:
    """Raise for a module that counts the stages of this rank, such as an average of their ``ModuleList``: no other number of stages would have its names.

    Args:
        extra: the other components of the run.
        stages: the modules of its stages; none for a whole model.

    Raises:
        InvalidArgument: naming the first of its tensors.
    """
    names = [named_tensors(each).params.keys() for each in stages]
    for component, module in extra.items():
        if not names or not isinstance(module, torch.nn.Module):
            continue
        counted: dict[str, list[str]] = {}
        for name in named_tensors(module).params:
            number, _, rest = name.partition(".")
            counted.setdefault(number, []).append(rest)
        for number, rests in counted.items():
            if number.isdecimal() and set(rests) in names:
                raise InvalidArgument(
                    f"extra[{component!r}]",
                    expected=f"the names of the whole model, such as {rests[0]!r}",
                    found=f"{number + '.' + rests[0]!r}, with the number of a stage on this rank",
                    fix="make it of the stages as one module, and register it: AveragedModel(live.modules[0]), live.register",
                )
