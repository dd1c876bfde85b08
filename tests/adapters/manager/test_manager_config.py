"""A manager from a config: only allowed modules are imported, only matching classes are built, each failure has its error."""

import inspect
import itertools
import sys
import textwrap

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.manager.config import (
    CALLS,
    CheckpointConfig,
    create_checkpoint_manager,
    manager_arguments,
)
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.manager.protocol import CheckpointManagerLike, LoadDecision, load_decision
from trainfold.backends.runs.api import plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import errors
from trainfold.core.errors import (
    InvalidArgument,
    ManagerIncomplete,
    ManagerNotAllowed,
    ManagerNotBuilt,
    ManagerNotFound,
    ManagerNotImportable,
    ManagerPathInvalid,
    ManagerSignatureMismatch,
    ManagerUnusable,
    RunLocked,
)
from trainfold.core.format.file_names import directory_of
from trainfold.core.state.state import Progress, TrainState

LIKE = TrainState(trainer=Progress())
WHOLE = """
from trainfold.adapters.manager.protocol import LoadDecision
from trainfold.core.save.triggers import Verdict

class Whole:
    def __init__(self, config, **extra):
        self.config, self.extra = config, extra
    def should_load(self, run, *, step=None): return LoadDecision(can_load=False, reason="nothing there")
    def should_save(self, run, *, is_last=False): return Verdict(save=is_last, stop=is_last)
    def save(self, run): return None
    def load(self, run, decision=None): return run
    def poll(self): return None
    def wait_staging(self): return None
    def close(self): return None
"""
OURS = ("ours.",)


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Writes modules of a package `ours` that can be imported while the test runs."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def write(source="", *, name="managers"):
        (tmp_path / "ours" / f"{name}.py").write_text(WHOLE + textwrap.dedent(source))

    yield write
    for name in [each for each in sys.modules if each.partition(".")[0] == "ours"]:
        del sys.modules[name]


def config_of(manager, **fields):
    return CheckpointConfig(run="runs/a", manager=manager, **fields)


def refusal(error, manager, **arguments):
    with pytest.raises(error) as raised:
        create_checkpoint_manager(config_of(manager), allow=OURS, **arguments)
    assert type(raised.value) is error, "each stage has its own"
    assert isinstance(raised.value, ManagerUnusable)
    assert raised.value.where == "CheckpointConfig.manager"
    return raised.value


# --- what works ------------------------------------------------------------------------------------------------------


def test_a_manager_of_ones_own_gets_the_config_with_its_own_fields(ours):
    """O02, O04: the subclass of the config itself, and any other arguments of the program."""
    ours()

    @attrs.frozen(kw_only=True)
    class Config(CheckpointConfig):
        allow = ("trainfold.", "ours.")
        bucket: str
        retries: int = 3

    config = Config(run="runs/a", manager="ours.managers.Whole", bucket="b")
    manager = create_checkpoint_manager(config, collectives="ranks")
    assert manager.config is config
    assert (manager.config.bucket, manager.config.retries, manager.extra) == ("b", 3, {"collectives": "ranks"})
    assert isinstance(manager, CheckpointManagerLike)


def test_a_class_that_can_be_made_from_a_config_is(ours):
    """O02: by its `from_config`, whatever its `__init__` takes."""
    ours("""
        class Made(Whole):
            def __init__(self, one, two):
                self.found = (one, two)
            @classmethod
            def from_config(cls, config, *, more=0):
                return cls(config.run, more)
    """)
    manager = create_checkpoint_manager(config_of("ours.managers.Made"), allow=OURS, more=7)
    assert manager.found == ("runs/a", 7)


def test_methods_may_be_static_or_of_the_class_and_take_more_than_is_given(ours):
    ours("""
        class Free(Whole):
            @staticmethod
            def poll(limit=1): return None
            @classmethod
            def close(cls, *args, **kwargs): return None
            def save(self, *args, **kwargs): return None
            def load(self, state, how=None, *, strict=True): return state
            def should_save(self, run, is_last=False, is_best=False): return None
    """)
    create_checkpoint_manager(config_of("ours.managers.Free"), allow=OURS)


def test_a_field_that_is_new_breaks_no_manager(ours):
    """O04: a manager gets the config object, never its fields as arguments."""
    ours()
    manager = create_checkpoint_manager(config_of("ours.managers.Whole", every=5, mode="async"), allow=OURS)
    assert manager.config.every == 5


