"""Pure transforms of ``{name: tensor}``: other names, fused and stacked tensors, other dtypes. Each prints, and has an inverse or says that it has none.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.transform.apply import PartPlan, plan_parts, transform_specs, transform_stream, transform_tensors
from trainfold.core.transform.converters.converter import Converter, chain, view
from trainfold.core.transform.converters.lora import lora, lora_of
from trainfold.core.transform.converters.quantised import quantised
from trainfold.core.transform.families.adapter_rules import adapter_rules
from trainfold.core.transform.families.hub_rules import dequantise_of, hub_rules, hub_rules_of
from trainfold.core.transform.fusing import merge, split, stack, unstack
from trainfold.core.transform.naming import drop, keep, rename, tie, untie
from trainfold.core.transform.states.transform_state import transform_state
from trainfold.core.transform.transform import Invertible, Transform, compose
from trainfold.core.transform.values import cast, dequantise, rearrange, transpose

__all__ = [
    "Converter",
    "Invertible",
    "PartPlan",
    "Transform",
    "adapter_rules",
    "cast",
    "chain",
    "compose",
    "dequantise",
    "dequantise_of",
    "drop",
    "hub_rules",
    "hub_rules_of",
    "keep",
    "lora",
    "lora_of",
    "merge",
    "plan_parts",
    "quantised",
    "rearrange",
    "rename",
    "split",
    "stack",
    "tie",
    "transform_specs",
    "transform_state",
    "transform_stream",
    "transform_tensors",
    "transpose",
    "unstack",
    "untie",
    "view",
]
