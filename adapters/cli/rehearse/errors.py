"""The failures of a rehearsal, each with its own exit code."""

from trainfold.core.errors import TrainfoldError


class ResumeDiffers(TrainfoldError):
    """The program that was killed and resumed continued differently from the one that was not."""

    exit_code = 44


class ProgramFailed(TrainfoldError, has_lines=True):
    """The program failed by itself, or hung."""

    exit_code = 45


class NotRepeatable(TrainfoldError, has_lines=True):
    """The program does not repeat itself even when it is not killed, and no tolerance was given."""

    exit_code = 46


class NeverSaved(TrainfoldError):
    """The program saved nothing, so there was nothing to resume."""

    exit_code = 47


class NoDiskSpace(TrainfoldError):
    """The disk has no room for the checkpoints of a rehearsal."""

    exit_code = 49


class NeverResumed(TrainfoldError):
    """The program did not resume when it was started again beside its checkpoints, or ended before it could be killed."""

    exit_code = 48