def test_the_default_manager_has_an_argument_for_each_field():
    """O02: so that `CheckpointManager.from_config` can hand them on; and the defaults are the same."""
    parameters = inspect.signature(CheckpointManager).parameters
    for field in attrs.fields(CheckpointConfig):
        if field.name != "manager":
            assert field.name in parameters, field.name
            if field.name != "run":
                assert parameters[field.name].default == field.default, field.name
    full = {"every": 1, "every_secs": 2.0, "at_end": False, "keep_last": 3, "mode": "async", "contract": {"a": 1}}
    assert manager_arguments(CheckpointConfig(run="a", manager="b.c", **full)) == full
    assert manager_arguments(CheckpointConfig(run="a", at_end=True, keep_last=None)) == {}


@pytest.mark.parametrize("name", ["CheckpointManager", "DisabledManager"])
def test_the_managers_of_trainfold_are_made_from_a_config_and_can_be_called(name):
    """O01, O02, O07: each implements the protocol, and its calls work on a run."""
    store = MemoryStore()
    config = CheckpointConfig(run=store, every=2, keep_last=1, manager=f"trainfold.{name}")
    manager = create_checkpoint_manager(config, on_event=lambda event: None)
    assert isinstance(manager, CheckpointManagerLike)
    assert not manager.should_load(LIKE)
    state = TrainState(trainer=Progress(step=2))
    manager.should_save(state, is_last=True)
    manager.save(state)
    manager.wait_staging()
    manager.poll()
    decision = manager.should_load(LIKE)
    found = manager.load(LIKE, decision)
    manager.close()
    manager.close()
    if name == "CheckpointManager":
        assert (decision.can_load, decision.step, found.trainer.step) == (True, 2, 2)
    else:
        assert (decision.can_load, found, store.list()) == (False, LIKE, [])


# --- format, allow-list ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["", "Manager", ".Manager", "ours.", "ours..Manager", "ours managers.Whole", "ours.managers:Whole", "ours.1.Whole",
     "ours/managers.Whole", "../ours.Whole", "ours.class.Whole", "ours.managers.Whole()", None, 7, ["ours", "Whole"]],
)  # fmt: skip
def test_a_path_that_is_none_is_refused_before_all_else(path):
    """O02: this is the first stage."""
    refusal(ManagerPathInvalid, path)


@pytest.mark.parametrize(
    "path", ["oursevil.managers.Whole", "ours_evil.Whole", "os.system", "ourS.managers.Whole", "xours.a.B"]
)
def test_what_is_not_allowed_is_not_imported(path, monkeypatch):
    """U03, O02: `ours.` allows no package whose name only starts with `ours`; the import does not happen."""
    monkeypatch.setattr("trainfold.adapters.manager.config.import_module", lambda name: pytest.fail(f"imported {name}"))
    error = refusal(ManagerNotAllowed, path)
    assert "nothing was imported" in error.fix


@given(st.text(alphabet="abours._", max_size=12))
def test_whatever_the_path_only_what_is_below_a_prefix_is_imported(path):
    """U03: for every string, either it starts with the full name of an allowed package, or nothing is imported."""
    imported = []

    def importing(name):
        imported.append(name)
        raise ImportError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainfold.adapters.manager.config.import_module", importing)
        with pytest.raises(ManagerUnusable):
            create_checkpoint_manager(config_of(path), allow=("ours.", "a.b."))
    assert all(f"{name}.".startswith(("ours.", "a.b.")) for name in imported)
    assert not imported or path.startswith(("ours.", "a.b."))


@pytest.mark.parametrize(
    "allow", [("ours",), ("",), (".",), ("ours..",), "ours.", ("ours.", 7), ("ou rs.",), 7, (b"ours.",)]
)
def test_a_prefix_has_to_end_at_a_dot(allow):
    """U03: `pkg` would allow `pkgevil`, and an empty prefix would allow everything."""
    with pytest.raises(InvalidArgument, match="each ending with a dot"):
        create_checkpoint_manager(config_of("ours.managers.Whole"), allow=allow)


def test_a_config_file_cannot_allow_what_it_names():
    """U03: the prefixes belong to the class, which is code; a config field of that name has no effect."""
    with pytest.raises(TypeError, match="allow"):
        CheckpointConfig(run="a", manager="os.system", allow=("os.",))
    with pytest.raises(ManagerNotAllowed):
        create_checkpoint_manager(config_of("os.system"))

    @attrs.frozen(kw_only=True)
    class Careless(CheckpointConfig):
        allow: tuple[str, ...] = ()

    with pytest.raises(InvalidArgument, match="allow"):
        create_checkpoint_manager(Careless(run="a", manager="os.system", allow=("os.",)))


