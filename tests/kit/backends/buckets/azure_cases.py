"""A real server of Azure's blobs over HTTP, where `make buckets` has installed one, and runs in it."""

import base64
import datetime as dt
import hashlib
import hmac
import os
import shutil
import urllib.request

from obstore.store import AzureStore

from kit.backends.buckets.bucket_cases import impatient, new_name
from kit.backends.buckets.server import Server
from trainfold.backends.stores.object_store.object_store import ObjectStore

PROGRAM = shutil.which("azurite-blob", path=os.environ.get("TRAINFOLD_AZURITE", os.environ["PATH"]))
_ACCOUNT = "devstoreaccount1"  # that of every emulator, and its key
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class AzureServer(Server):
    """Azurite, in memory."""

    def command(self):
        return [PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent", "--skipApiVersionCheck", "--inMemoryPersistence"]  # fmt: skip

    def make_bucket(self):
        """Make the container; the client makes none."""
        date = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = f"x-ms-date:{date}\nx-ms-version:2023-11-03"
        text = "PUT" + "\n" * 12 + f"{headers}\n/{_ACCOUNT}/{_ACCOUNT}/bucket\nrestype:container"
        signed = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{_ACCOUNT}/bucket?restype=container", method="PUT",
            headers={**dict(line.split(":", 1) for line in headers.split("\n")), "Authorization": f"SharedKey {_ACCOUNT}:{signed}", "Content-Length": "0"},
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=10).close()


def azure_at(port, run=None):
    """A run in the container, by default one of its own."""
    run = new_name() if run is None else run
    return ObjectStore(azure_client(port, run), url=f"az://bucket/{run}")


def environ_of(port):
    """What a program needs to open ``az://bucket/...``."""
    return {"AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _KEY, "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}", "AZURE_ALLOW_HTTP": "true"}  # fmt: skip


def azure_client(port, run):
    """Of a run in the container."""
    return AzureStore(
        "bucket", prefix=run, account_name=_ACCOUNT, account_key=_KEY, endpoint=f"http://127.0.0.1:{port}/{_ACCOUNT}",
        **impatient(),
    )  # fmt: skip
