"""What a `CheckpointManager` is given, checked: each mistake named with what was expected and the next move."""

from types import UnionType
from typing import Final

from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.protocol import LoadDecision
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.stores.direct_io import BUFFER_BYTES, BUFFERS
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.retention import Retention, check_keep_last, keep_last

_WRITERS_BYTES: Final = BUFFERS * BUFFER_BYTES


def check_run(run: object, kinds: type | UnionType) -> None:
    """Whether a run is a live one, or a state, where that is allowed."""
    if not isinstance(run, kinds):
        raise InvalidArgument(
            "CheckpointManager",
            expected="a live run" if kinds is Live else "a live run, or a state",
            found=shown(run),
            fix="give it what attach(model, optimizer, ...) returned",
        )


def check_decision(decision: object) -> None:
    """Whether it is a decision to load that a `CheckpointManager` has made."""
    if not isinstance(decision, LoadDecision):
        found, fix = shown(decision), "pass what should_load returned, or None"
    elif not decision:
        found, fix = shown(str(decision)), "start fresh, or look at why"
    elif decision.source not in ("newest", "step") or (decision.source == "step" and decision.step is None):
        found, fix = shown(str(decision)), "give it to the manager that has made it"
    else:
        return
    raise InvalidArgument("decision", expected="one of this manager's that can be loaded", found=found, fix=fix)


def check_source(requests: object) -> None:
    """Whether requests can come from there."""
    if not isinstance(requests, RequestSource):
        raise InvalidArgument("requests", expected="a source of requests, or None", found=shown(requests),
                              fix="such as SignalRequests() or StopFile(run)")  # fmt: skip


def retention_given(last: int | None, keep: Retention | None) -> Retention:
    """One rule of ``keep_last`` and ``keep``."""
    if keep is None:
        return keep_last(check_keep_last(last))
    policy = policy_given("keep", keep)
    return policy | keep_last(last) if check_keep_last(last) else policy


def policy_given(name: str, keep: object) -> Retention:
    """A policy of retention."""
    if not isinstance(keep, Retention):
        raise InvalidArgument(name, expected="a Retention, or None", found=shown(keep),
                              fix="such as keep_last(3) | keep_every(10_000)")  # fmt: skip
    return keep


def room_given(max_extra_bytes: int | None) -> int | None:
    """How much of what an async save may take is left for copies, beside the writer's own buffers."""
    if max_extra_bytes is None:
        return None
    count("max_extra_bytes", max_extra_bytes, least=0, expected="an int >= 0, or None",
          fix="0 makes updates wait; None lets a save copy what it must")  # fmt: skip
    return max(0, max_extra_bytes - _WRITERS_BYTES)


def one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """A word that is known."""
    if value not in known:
        raise InvalidArgument(f"CheckpointManager.{name}", expected=" or ".join(map(repr, known)), found=shown(value),
                              fix=f"pass {name}={known[0]!r}")  # fmt: skip
    return str(value)


def is_word_auto(every: object) -> bool:
    """Whether a cadence is the word ``"auto"``; any other word is refused, also one that is a number."""
    if isinstance(every, str) and every != "auto":
        raise InvalidArgument("CheckpointManager.every", expected="an int >= 1, 'auto', or None", found=shown(every),
                              fix="pass a number of optimizer steps, such as every=500; make one of a word with int(...)")  # fmt: skip
    return every == "auto"


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as such."""
    if type(value) is not bool:
        raise InvalidArgument(f"CheckpointManager.{name}", expected="True or False", found=shown(value),
                              fix=f"pass {name}=True or leave it out")  # fmt: skip
    return value