def test_none_may_be_allowed():
    with pytest.raises(ManagerNotAllowed, match="none is allowed"):
        create_checkpoint_manager(config_of("trainfold.CheckpointManager"), allow=())


@pytest.mark.parametrize("config", [None, {"run": "a"}, "runs/a", CheckpointConfig])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(InvalidArgument, match="CheckpointConfig"):
        create_checkpoint_manager(config)


# --- import, attribute -----------------------------------------------------------------------------------------------


def test_a_module_that_is_not_there_is_told_apart_from_one_that_fails(ours):
    """O02: each error has its cause and its own fix."""
    missing = refusal(ManagerNotImportable, "ours.nowhere.Whole")
    assert isinstance(missing.__cause__, ModuleNotFoundError)
    assert "correct the path" in missing.fix
    ours("import nothing_of_that_name", name="needy")
    needy = refusal(ManagerNotImportable, "ours.needy.Whole")
    assert isinstance(needy.__cause__, ModuleNotFoundError)
    assert "see the cause" in needy.fix
    for name, statement, cause in [
        ("broken", "1 / 0", ZeroDivisionError),
        ("quits", "raise SystemExit(3)", SystemExit),
        ("odd", "(", SyntaxError),
    ]:
        ours(statement, name=name)
        assert isinstance(refusal(ManagerNotImportable, f"ours.{name}.Whole").__cause__, cause)


def test_a_name_that_is_not_in_the_module_is_told_with_those_that_are(ours):
    """O02: also if the module has its own `__getattr__`."""
    ours()
    error = refusal(ManagerNotFound, "ours.managers.Whol")
    assert isinstance(error.__cause__, AttributeError)
    assert "['Whole']" in error.fix
    ours("def __getattr__(name): raise RuntimeError(name)", name="lazy")
    assert isinstance(refusal(ManagerNotFound, "ours.lazy.Whol").__cause__, RuntimeError)


# --- protocol, signatures --------------------------------------------------------------------------------------------


def test_every_method_that_is_missing_is_named_at_once(ours):
    """O02: and nothing is built."""
    ours("""
        class Poor:
            built = []
            def __init__(self, config): self.built.append(self)
            def save(self, run): return None
            close = None
    """)
    error = refusal(ManagerIncomplete, "ours.managers.Poor")
    assert "without should_load, should_save, load, poll, wait_staging, close" in error.found
    assert sys.modules["ours.managers"].Poor.built == []


def test_what_is_no_class_is_refused(ours):
    ours("made = Whole(None)\ndef function(config): return made")
    for name in ("made", "function"):
        assert refusal(ManagerIncomplete, f"ours.managers.{name}").expected == "a class"


@pytest.mark.parametrize(
    "declared",
    [
        "should_load(self, run, more, *, step=None)",
        "should_load(self, run)",
        "should_load(self, *, step=None)",
        "should_load(self, run, *, number=None)",
        "should_save(self, run, is_last, is_best)",
        "should_save(self, run)",
        "should_save(self, *, is_last=False)",
        "save(self)",
        "save(self, run, step)",
        "save(self, *, run)",
        "load(self)",
        "load(self, run)",
        "load(self, run, decision)",
        "load(self, run, *, decision=None)",
        "poll(self, timeout)",
        "poll()",
        "wait_staging(self, run)",
        "wait_staging()",
        "close(self, reason)",
        "close()",
    ],
)
def test_each_method_has_to_be_callable_as_it_is_called(ours, declared):
    """O02: parameters may have other names, but their number must match; `isinstance` checks none of this."""
    ours(f"class Wrong(Whole):\n    def {declared}: return None")
    found = refusal(ManagerSignatureMismatch, "ours.managers.Wrong").found
    assert "1 that cannot" in found
    assert f"  {declared[:-1]}" in found


@pytest.mark.parametrize("method", list(CALLS))
def test_a_method_that_would_have_to_be_awaited_is_refused(ours, method):
    """O02: the returned coroutine would be dropped, and nothing would be saved."""
    ours(f"class Wrong(Whole):\n    async def {method}(self, *args, **kwargs): return None")
    assert f"{method}: it is async" in refusal(ManagerSignatureMismatch, "ours.managers.Wrong").found


