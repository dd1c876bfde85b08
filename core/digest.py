"""The digest of bytes, as text. Imports no torch: commands that read a run need it."""

import xxhash

DIGEST_PREFIX = "xxh3:"


def digest_of(data: bytes | memoryview) -> str:
    """The XXH3-128 digest of bytes, as text.

    Examples:
        >>> digest_of(b"")
        'xxh3:99aa06d3014798d86001c324468d497f'
    """
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(data)
