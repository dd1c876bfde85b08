"""The versions that a manifest records: those that the libraries themselves name, and nothing is imported for them."""

import subprocess
import sys
from importlib import metadata

import numpy as np
import torch

from trainfold.backends import library_versions as module
from trainfold.backends.library_versions import library_versions


def test_the_versions_are_those_that_the_libraries_name():
    assert library_versions() == {
        "trainfold": metadata.version("trainfold"), "torch": torch.__version__, "numpy": np.__version__
    }  # fmt: skip


def test_they_are_the_same_where_no_library_is_imported():
    """V18: torch is built for one CUDA or another, and only its own file names it."""
    program = (
        "import sys; from trainfold.backends.library_versions import library_versions; print(library_versions()); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(library_versions())


def test_what_is_not_installed_is_not_named(monkeypatch):
    """A checkpoint can be planned where torch is absent, and its version is not compared there."""

    def version(library):
        if library == "torch":
            raise metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(module.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    module._version.cache_clear()
    try:
        assert sorted(library_versions()) == ["numpy", "trainfold"]
    finally:
        module._version.cache_clear()
