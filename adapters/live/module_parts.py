"""`ModuleParts`: several modules as one model, such as the chunks of a pipeline stage on this rank, with the names of the whole model."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article


@final
class ModuleParts(torch.nn.Module):
    """The parts of a model. Each tensor has the name that it has in its part, so parts that keep the names of the whole model are saved as it is.

    Args:
        parts: the modules; no two tensors may have one name.
    """

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002  # as torch has it
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """As torch's; a part has the prefix of a wrapper, which names are without."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for part in self.children():
            yield from part.named_modules(memo, f"{prefix}.module" if prefix else "module", remove_duplicate)


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
