"""`StepRecord`: what a run did in one optimizer step; `StateDigest`: the bits of one component after it."""

import math
import struct
from typing import Final, TypeAlias, final

import attrs

_FLOAT: Final = struct.Struct("<d")


@final
@attrs.frozen
class StepRecord:
    """What a run did in one optimizer step, as far as it is known.

    Numbers are compared by their bits: two NaNs of the same bits are equal, and 0.0 and -0.0 are not.

    Attributes:
        step: optimizer steps done after it.
        epoch: the epoch after it.
        samples: samples consumed after it.
        loss: bits of the loss as a float64, 8 bytes; None if none was recorded.
        norm: bits of the norm of the gradient; None if none was recorded.
        batch: digest of the batches of the step, 8 bytes; None if they are not known.
        streams: digest of torch's random streams after the step, 8 bytes; None if they are not known.
        host_streams: digest of those of python and numpy, 4 bytes; None if they are not known. Programs that do not use them seldom seed them, so that
            they are elsewhere in each run.
        is_whole: whether the digest of the batches covers every byte of them. That of an older version, or of a batch with a value that cannot be
            read, covers blocks of large tensors.

    Examples:
        >>> record = StepRecord(3, 0, 96, loss=float_bits_of(0.5))
        >>> print(record)
        step 3: loss 0.5, epoch 0, 96 samples
    """

    step: int
    epoch: int = 0
    samples: int = 0
    loss: bytes | None = None
    norm: bytes | None = None
    batch: bytes | None = None
    streams: bytes | None = None
    host_streams: bytes | None = None
    is_whole: bool = False

    def is_comparable(self, other: "StepRecord", field: str) -> bool:
        """Whether both know a field, and their values are made alike.

        Examples:
            >>> one = StepRecord(3, batch=bytes(8))
            >>> one.is_comparable(StepRecord(3, batch=bytes(8), is_whole=True), "batch"), one.is_comparable(one, "loss")
            (False, False)
        """
        is_known = None not in (getattr(self, field), getattr(other, field))
        return is_known and (field != "batch" or self.is_whole == other.is_whole)

    def shows(self, other: "StepRecord", field: str) -> bool:
        """Whether a field of both that has one value proves that it was the same in both."""
        return self.is_comparable(other, field) and (field != "batch" or self.is_whole)

    def __str__(self) -> str:
        known = [f"{name} {float_of_bits(bits)!r}" for name, bits in (("loss", self.loss), ("norm", self.norm)) if bits is not None]  # fmt: skip
        digests = [f"{name} {bits.hex()}" for name, bits in (("batch", self.batch), ("streams", self.streams)) if bits is not None]  # fmt: skip
        return f"step {self.step}: {', '.join([*known, *digests, f'epoch {self.epoch}', f'{self.samples} samples'])}"


@final
@attrs.frozen
class StateDigest:
    """The digest of one component of the state after a step.

    Attributes:
        step: optimizer steps done.
        component: its name; one above 24 bytes as its log has it, shortened with a digest.
        digest: of its bits, 16 bytes: those of its fingerprint.
    """

    step: int
    component: str
    digest: bytes


LogLine: TypeAlias = StepRecord | StateDigest


def float_bits_of(number: float) -> bytes:
    """The bits of a number as a float64; an int too large for one is infinite, because a log must not end a run.

    Examples:
        >>> float_bits_of(-0.0) == float_bits_of(0.0), float_of_bits(float_bits_of(0.1))
        (False, 0.1)
    """
    try:
        return _FLOAT.pack(float(number))
    except OverflowError:
        return _FLOAT.pack(float("inf") if number > 0 else float("-inf"))


def float_of_bits(bits: bytes) -> float:
    """The number of these bits."""
    found: float = _FLOAT.unpack(bits)[0]
    return found


def is_finite(bits: bytes | None) -> bool:
    """Whether the number of these bits is finite, or not known.

    Examples:
        >>> is_finite(float_bits_of(0.5)), is_finite(None), is_finite(float_bits_of(float("nan")))
        (True, True, False)
    """
    return bits is None or math.isfinite(float_of_bits(bits))
