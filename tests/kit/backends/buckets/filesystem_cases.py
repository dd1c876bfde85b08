"""Filesystems of fsspec over the servers of the tests, where `make buckets` has installed their packages."""

import asyncio
import importlib.util
from functools import cache

from kit.backends.buckets import azure_cases, bucket_cases, gcs_cases, s3_cases
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.stores import fsspec_store

LIBRARIES = ("s3fs", "gcsfs", "adlfs")
SERVERS = {"s3fs": s3_cases.S3Server, "gcsfs": gcs_cases.GcsServer, "adlfs": azure_cases.AzureServer}


def lacks(library):
    """What a machine without it has to say; "" if all is there."""
    if importlib.util.find_spec(library) is None:
        return f"needs {library}: `make buckets` installs it"
    program = {"gcsfs": gcs_cases.PROGRAM, "adlfs": azure_cases.PROGRAM}.get(library, "moto")
    return "" if program else f"needs the server of {library}: `make buckets` installs it"


@cache
def filesystem(library, port):
    """Of a library, over the server at a port; it tries again at once."""
    where = f"http://127.0.0.1:{port}"
    if library == "s3fs":
        import s3fs.core

        s3fs.core.asyncio = importlib.import_module("aiobotocore.endpoint").asyncio = _Quick()
        keys = s3_cases.KEYS
        return s3fs.S3FileSystem(
            key=keys["AWS_ACCESS_KEY_ID"], secret=keys["AWS_SECRET_ACCESS_KEY"], endpoint_url=where,
            client_kwargs={"region_name": keys["AWS_REGION"]}, config_kwargs={"retries": {"max_attempts": 12}},
        )  # fmt: skip
    if library == "gcsfs":
        import gcsfs.core
        import gcsfs.retry

        gcsfs.retry.asyncio = _Quick()
        return gcsfs.core.GCSFileSystem(endpoint_url=where, token="anon", project="test")
    import adlfs

    account, key = azure_cases._ACCOUNT, azure_cases._KEY
    found = adlfs.AzureBlobFileSystem(
        connection_string=f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={where}/{account};"
    )
    policy = found.service_client._config.retry_policy
    policy.initial_backoff = policy.increment_base = policy.random_jitter_range = 0
    policy.total_retries = 12
    return found


class _Quick:
    """The module asyncio, which sleeps for a moment only."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(secs):
        await asyncio.sleep(min(secs, 0.002))


def run_at(library, port, run=None):
    """A run in the bucket of a server, by default one of its own."""
    run = bucket_cases.new_name() if run is None else run
    return fsspec_store(filesystem(library, port), f"bucket/{run}")


def client_at(library, port):
    """The prefix of a run of its own."""
    return FsspecPrefix(filesystem(library, port), f"bucket/{bucket_cases.new_name()}")
