"""Contracts: suites that check whether an implementation of `Store`, `Metric`, `Collectives`, `Parallelism`, `WeightSource` or `Converter` keeps its protocol."""

from trainfold.properties.collectives_contract import check_collectives
from trainfold.properties.converter_contract import check_converter
from trainfold.properties.differences import ContractBroken
from trainfold.properties.metrics.metric_contract import check_metric
from trainfold.properties.parallelism_contract import check_parallelism
from trainfold.properties.stores.store_contract import STORE_RULES, check_store
from trainfold.properties.weight_source_contract import check_weight_source

__all__ = [
    "STORE_RULES",
    "ContractBroken",
    "check_collectives",
    "check_converter",
    "check_metric",
    "check_parallelism",
    "check_store",
    "check_weight_source",
]
