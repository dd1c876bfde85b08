"""`adapter_rules`: from the names of LoRA tensors in a model of peft to those in its files, and back."""

import re
from collections.abc import Iterable

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.transform.naming import rename
from trainfold.core.transform.transform import InvertibleComposed, compose

_BASE = ".base_model."
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def adapter_rules(adapter: str = "default", *, modules_to_save: Iterable[str] | None = None) -> InvertibleComposed:
    """Make the rules that leave the name of the adapter out of the names of its tensors, as files of peft do. Their inverse starts from such files.

    Args:
        adapter: the name that it has in the model.
        modules_to_save: how the names of modules end that are trained whole, from the configuration of the adapter; their tensors lie in them, or in modules in them.

    Raises:
        InvalidArgument: for a name with a dot or a brace.

    Examples:
        >>> print(adapter_rules().parts[0])
        rename {path*}.lora_A.default.weight -> {path*}.lora_A.weight
        >>> print(adapter_rules(modules_to_save=["lm_head"]).parts[0])
        rename {path*}lm_head.modules_to_save.default.{tensor} -> {path*}lm_head.{tensor}
    """
    if not isinstance(adapter, str) or not adapter or set(adapter) & set(".{}"):
        raise InvalidArgument("adapter_rules.adapter", expected="the name of an adapter, without dots", found=shown(adapter), fix='pass a name such as "default"')  # fmt: skip
    weights = [rename(f"{{path*}}.{part}.{adapter}.weight", f"{{path*}}.{part}.weight") for part in _PARTS[:2]]
    weights.append(rename(f"{{path*}}.lora_B.{adapter}.bias", "{path*}.lora_B.bias"))  # with lora_bias
    embeddings = [rename(f"{{path*}}.{part}.{adapter}", f"{{path*}}.{part}") for part in _PARTS[2:]]
    magnitudes = rename(f"{{path*}}.lora_magnitude_vector.{adapter}.weight", "{path*}.lora_magnitude_vector")  # of DoRA
    ends = set(modules_to_save or ())
    saved = [
        rename(f"{{path*}}{each}.modules_to_save.{adapter}.{inner}", f"{{path*}}{each}.{inner}")
        for each in sorted(ends)
        if not any(each.endswith(other) for other in ends - {each})  # which covers it
        for inner in ("{tensor}", "{child}.{tensor}")
    ]
    return compose(*saved, *weights, *embeddings, magnitudes)


def before_base_model(names: Iterable[str]) -> str:
    """What is before ``base_model.`` in the names of an adapter, where the model of peft is inside of another module; files of peft begin with that word.

    Args:
        names: of the tensors of the adapter.

    Raises:
        InvalidState: if they are of several models of peft.

    Examples:
        >>> before_base_model(["net.base_model.model.q.lora_A.weight", "net.base_model.model.v.lora_A.weight"])
        'net.'
        >>> before_base_model(["q.lora_A.weight"]), before_base_model(["base_model.model.q.lora_A.weight"])
        ('', '')
    """
    found = {name: f".{name}".partition(_BASE)[0] if _BASE in f".{name}" else None for name in names}
    several = dict.fromkeys(found.values())
    if len(several) > 1:
        one, other = (next(name for name in found if found[name] == each) for each in list(several)[:2])
        raise InvalidState(other, expected=f"a tensor of the model of peft that has {one}", found="one of another module",
                           fix='write each by itself: trainfold.weights.Transformed(source, keep("net.{path*}"))')  # fmt: skip
    place = next(iter(several), None)
    return f"{place}."[1:] if place else ""


def is_of_adapter(name: str, adapter: str = "default") -> bool:
    """Whether a tensor of a model of peft was added by an adapter.

    Examples:
        >>> [is_of_adapter(name) for name in ("q.lora_A.default.weight", "q.lora_A.other.weight", "q.base_layer.weight", "head.modules_to_save.default.bias")]
        [True, False, False, True]
    """
    return (
        f".{adapter}" in name
        and re.fullmatch(rf".+\.(?:lora_\w+|modules_to_save)\.{re.escape(adapter)}(?:\..+)?", name) is not None
    )
