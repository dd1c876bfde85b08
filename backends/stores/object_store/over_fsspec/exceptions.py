"""The errors of a request, by the names that obstore gives them. A missing object is a FileNotFoundError."""


class BaseError(Exception):
    """A request failed."""


class GenericError(BaseError):
    """It may be sent again."""


class PermissionDeniedError(BaseError):
    """These credentials have no right to it."""


class UnauthenticatedError(BaseError):
    """There are no credentials, or wrong ones."""


class AlreadyExistsError(BaseError):
    """An object that was to be created is there."""


class PreconditionError(BaseError):
    """An object that was to be replaced has changed, or is gone."""


class NotSupportedError(BaseError):
    """The store has no such request."""
