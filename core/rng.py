"""Randomness as an argument: keys, keys derived from keys, and a block that draws from a key and leaves no trace."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument

KEY_BITS = 128
_SEED_BITS = 63  # torch's generators take a signed 64-bit seed
_DEFAULT_GENERATORS = threading.RLock()  # they are global, and ranks may be threads of one process


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class Key:
    """A source of randomness that is a value: the same key gives the same numbers, on any machine.

    Attributes:
        bits: 128 bits.
    """

    bits: int


def make_key(seed: int) -> Key:
    """Return the root key of a seed.

    Args:
        seed: any int.

    Raises:
        InvalidArgument: if it is not an int.

    Examples:
        >>> make_key(0) == make_key(0), make_key(0) == make_key(1)
        (True, False)
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidArgument("seed", expected="an int", found=repr(seed), fix="pass any whole number")
    return Key(_hash(b"trainfold root", seed))


def fold_in(key: Key, *path: int | str) -> Key:
    """Derive a key by a path of ints and strings.

    Law: ``fold_in(key, a, b) == fold_in(fold_in(key, a), b)``; different paths give different keys; a key
    depends only on the path that was folded in, so a resume in any world is deterministic.

    Args:
        key: the parent.
        path: such as ``"step", 120, "rank", 3``; ``1`` and ``"1"`` differ.

    Returns:
        The derived key; ``key`` for an empty path.

    Raises:
        InvalidArgument: for a part that is neither an int nor a string.

    Examples:
        >>> key = make_key(0)
        >>> fold_in(key, "step", 1) == fold_in(fold_in(key, "step"), 1)
        True
        >>> fold_in(key, 1) == fold_in(key, "1")
        False

    Source: a keyed hash as a pseudo-random function, BLAKE2 (RFC 7693); the name is that of ``jax.random.fold_in``.
    """
    bits = key.bits
    for part in path:
        bits = _hash(bits.to_bytes(KEY_BITS // 8, "little"), part)
    return Key(bits)


def seed_of(key: Key) -> int:
    """The seed that a key gives to a torch generator, 0 <= seed < 2**63.

    Examples:
        >>> 0 <= seed_of(make_key(7)) < 2**63
        True
    """
    return key.bits & ((1 << _SEED_BITS) - 1)


@contextmanager
def forked_rng(key: Key, device: torch.device | str | None = None) -> Iterator[None]:
    """Run a block with torch's default generators seeded from a key; afterwards their state is restored, bit for bit.

    The generator of the CPU, and that of ``device`` if it is a CUDA device, are seeded and put back, also if the block
    raises. Threads take turns, because these generators are global.

    Args:
        key: the source of the block's random numbers.
        device: the device on which the block computes; None for the CPU.

    Examples:
        >>> before = torch.get_rng_state()
        >>> with forked_rng(make_key(0)):
        ...     first = torch.rand(2)
        >>> with forked_rng(make_key(0)):
        ...     second = torch.rand(2)
        >>> torch.equal(first, second), torch.equal(before, torch.get_rng_state())
        (True, True)
    """
    with _DEFAULT_GENERATORS:
        generators = _generators(device)
        kept = [generator.get_state() for generator in generators]
        try:
            seed = seed_of(key)
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)


def _generators(device: torch.device | str | None) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device is not None and (place := torch.device(device)).type == "cuda":
        index = torch.cuda.current_device() if place.index is None else place.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def _hash(key: bytes, part: int | str) -> int:
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise InvalidArgument(
            "fold_in", expected="ints and strings", found=repr(part), fix="name it with a string or count it"
        )
    text = str(part).encode()
    message = (b"i" if isinstance(part, int) else b"s") + len(text).to_bytes(8, "little") + text
    return int.from_bytes(hashlib.blake2b(message, key=key, digest_size=KEY_BITS // 8).digest(), "little")
