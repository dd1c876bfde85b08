"""`BucketErrors`: the errors of an object store's client, with names, what to do, and nothing secret.

None has the client's own error as its cause, which a traceback and a log would show: that has the whole answer, and providers repeat tokens there.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

from trainfold.backends.stores.place import without_logins
from trainfold.core.errors import (
    CheckpointUnreadable,
    InvalidArgument,
    NotWritable,
    SaveFailed,
)

_QUERY: Final = re.compile(r"\?[^\s\"')]*")  # of an address in an error's text: it may hold a signature
_BODY: Final = re.compile(r"<[?!A-Za-z].*|\{.*", re.DOTALL)  # the answer of a provider, or of a gateway
_CODE: Final = re.compile(r"<Code>([^<]*)")
_SAID: Final = re.compile(
    r"""<(?:Code|Message|title)>([^<]*)|"(?:code|message|error|error_description)"\s*:\s*"?([^"{},]*)"""
)
_REJECTED: Final = re.compile(  # by their codes, where the client has no class for them, as of a list
    r"\b401 Unauthorized|\b(ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed)\b"
)
_SKEWED: Final = re.compile(r"\bRequestTimeTooSkewed\b")
_ELSEWHERE: Final = re.compile(r"\b(AuthorizationHeaderMalformed|PermanentRedirect)\b|redirect without LOCATION")
_DENIED: Final = re.compile(r"\b403 Forbidden|\b(AccessDenied|AuthorizationPermissionMismatch)\b")
_TEXT_LIMIT: Final = 400
_NO_BUCKET: Final = "create it, or correct its name"
_MAY_WRITE: Final = "give these credentials the right to write and delete there, or save elsewhere"
_MAY_READ: Final = "give these credentials the right to read and list there (without s3:ListBucket, S3 denies what is not there too); this does not prove damage"
_RENEW: Final = "renew or correct these credentials"
_SET_CLOCK: Final = "set this machine's clock: a store refuses what is signed at another time than its own"
_SET_REGION: Final = "set AWS_REGION to the region of the bucket"


class _Chain(NamedTuple):
    """Where a provider's client looks for credentials.

    Attributes:
        last: the path of the machine's own service, which is asked if nothing is set.
        tried: what is looked for before.
        fix: what to set.
    """

    last: str
    tried: str
    fix: str


_CHAINS: Final = (
    _Chain(
        r"latest/(api/token|meta-data/)",
        "no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, no profile, no web identity, no role of a container",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or AWS_PROFILE, which boto3 reads; or give the machine a role",
    ),
    _Chain(
        r"computeMetadata/",
        "no file of an account in GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, no login of gcloud",
        "set GOOGLE_APPLICATION_CREDENTIALS to the file of an account; or run `gcloud auth application-default login`; or give the machine an account",
    ),
    _Chain(
        r"(metadata/identity/|msi/token)",
        "no AZURE_STORAGE_ACCOUNT_KEY, no AZURE_STORAGE_SAS_TOKEN, no AZURE_CLIENT_ID with a secret or a token, no AZURE_USE_AZURE_CLI",
        "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; or log in with `az login` and set AZURE_USE_AZURE_CLI=true; or give the machine an identity",
    ),
)


class NotThere(SaveFailed):
    """There is no bucket, or no object to replace."""


class NoCredentials(SaveFailed):
    """There are none, so nothing was put."""


class Refused(Exception):
    """A conditional put was refused."""


@final
class BucketErrors:
    """The errors of one bucket.

    Args:
        kinds: the client's exceptions, as `obstore.exceptions` has them.
        url: the location in messages.
    """

    def __init__(self, kinds: Any, url: str) -> None:
        self._kinds = kinds
        self._url = url

    def where(self, key: str) -> str:
        """An object in messages."""
        return f"{self._url}/{key}" if key else self._url

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Name what a read of an object raises."""
        kinds = self._kinds
        try:
            yield
        except (
            kinds.BaseError,
            PermissionError,
            FileNotFoundError,
        ) as error:  # the last one is of a list, and so of the bucket
            raise self.unreadable(key, error) from None

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Name what a change of an object raises.

        Raises:
            Refused: if the condition of a put does not hold.
            NotThere: if there is no bucket, or no object to replace.
            NoCredentials: if nothing gives any.
        """
        kinds = self._kinds
        try:
            yield
        except (kinds.AlreadyExistsError, kinds.PreconditionError, FileExistsError):
            raise Refused from None
        except FileNotFoundError as error:  # of a bucket; or of an object that is to be replaced
            raise NotThere(self.where(key), expected="a bucket", found=without_secrets(error), fix=_NO_BUCKET) from None
        except (kinds.NotSupportedError, NotImplementedError) as error:
            raise InvalidArgument(
                self.where(key),
                expected="a store with conditional puts",
                found=without_secrets(error),
                fix="use a provider that has them: without them two writers cannot be distinguished",
            ) from None
        except (kinds.BaseError, PermissionError) as error:
            if said := missing_credentials(error):
                raise NoCredentials(self.where(key), **said) from None
            if said := self._refusal(error, "write", _MAY_WRITE):
                raise NotWritable(self.where(key), **said) from None
            raise SaveFailed(
                self.where(key),
                expected="the planned bytes to be stored",
                found=without_secrets(error),
                fix="look at the network and at the store; earlier checkpoints are intact",
            ) from None

    def unreadable(self, key: str, error: BaseException) -> CheckpointUnreadable:
        """What says that an object cannot be read now. It may be there though it is denied."""
        if said := missing_credentials(error):
            return CheckpointUnreadable(self.where(key), **said)
        if said := self._refusal(error, "read", _MAY_READ):
            return CheckpointUnreadable(self.where(key), **said)
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            return CheckpointUnreadable(
                self.where(key), expected="a bucket", found=without_secrets(error), fix=_NO_BUCKET
            )
        return CheckpointUnreadable(
            self.where(key),
            expected="bytes from the store",
            found=without_secrets(error),
            fix="look at the network and at the store, and try again; this does not prove damage",
        )

    def _refusal(self, error: BaseException, verb: str, fix: str) -> dict[str, str] | None:
        """The ``expected``, ``found`` and ``fix`` of a provider's refusal; None of any other error."""
        kinds, found = self._kinds, without_secrets(error)
        if _SKEWED.search(found):
            return {"expected": "a request with the time of the store", "found": found, "fix": _SET_CLOCK}
        if _ELSEWHERE.search(found):
            return {"expected": "the region of the bucket", "found": found, "fix": _SET_REGION}
        if isinstance(error, kinds.UnauthenticatedError) or _REJECTED.search(found):
            return {"expected": "credentials that the store takes", "found": found, "fix": _RENEW}
        if isinstance(error, kinds.PermissionDeniedError | PermissionError) or _DENIED.search(found):
            return {"expected": f"the right to {verb}", "found": found, "fix": fix}
        return None

    def is_final(self, error: BaseException) -> bool:
        """Whether a second try soon after would end alike."""
        return missing_credentials(error) is not None or self._refusal(error, "read", "") is not None


