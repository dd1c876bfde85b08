"""What a rehearsal can end with, beside success: each has an exit code of its own."""

from trainfold.core.errors import TrainfoldError


class ResumeDiffers(TrainfoldError):
    """The program that was killed and resumed went on otherwise than the one that was not."""

    exit_code = 44


class ProgramFailed(TrainfoldError):
    """The program ended with an error of its own, or hung."""

    exit_code = 45


class NotRepeatable(TrainfoldError):
    """The program does not repeat itself even when it is not killed, and no tolerance was named."""

    exit_code = 46


class NeverSaved(TrainfoldError):
    """The program saved nothing, so there was nothing to resume."""

    exit_code = 47


class NoRoom(TrainfoldError):
    """The disk has no room for the checkpoints of a rehearsal."""

    exit_code = 49


class NeverResumed(TrainfoldError):
    """The program was started again beside its checkpoints and did not resume, or was over before it could be killed."""

    exit_code = 48
