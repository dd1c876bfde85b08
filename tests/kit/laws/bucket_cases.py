"""A bucket in memory for the machine of a manager: requests fail and machines die at them, as the disk's effects do."""

from contextlib import suppress
from types import SimpleNamespace

from kit.laws.manager_machine_cases import GatedStore
from trainfold.backends.stores.memory import Effect, SimulatedCrash
from trainfold.backends.stores.object_store.bucket import calls_of
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.writer_lease import LEASE

_NEVER_SECS = 1e6  # a renewal between two rules would come by the clock, at a request that no seed repeats


class FailingRequests:
    """The calls of obstore, or of what stands for it; ``_fault`` decides by the number of a request that changes something whether it fails, or the machine dies.

    A request at which the machine dies is carried out if its number is even.
    """

    def __init__(self, calls):
        self._calls, self.exceptions = calls, calls.exceptions
        self._attempts, self._fault, self._crash = 0, None, None

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            if self._crash is not None and args[1:2] == (LEASE,):
                raise self.exceptions.PermissionDeniedError("dead")  # of what is collected as garbage
            if self._crash is not None:
                raise SimulatedCrash(*self._crash.args)
            if verb in {"put", "delete"}:
                self._fail(verb, args[1], lambda: getattr(self._calls, verb)(*args, **kwargs))
            return getattr(self._calls, verb)(*args, **kwargs)

        return call

    def _fail(self, verb, key, carry_out):
        number, fault = self._attempts, self._fault
        error = None if fault is None else fault(number, Effect(verb, key if isinstance(key, str) else key[0]))
        self._attempts += 1
        if isinstance(error, OSError):
            raise self.exceptions.PermissionDeniedError(str(error))  # one that is not sent again
        if error is not None:
            self._crash = error
            if number % 2 == 0:
                with suppress(self.exceptions.BaseError):  # of a condition
                    carry_out()
            raise error


class GatedBucket(GatedStore):
    """A run in a bucket whose writes wait while its gate is closed, with the interface of a disk that fails and crashes."""

    def __init__(self, client):
        self.client = client
        self.store = ObjectStore(self.client, url="memory:", lease_secs=_NEVER_SECS)
        self.calls = calls_of(client)
        self.requests = self.store._bucket._api = FailingRequests(self.calls)
        super().__init__(_Inner(self.store, self.requests))

    @property
    def names(self):
        return [each["path"] for page in self.calls.list(self.client, None) for each in page]

    def content(self, name):
        try:
            return bytes(self.calls.get(self.client, name).bytes())
        except FileNotFoundError:
            return None

    def point_target(self, name):
        found = self.content(f".hints/{name}")
        return None if found is None else found.decode()

    def put(self, name, data):
        self.calls.put(self.client, name, data, use_multipart=False)

    def renew(self):
        """What the thread of the lease does once it is time, if the lease is held."""
        lease = self.store._lease
        if lease.is_held:
            times = iter([False, True])
            with suppress(SimulatedCrash):  # of a thread, whose end is not noticed
                lease._renew_until(SimpleNamespace(wait=lambda _: next(times)), lease._record.token)

    def after_crash(self, **_):
        """What the next process finds."""
        return GatedBucket(self.client)


class _Inner:
    """The store, and what decides which of its requests fail."""

    def __init__(self, store, requests):
        self.__dict__.update(_store=store, _requests=requests)

    def __getattr__(self, name):
        return getattr(self._requests if name in {"_attempts", "_fault", "_crash"} else self._store, name)

    def __setattr__(self, name, value):
        setattr(self._requests, name, value)