def missing_credentials(error: BaseException) -> dict[str, str] | None:
    """The ``expected``, ``found`` and ``fix`` of an error about credentials; None if an error is about anything else.

    Examples:
        >>> said = missing_credentials(OSError("Error performing PUT http://169.254.169.254/latest/api/token in 1s"))
        >>> said["fix"].partition(";")[0]
        'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY'
        >>> missing_credentials(OSError("Error performing PUT http://host/bucket/latest/api/token")) is None
        True
    """
    text = str(error)
    chain = next((each for each in _CHAINS if re.search(rf"https?://[^/\s]+/{each.last}", text)), None)
    if chain is None:
        return None
    found = f"{chain.tried}; and asked last, the machine itself gives none: {without_secrets(error)}"
    return {"expected": "credentials", "found": found, "fix": chain.fix}


def without_secrets(error: BaseException) -> str:
    """The text of an error without what may be secret in it, and without its many lines of detail.

    Of an answer it has the code and the message; of one that rejects the credentials only the code.

    Examples:
        >>> without_secrets(OSError('GET http://h/a?sig=x: 403: <?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>No</Message></Error>'))
        'GET http://h/a?… 403: AccessDenied: No'
        >>> without_secrets(OSError('403 Forbidden: {"error": {"code": 403, "message": "no access", "token": "ya29.x"}}'))
        '403 Forbidden: 403: no access'
    """
    lines = [line for line in str(error).split("\n\nDebug source:")[0].splitlines() if line.strip()]
    text = _BODY.sub(lambda body: _said(body[0]) or "…", " ".join(lines))
    return _QUERY.sub("?…", without_logins(text))[:_TEXT_LIMIT]


def _said(body: str) -> str:
    code = _CODE.search(body)
    if code is not None and _REJECTED.search(code[1]):
        return code[1]
    return ": ".join(said for found in _SAID.findall(body) if (said := "".join(found).strip()))
