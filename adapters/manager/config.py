"""`CheckpointConfig` and `create_checkpoint_manager`: build a manager from a config, which may name your own class.

A config is data, and data must not run code that the program did not allow. So the class must be under a prefix that the program
allows, not the config; and it is checked closely before it is built.
"""

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar, Final, Literal

import attrs

from trainfold.adapters.manager.protocol import CheckpointManagerLike
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import (
    InvalidArgument,
    ManagerIncomplete,
    ManagerNotAllowed,
    ManagerNotBuilt,
    ManagerNotFound,
    ManagerNotImportable,
    ManagerPathInvalid,
    ManagerSignatureMismatch,
    TrainfoldError,
    error_text,
)
from trainfold.core.json_values import shown
from trainfold.core.resume.drift import DriftAction
from trainfold.core.save.replicas import Level
from trainfold.core.save.retention import Retention

_WHERE: Final = "CheckpointConfig.manager"
# stands for a run or a decision: `bind` checks only how many arguments there are and their names
_RUN: Final = object()
CALLS: Final[Mapping[str, tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]]] = {
    "should_load": (((_RUN,), {}), ((_RUN,), {"step": 7})),
    "should_save": (((_RUN,), {}), ((_RUN,), {"is_last": True})),
    "save": (((_RUN,), {}),),
    "load": (((_RUN,), {}), ((_RUN, _RUN), {})),
    "poll": (((), {}),),
    "wait_staging": (((), {}),),
    "close": (((), {}),),
}
"""How trainfold calls each method of a manager."""


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """What a checkpoint manager should do. Subclass it to add fields: your manager gets the subclass.

    Nothing is checked here: the manager checks its arguments when it is made. A manager ignores fields that it does not know, so
    that a new field breaks no manager.

    Attributes:
        allow: which managers may be named: prefixes of dotted paths, each ending with a dot. It belongs to the class and is not a
            field, so that no file that a config is read from can widen it.
        run: a directory, or a store.
        every: save at each multiple of so many optimizer steps; ``"auto"`` for a chosen cadence; None for no such cadence.
        every_secs: save after so many seconds.
        at_end: whether the last state is saved.
        start_over: whether the run starts from the beginning on purpose, and leaves its checkpoints behind.
        keep_last: keep so many of the newest checkpoints; 0 for all, and so does None unless ``keep`` is given.
        keep: what to keep, or what else.
        keep_left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
        mode: ``"sync"`` or ``"async"``.
        max_extra_bytes: memory that an asynchronous save may take beside the state; None for as much as the state.
        hold_check: whether an asynchronous save looks for writers that neither hooks nor version counters show.
        check_replicas: ``"none"``, ``"quick"``, ``"tensor"`` or ``"full"``: how much is compared of what all ranks should have alike; a number of steps:
            everything, each so many of them.
        reuse_unchanged: whether a save writes only the leaves that have changed, and refers to an earlier checkpoint for the others.
        when_busy: ``"wait"`` or ``"skip"``: what a save does while another one is under way.
        components: what is saved and restored; None for all.
        policy: what to do about each kind of difference at a resume.
        contract: what must be equal at a resume.
        record: write a flight log and a journal, with digests of the state each so many steps; None for none.
        manager: the dotted path of the manager's class.

    Examples:
        >>> @attrs.frozen(kw_only=True)
        ... class Ours(CheckpointConfig):
        ...     allow = ("trainfold.", "ours.checkpoints.")
        ...     bucket: str
        >>> Ours(run="runs/a", bucket="b").every
        'auto'
    """

    allow: ClassVar[tuple[str, ...]] = ("trainfold.",)

    run: str | Path | Store
    every: int | Literal["auto"] | None = "auto"
    every_secs: float | None = None
    at_end: bool = True
    start_over: bool = False
    keep_last: int | None = None
    keep: Retention | None = None
    keep_left_behind: Retention | None = None
    mode: Literal["sync", "async"] = "sync"
    max_extra_bytes: int | None = None
    hold_check: bool = False
    check_replicas: Level | int = "quick"
    reuse_unchanged: bool = False
    when_busy: Literal["wait", "skip"] = "wait"
    components: Sequence[str] | None = None
    policy: Mapping[str, DriftAction] | None = None
    contract: Mapping[str, Any] | None = None
    record: int | None = None
    manager: str = "trainfold.CheckpointManager"


