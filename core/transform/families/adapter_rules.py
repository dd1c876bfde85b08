"""`adapter_rules`: from the names of LoRA tensors in a model of peft to those in its files, and back."""

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.transform.naming import rename
from trainfold.core.transform.transform import InvertibleComposed, compose

_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def adapter_rules(adapter: str = "default") -> InvertibleComposed:
    """Make the rules that leave the name of the adapter out of the names of its tensors, as files of peft do. Their inverse starts from such files.

    Args:
        adapter: the name that it has in the model.

    Raises:
        InvalidArgument: for a name with a dot or a brace.

    Examples:
        >>> print(adapter_rules().parts[0])
        rename {path*}.lora_A.default.weight -> {path*}.lora_A.weight
    """
    if not isinstance(adapter, str) or not adapter or set(adapter) & set(".{}"):
        raise InvalidArgument("adapter_rules.adapter", expected="the name of an adapter, without dots", found=shown(adapter), fix='pass a name such as "default"')  # fmt: skip
    weights = [rename(f"{{path*}}.{part}.{adapter}.weight", f"{{path*}}.{part}.weight") for part in _PARTS[:2]]
    embeddings = [rename(f"{{path*}}.{part}.{adapter}", f"{{path*}}.{part}") for part in _PARTS[2:]]
    magnitudes = rename(f"{{path*}}.lora_magnitude_vector.{adapter}.weight", "{path*}.lora_magnitude_vector")  # of DoRA
    return compose(*weights, *embeddings, magnitudes)
