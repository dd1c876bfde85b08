"""Stores of checkpoints: in a directory, in a bucket, in memory, the protocol for your own, and copies from one into another.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.open_filesystem import fsspec_store
from trainfold.backends.stores.protocol import Store
from trainfold.backends.tiers.collect_run import collect_run, plan_collect
from trainfold.backends.tiers.copy_run import copy_run, plan_copy
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.layout.file_preference import FilePreference

__all__ = [
    "CopyPlan",
    "FilePreference",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Store",
    "TwoTiers",
    "collect_run",
    "copy_run",
    "fsspec_store",
    "plan_collect",
    "plan_copy",
]