FORMS = {
    "a method": "{prefix}def {method}(self, *args, **kwargs): {body}",
    "of the class": "@classmethod\n    {prefix}def {method}(cls, *args, **kwargs): {body}",
    "static": "@staticmethod\n    {prefix}def {method}(*args, **kwargs): {body}",
    "a partial method": "{prefix}def _do(self, *args, **kwargs): {body}\n    {method} = functools.partialmethod(_do)",
    "a partial": "{prefix}def _do(*args, **kwargs): {body}\n    {method} = staticmethod(functools.partial(_do))",
    "twice partial": "{prefix}def _do(*args, **kwargs): {body}\n"
    "    {method} = functools.partialmethod(functools.partial(_do))",
    "cached": "@functools.cache\n    {prefix}def {method}(self, *args, **kwargs): {body}",
    "an object": "class Call:\n        {prefix}def __call__(self, *args, **kwargs): {body}\n    {method} = Call()",
    "bound to another": "class Other:\n        {prefix}def do(self, *args, **kwargs): {body}\n    {method} = Other().do",
    "wrapped": "{prefix}def _do(self, *args, **kwargs): {body}\n    @functools.wraps(_do)\n"
    "    {prefix}def {method}(self, *args, **kwargs): {body}",
}


@pytest.mark.parametrize("method", ["save", "poll", "should_load"])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_method_of_any_form_is_taken_unless_it_is_async_or_a_generator(ours, form, method):
    """O02: a call of an async or generator method has no effect, so nothing would be saved."""
    kinds = {"Plain": ("", "return None"), "Async": ("async ", "return None"), "Generator": ("", "yield"),
             "AsyncGenerator": ("async ", "yield")}  # fmt: skip
    declared = [
        f"class {name}(Whole):\n    " + FORMS[form].format(method=method, prefix=prefix, body=body)
        for name, (prefix, body) in kinds.items()
    ]
    ours("import functools\n" + "\n".join(declared))
    create_checkpoint_manager(config_of("ours.managers.Plain"), allow=OURS)
    for name, word in (("Async", "async"), ("Generator", "a generator"), ("AsyncGenerator", "async")):
        assert f"  {method}: it is {word}" in refusal(ManagerSignatureMismatch, f"ours.managers.{name}").found


def test_an_object_that_is_called_is_not_given_the_manager(ours):
    """O02: it is not a function, and so gets only the arguments."""
    ours("""
        import functools
        class Call:
            def __call__(self, run, decision=None): return run
        class Narrow:
            def __call__(self): return None
        class Good(Whole):
            load = Call()
            save = functools.partialmethod(lambda self, how, run: run, "fast")
        class Bad(Whole):
            load = Narrow()
    """)
    manager = create_checkpoint_manager(config_of("ours.managers.Good"), allow=OURS)
    assert manager.load("the run", None) == manager.save("the run") == "the run"
    assert "1 that cannot" in refusal(ManagerSignatureMismatch, "ours.managers.Bad").found


def test_a_wrapper_has_to_take_what_it_says_that_it_takes_and_may_wait_for_what_is_async(ours):
    """O02: `functools.wraps` shows the signature of the wrapped function, whatever the wrapper takes."""
    ours("""
        import asyncio, functools
        async def _load(self, run, decision=None): return run
        class Waits(Whole):
            @functools.wraps(_load)
            def load(self, *args): return asyncio.run(_load(self, *args))
        class Lies(Whole):
            load = functools.wraps(_load)(lambda self: None)
    """)
    manager = create_checkpoint_manager(config_of("ours.managers.Waits"), allow=OURS)
    assert manager.load("the run", None) == "the run"
    assert "1 that cannot" in refusal(ManagerSignatureMismatch, "ours.managers.Lies").found


def test_all_signatures_that_are_wrong_are_told_at_once_and_nothing_is_built(ours):
    """O02: the signature of its constructor is included."""
    ours("""
        class Wrong(Whole):
            built = []
            def __init__(self): self.built.append(self)
            def save(self): return None
            def poll(self, timeout): return None
    """)
    found = refusal(ManagerSignatureMismatch, "ours.managers.Wrong").found
    assert [line.partition("(")[0].strip() for line in found.splitlines() if line.startswith("  ")] == [
        "save",
        "poll",
        "Wrong",
    ]
    assert sys.modules["ours.managers"].Wrong.built == []
    ours("class Narrow(Whole):\n    def __init__(self, config): pass", name="narrow")
    assert "collectives" in refusal(ManagerSignatureMismatch, "ours.narrow.Narrow", collectives=1).found
    ours("class Other(Whole):\n    def from_config(self, config): pass", name="other")
    assert "from_config" in refusal(ManagerSignatureMismatch, "ours.other.Other").found


