"""Helpers shared by the tests of hold."""

from trainfold.core.tensor_memory import tensor_bytes

PIECE = 64


W = ("model", "w")


def name_of(number):
    return ("model", f"leaf-{number}")


def bytes_of(tensor):
    return bytes(tensor_bytes(tensor))