def manager_arguments(config: CheckpointConfig) -> dict[str, Any]:
    """The keyword arguments of a manager that a config sets: those that differ from the default, without ``run`` and ``manager``.

    Fields of a subclass are left out: the manager that knows them reads them from the config.

    Examples:
        >>> manager_arguments(CheckpointConfig(run="runs/a", every=500))
        {'every': 500}
    """
    known = [field for field in attrs.fields(CheckpointConfig) if field.name not in {"run", "manager"}]
    given = {field.name: getattr(config, field.name) for field in known}
    return {field.name: given[field.name] for field in known if given[field.name] != field.default}


def create_checkpoint_manager(
    config: CheckpointConfig, *, allow: Collection[str] | None = None, **extra: Any
) -> CheckpointManagerLike:
    """Build the manager that a config names.

    It checks, in this order and each with its own error: the path's format, the allow-list, the import, the class, its methods,
    their signatures, the construction. It imports only what is allowed, and builds only what can be called as trainfold calls
    it. The class gets the config itself: ``cls.from_config(config, **extra)`` if it has such a class method, else
    ``cls(config, **extra)``.

    Args:
        config: the config, or a subclass of yours.
        allow: prefixes of the paths that may be named, each ending with a dot; None for those of the config's class.
        extra: further arguments of the manager that a config cannot hold, such as ``requests``, ``on_event`` and ``collectives``.

    Returns:
        The manager, open.

    Raises:
        InvalidArgument: for something other than a config, or an invalid prefix.
        ManagerPathInvalid: if ``config.manager`` is not a dotted path.
        ManagerNotAllowed: if it begins with none of the prefixes.
        ManagerNotImportable: if its module cannot be imported.
        ManagerNotFound: if the module has no such name.
        ManagerIncomplete: if that is not a class, or methods are missing.
        ManagerSignatureMismatch: if methods cannot be called as trainfold calls them.
        ManagerNotBuilt: if it raises when it is built. Errors of trainfold, such as `RunLocked`, are raised as they are.

    Examples:
        >>> create_checkpoint_manager(CheckpointConfig(run="runs/a", manager="os.system"))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.ManagerNotAllowed: CheckpointConfig.manager: expected a path that begins with trainfold., found \
'os.system'; where the class is to be trusted, pass allow=(..., 'os.') in the program; nothing was imported
    """
    if not isinstance(config, CheckpointConfig):
        raise InvalidArgument("config", expected="a CheckpointConfig", found=shown(config),
                              fix="make one, or subclass it for fields of your own")  # fmt: skip
    module, name = _split(config.manager)
    _check_allowed(config.manager, module, _prefixes(type(config).allow if allow is None else allow))
    cls = _attribute(_imported(module, config.manager), name, config.manager)
    _check_protocol(cls, config.manager)
    build: Callable[..., Any] = cls.from_config if hasattr(cls, "from_config") else cls
    _check_signatures(cls, build, config, extra)
    return _built(build, config, extra)


def _split(path: object) -> tuple[str, str]:
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() and not iskeyword(part) for part in parts):
        raise ManagerPathInvalid(_WHERE, expected="a path such as 'package.module.Class'", found=shown(path),
                                 fix="write the module, a dot, and the class")  # fmt: skip
    return ".".join(parts[:-1]), parts[-1]


def _prefixes(allow: object) -> tuple[str, ...]:
    prefixes = tuple(allow) if isinstance(allow, Collection) and not isinstance(allow, str | bytes) else (allow,)
    for prefix in prefixes:
        parts = prefix[:-1].split(".") if isinstance(prefix, str) else [""]
        if isinstance(allow, str) or not str(prefix).endswith(".") or not all(part.isidentifier() for part in parts):
            raise InvalidArgument("allow", expected="prefixes such as ('package.',), each ending with a dot", found=shown(allow),
                                  fix="end it with a dot: 'pkg' would let 'pkgevil' in")  # fmt: skip
    return prefixes


def _check_allowed(path: str, module: str, prefixes: tuple[str, ...]) -> None:
    if not path.startswith(prefixes):
        raise ManagerNotAllowed(
            _WHERE,
            expected=f"a path that begins with {' or '.join(prefixes) or 'nothing: none is allowed'}",
            found=repr(path),
            fix=f"where the class is to be trusted, pass allow=(..., '{module}.') in the program; nothing was imported",
        )


def _imported(module: str, path: str) -> Any:
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        fix = "correct the path, or install the package" if missing else f"see the cause: import {module} in a shell"
        raise ManagerNotImportable(_WHERE, expected=f"a module {module}, for {path!r}", found=error_text(error), fix=fix) from error  # fmt: skip