def test_the_protocol_and_the_calls_that_are_checked_are_the_same():
    """O01: a method in only one of the two would not be checked."""
    declared = [name for name in vars(CheckpointManagerLike) if not name.startswith("_")]
    assert declared == list(CALLS)
    for name, calls in CALLS.items():
        parameters = inspect.signature(getattr(CheckpointManagerLike, name)).parameters.values()
        for args, kwargs in calls:
            inspect.signature(getattr(CheckpointManagerLike, name)).bind(None, *args, **kwargs)
        used = {key for _, kwargs in calls for key in kwargs}
        assert used == {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


# --- construction ----------------------------------------------------------------------------------------------------


def test_what_fails_in_building_is_chained_and_what_is_ours_is_raised_as_it_is(ours):
    """O02: if the run is locked, the manager's class is not at fault."""
    ours("""
        from trainfold.core.errors import RunLocked
        class Fails(Whole):
            def __init__(self, config): raise KeyError("region")
        class Locked(Whole):
            def __init__(self, config): raise RunLocked("a", expected="b", found="c", fix="d")
        class Strange(Whole):
            @classmethod
            def from_config(cls, config): return config
    """)
    error = refusal(ManagerNotBuilt, "ours.managers.Fails")
    assert isinstance(error.__cause__, KeyError)
    with pytest.raises(RunLocked):
        create_checkpoint_manager(config_of("ours.managers.Locked"), allow=OURS)
    assert "made CheckpointConfig" in refusal(ManagerIncomplete, "ours.managers.Strange").found


def test_each_stage_has_an_error_of_its_own():
    """O02: no error is a subclass of another, so that a program can distinguish them."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ManagerUnusable)]
    stages = [kind for kind in kinds if kind is not ManagerUnusable]
    assert len(stages) == 7
    assert not any(issubclass(one, other) for one, other in itertools.permutations(stages, 2))


# --- decisions -------------------------------------------------------------------------------------------------------


def test_a_decision_to_load_says_whether_from_where_and_how():
    """O01: a manager's own decision class may have more fields."""
    yes = LoadDecision(
        can_load=True, checkpoint="step-00000007", step=7, source="peer", how="weights only", reason="asked for"
    )
    assert yes
    assert str(yes) == "load step-00000007 (peer, weights only): asked for"
    assert str(LoadDecision(can_load=False)) == "do not load"

    @attrs.frozen
    class Remote(LoadDecision):
        bucket: str = ""

    assert Remote(can_load=True, bucket="b").bucket == "b"


def test_a_decision_follows_the_plan_and_says_what_the_plan_says():
    """O01: the source, whether the load is exact, the skipped checkpoints, and every reason for a refusal."""
    store = MemoryStore()
    no = load_decision(plan(store, like=LIKE))
    assert (no.can_load, no.checkpoint, no.step, no.source) == (False, None, None, "newest")
    assert "CheckpointMissing" in no.reason
    for step in (7, 8):
        save(TrainState(trainer=Progress(step=step)), store)
    assert load_decision(plan(store, like=LIKE)) == LoadDecision(can_load=True, checkpoint=directory_of(8), step=8)
    asked = load_decision(plan(store, like=LIKE, step=7), step=7)
    assert (asked.step, asked.source, asked.how) == (7, "step", "exact")
    other = plan(store, like=LIKE, contract={"tokenizer": "v2"}, policy={"contract:tokenizer": "warn"})
    assert load_decision(other).how == "adapted"
    assert "tokenizer" in load_decision(other).reason
    missing = load_decision(plan(store, like=LIKE, step=9), step=9)
    assert (missing.can_load, missing.step, missing.source) == (False, 9, "step")


def test_nothing_is_run_by_importing_what_the_default_allows():
    """U03: within trainfold only the command-line program acts, and only if it is run as a program."""
    with pytest.raises(ManagerIncomplete):
        create_checkpoint_manager(config_of("trainfold.__main__.main"))
