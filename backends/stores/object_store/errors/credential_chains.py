"""`missing_credentials`: what an error says of a provider's chain of credentials, when nothing in it gives any."""

import re
from typing import Final, NamedTuple

from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets


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
