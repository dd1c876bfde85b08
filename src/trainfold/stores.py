"""Stores of checkpoints: in a directory, in a bucket, in memory, and the protocol for your own.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.protocol import Store
from trainfold.core.layout.file_preference import FilePreference

__all__ = ["FilePreference", "LocalStore", "MemoryStore", "ObjectStore", "Store"]
