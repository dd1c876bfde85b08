"""`open_url`: the store of a run that a URL such as ``s3://bucket/runs/a`` names, with the credentials of the provider's own chain."""

import importlib.util
import os
import re
from configparser import ConfigParser, ParsingError
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from trainfold.backends.stores.object_store.errors.bucket_errors import raise_alone
from trainfold.backends.stores.object_store.errors.library_logs import hide_logins_of_aws
from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.open_filesystem import open_foreign_url
from trainfold.backends.stores.place import PROVIDERS, is_chain, shown_url, url_parts
from trainfold.core.errors import InvalidArgument

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}([^/]+)/*(.*)", re.DOTALL)
_REQUEST_SECS: Final = 30  # one request: below the lease's 30 s, so that none that a lost lease began ends after it
_RETRY_SECS: Final = 60
_SETTING: Final = {
    "s3": "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME",
}
_LOGINS: Final = frozenset({"aws_access_key_id", "credential_process", "credential_source", "login_session", "role_arn", "sso_session", "sso_start_url", "web_identity_token_file"})  # fmt: skip
_KEYS: Final = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_TOKEN"),
}  # fmt: skip
_NOT_IN_ADDRESS: Final = re.compile(r"""[\s"<>\\^`{|}\x7f]|[^\x00-\x7f].*@""")
_HAS_NO_LOGIN: Final = re.compile(r"(?:https?:/*)?[\w.-]*(?::[0-9]{1,5})?/*")
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ALLOW_HTTP: Final = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP"}
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})  # as the client reads it


def open_url(place: str) -> ObjectStore:
    """Open the store of a run in a bucket. Nothing is asked of the provider yet.

    The provider's environment variables are used (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``, such as ``AWS_ENDPOINT_URL``), then what its machines offer. Profiles of
    AWS are read by boto3, if it is installed. A scheme that is not one of these providers is looked for among the filesystems of fsspec.

    Raises:
        InvalidArgument: if obstore is not installed, or it is not such a URL, or has what may be secret.
    """
    if is_chain(place):
        raise InvalidArgument("run", expected="the URL of one store", found=f"{shown_url(place)!r}, a chain of them",
                              fix="name the last one, such as s3://bucket/runs/a: a cache may show what has been replaced; for anything else, pass a store of your own")  # fmt: skip
    named, _, rest = place.partition(":")
    found, is_foreign, is_secret = (
        _URL.match(place),
        named.lower() not in PROVIDERS,
        any(mark in place for mark in "@?#"),
    )
    if is_secret or (found is None and not is_foreign):
        shown = f"one of {named.lower()}:// with a name, a password or a query" if is_secret else repr(place)
        raise InvalidArgument("run", expected="a URL such as s3://bucket/runs/a", found=shown,
                              fix="leave out credentials and queries: they are taken from the provider's own chain")  # fmt: skip
    if is_foreign or found is None:
        return open_foreign_url(named.lower(), rest.strip("/"))
    scheme, bucket, prefix = PROVIDERS[named.lower()], found[2], _run_in(place)
    if not prefix:
        raise InvalidArgument(
            "run",
            expected="a prefix in the bucket, such as s3://bucket/runs/a",
            found=repr(place),
            fix="name the run: the top of a bucket cannot be one",
        )
    if importlib.util.find_spec("obstore") is None:
        raise InvalidArgument(
            "run",
            expected="obstore, which object stores need",
            found="it is not installed",
            fix="pip install 'trainfold[objectstore]'",
        )
    from obstore.exceptions import BaseError

    _check_environment(scheme)
    try:
        store = _store(scheme, bucket, prefix)
    except (BaseError, ValueError) as error:
        raise_alone(InvalidArgument("run", expected="a store that the provider's settings describe", found=without_secrets(error),
                                    fix=f"correct what its client reads in the environment, such as {_SETTING[scheme]}"))  # fmt: skip
    return ObjectStore(store, url=f"{found[1].lower()}://{bucket}/{prefix}")


def _run_in(place: str) -> str:
    """The name of a run in a bucket.

    Raises:
        InvalidArgument: for a part that no object of a run can have.
    """
    parts = url_parts(place)[2:]
    bad = next((part for part in parts if part == ".." or not part.isprintable()), None)
    if bad is not None:
        raise InvalidArgument("run", expected="the name of a run in the bucket, such as runs/a", found=f"{place!r}, with the part {bad!r}",
                              fix="leave out .. and characters that cannot be printed")  # fmt: skip
    return "/".join(parts)


def _check_environment(scheme: str) -> None:
    """Check the keys and addresses that the environment gives: with anything else, the client ends a request with a panic, or without a word of the reason.

    Raises:
        InvalidArgument: naming the variable.
    """
    for name in _KEYS.get(scheme, ()):
        if not os.environ.get(name, "").isprintable():
            raise InvalidArgument(name, expected="a text of one line", found="one with a line break, or another sign that cannot be printed",
                                  fix=f"set {name} without it: files of secrets often end with a line break")  # fmt: skip
    given = {name: os.environ[name] for name in _ENDPOINTS.get(scheme, ()) if name in os.environ}
    for name, value in given.items():
        if not _is_address(value):
            raise InvalidArgument(name, expected="an address such as http://127.0.0.1:9000", found=repr(value) if _HAS_NO_LOGIN.fullmatch(value) else "a text that is not shown, because it may hold a password",
                                  fix=f"write it with http:// or https://, a machine, a port of at most 65535, and a sign such as a quotation mark as %22, or unset {name}")  # fmt: skip
    if given and all(value.lower().startswith("http://") for value in given.values()) and not _is_http_allowed():
        name, allow = next(iter(given)), _ALLOW_HTTP[scheme]
        raise InvalidArgument(name, expected=f"an address with https://, or {allow}=true", found=repr(shown_url(given[name])),
                              fix=f"set {allow}=true if the network between this machine and that one is your own, or write https://")  # fmt: skip


def _is_http_allowed() -> bool:
    return any(os.environ.get(name, "").lower() in _TRUE for name in _ALLOW_HTTP.values())


def _is_address(value: str) -> bool:
    try:
        found = urlsplit(value)
        is_whole = found.scheme in {"http", "https"} and bool(found.hostname) and found.port != 0
    except ValueError:  # of a port
        return False
    return is_whole and not _NOT_IN_ADDRESS.search(value)


def _store(scheme: str, bucket: str, prefix: str) -> Any:
    from obstore import store as stores  # late: an extra

    options: dict[str, Any] = {
        "prefix": prefix,
        "client_options": {"timeout": timedelta(seconds=_REQUEST_SECS), "connect_timeout": timedelta(seconds=5)},
        "retry_config": {"retry_timeout": timedelta(seconds=_RETRY_SECS)},
    }
    if _is_http_allowed():
        options["client_options"]["allow_http"] = True
    if scheme == "gs":
        return stores.GCSStore(bucket, **options)
    if scheme == "az":
        return stores.AzureStore(bucket, **options)
    if _needs_profile():
        from obstore.auth.boto3 import Boto3CredentialProvider

        hide_logins_of_aws()
        try:
            options["credential_provider"] = Boto3CredentialProvider()
        except import_module("botocore.exceptions").BotoCoreError as error:  # such as a profile that is not there
            raise ValueError(error) from error
    return stores.S3Store(bucket, **options)


def _needs_profile() -> bool:
    """Whether AWS credentials, or how to get them, are in a file, which boto3 reads."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ:
        return False
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    if "AWS_PROFILE" not in os.environ and not file.exists() and not _is_default_configured():
        return False
    if importlib.util.find_spec("boto3") is None:
        raise InvalidArgument("run", expected="boto3, which reads profiles of AWS", found="it is not installed",
                              fix="pip install boto3; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")  # fmt: skip
    return True


def _is_default_configured() -> bool:
    """Whether the default profile of AWS's file of settings says how to log in; a region alone does not."""
    file = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    found = ConfigParser(interpolation=None, strict=False)
    # boto3 names a file that it cannot read, where a profile is asked for
    with suppress(OSError, ValueError, ParsingError):
        found.read_string(file.read_text(encoding="utf-8"))
    return found.has_section("default") and not _LOGINS.isdisjoint(found["default"])