def _attribute(module: Any, name: str, path: str) -> Any:
    try:
        return getattr(module, name)
    except Exception as error:
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, classes, n=3) or sorted(classes)[:8]
        raise ManagerNotFound(_WHERE, expected=f"{name} in {module.__name__}, for {path!r}", found=error_text(error),
                              fix=f"correct the name; there are {near}") from error  # fmt: skip


def _check_protocol(cls: Any, path: str) -> None:
    if not isinstance(cls, type):
        raise ManagerIncomplete(_WHERE, expected="a class", found=f"{path} = {shown(cls)}", fix="name the class")
    missing = [method for method in CALLS if not callable(getattr(cls, method, None))]
    if missing:
        raise ManagerIncomplete(
            _WHERE,
            expected=f"the methods {', '.join(CALLS)}",
            found=f"{path} without {', '.join(missing)}",
            fix="add them: see trainfold.adapters.manager.protocol.CheckpointManagerLike",
        )


def _check_signatures(cls: type, build: Callable[..., Any], config: CheckpointConfig, extra: Mapping[str, Any]) -> None:
    found = {method: inspect.getattr_static(cls, method) for method in CALLS}
    wrong = [
        complaint
        for method, calls in CALLS.items()
        if (
            complaint := _awaited(method, found[method])
            or _complaint(method, getattr(cls, method), [((*_self(found[method]), *a), k) for a, k in calls])
        )
    ]
    name = "from_config" if build is not cls else cls.__name__
    wrong += filter(None, [_awaited(name, build) or _complaint(name, build, [((config,), dict(extra))])])
    if wrong:
        raise ManagerSignatureMismatch(
            _WHERE,
            expected="methods that can be called as trainfold calls them",
            found=f"{len(wrong)} that cannot:\n" + "\n".join(f"  {each}" for each in wrong) + "\n",
            fix="give them the parameters of trainfold.adapters.manager.protocol.CheckpointManagerLike",
        )


def _self(found: object) -> tuple[Any, ...]:
    """What a method needs before its arguments when it is called on its class, where it stands as ``found``."""
    is_bound = isinstance(found, classmethod | staticmethod | MethodType) or not hasattr(type(found), "__get__")
    return () if is_bound else (_RUN,)


def _awaited(name: str, found: object) -> str | None:
    """What is wrong with a function that does nothing when it is called, or None."""
    function: Any = _innermost(found)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"{name}: it is async, and trainfold calls it without await"
    if inspect.isgeneratorfunction(function):
        return f"{name}: it is a generator, and trainfold does not iterate over what it calls"
    return None


def _innermost(found: object) -> object:
    """The function that runs in the end. A wrapper runs itself: it may wait for the function that it wraps."""
    if isinstance(found, functools.partial | functools.partialmethod | functools.singledispatchmethod):
        return _innermost(found.func)
    if isinstance(found, classmethod | staticmethod | MethodType):
        return _innermost(found.__func__)
    if isinstance(found, FunctionType | type):
        return found
    if hasattr(found, "__wrapped__"):  # such as a cache of results
        return _innermost(found.__wrapped__)
    call = getattr(type(found), "__call__", None)  # noqa: B004 - the function of a callable object
    return call if isinstance(call, FunctionType) else found


def _complaint(
    name: str, function: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> str | None:
    """What is wrong with a signature, or None. Of a wrapper, both its own signature and the one that it shows are checked."""
    try:
        signatures = [inspect.signature(function)]
        if isinstance(function, FunctionType | MethodType):
            signatures.append(inspect.signature(function, follow_wrapped=False))
    except (TypeError, ValueError) as error:
        return f"{name}: its signature cannot be read: {error}"
    for signature, (args, kwargs) in itertools.product(signatures, calls):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return f"{name}{signature}: {error}"
    return None


def _built(build: Callable[..., Any], config: CheckpointConfig, extra: Mapping[str, Any]) -> CheckpointManagerLike:
    try:
        manager = build(config, **extra)
    except TrainfoldError:
        raise
    except (Exception, SystemExit) as error:  # as in its import: what ends a tool must not end the program
        raise ManagerNotBuilt(_WHERE, expected=f"a manager of {config.manager!r}", found=error_text(error),
                              fix="see the cause") from error  # fmt: skip
    if not isinstance(manager, CheckpointManagerLike):
        raise ManagerIncomplete(_WHERE, expected="a manager", found=f"{config.manager} made {shown(manager)}",
                                fix="return the manager from from_config")  # fmt: skip
    return manager
