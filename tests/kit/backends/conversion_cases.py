"""What conversions read, and what they have written, bit by bit."""

from safetensors.torch import save_file

from trainfold.core.layout.slices import whole_box
from trainfold.core.tensor_memory import tensor_bytes


def a_hub_directory(path, tensors):
    """A directory with one file of tensors."""
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    return path


def weights(source):
    """Name -> the bytes of a tensor of a source."""
    with source.opened() as found:
        return {
            name: bytes(tensor_bytes(found.read(name, whole_box(spec.shape)))) for name, spec in found.specs.items()
        }


def bytes_of(tensors):
    """Name -> the bytes of a tensor that is at hand."""
    return {name: bytes(tensor_bytes(each)) for name, each in tensors.items()}
