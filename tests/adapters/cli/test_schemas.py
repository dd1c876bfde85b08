"""Every JSON document that the command line prints, and every manifest, matches the schema in the package."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
from kit.adapters import cli_cases
from kit.adapters.cli_cases import fits_its_schema

from trainfold.adapters.cli.app import app
from trainfold.adapters.cli.schema import names, schema_of
from trainfold.backends.runs.api import save
from trainfold.core.data.cursor import make_cursor
from trainfold.core.evaluate.suite import Tally
from trainfold.core.exact.sum import exact_zero
from trainfold.core.state.state import Opaque, Progress, TrainState

saved = cli_cases.saved
run = cli_cases.run
call = cli_cases.call
answered = cli_cases.answered

WITHOUT_JSON = {"completion", "schema"}


def test_there_is_a_schema_for_each_command_with_json_and_for_the_manifest():
    """R03: a program that reads the output has a contract to read it by."""
    commands = {name for name in app if not name.startswith("-")}
    assert set(names()) == (commands - WITHOUT_JSON) | {"manifest"}
    for name in names():
        schema = schema_of(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["title"]


def test_real_output_of_every_command_is_held_against_its_schema(root):
    """R03: no schema is left to be checked by itself alone; this looks for the tests that run the command."""
    text = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    checked = set(re.findall(r'(?:answered|fits_its_schema)\(\s*"(\w+)"', text))
    assert set(names()) <= checked


def test_the_schemas_of_a_command_are_listed_and_printed(call):
    listed = call("schema")[0]
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(names())
    assert json.loads(call("schema", "ls")[0]) == schema_of("ls")
    _, err = call("schema", "lss", code=2)
    assert "one of bisect, collect, convert, copy" in err


def test_a_schema_refuses_what_a_command_does_not_print(answered, run):
    """The schemas are strict, so that a field that is renamed or dropped is found."""
    found, _ = answered("ls", run)
    for broken in (
        {**found, "more": 1},
        {**found, "run": 3},
        {key: found[key] for key in found if key != "newest"},
        {},
    ):
        with pytest.raises(jsonschema.ValidationError):
            fits_its_schema("ls", broken)


def test_what_refused_commands_print_fits_too(answered, run, tmp_path):
    for command in ("ls", "plan", "verify", "inspect"):
        answered(command, tmp_path / "nothing", code=11)
    cli_cases.flip(next((run / "step-00000006").glob("model-*")))
    answered("verify", run, code=14)
    answered("diff", run / "step-00000002", run / "step-00000004", code=3)
    answered("plan", run, "--mtbf", "12h", "--save", "0.2s", "--step-time", "1s")
    answered("prune", run, code=2)


def everything():
    """A state with a value of each kind that the format has."""
    extra = {
        "scalars": {
            "big": 2**70,
            "inf": float("inf"),
            "text": "x",
            "bytes": b"\0",
            "none": None,
            "yes": True,
            "real": 0.5,
        },
        "numpy": {"array": torch.ones(2).numpy(), "scalar": torch.ones(1).numpy()[0]},
        "containers": [(1, 2), {3: {"w": torch.zeros(2)}}, {}],
        "tally": Tally({"loss": exact_zero()}, 1, {"loss": "Sum()"}, complete=False, next_index=-1),
        "opaque": Opaque({"position": 3}),
    }
    return TrainState(trainer=Progress(step=3), dataset=make_cursor(10), extra=extra)


def test_manifests_fit_their_schema(run, root, tmp_path):
    """U05: manifests of this trainfold, and the oldest ones that it still reads."""
    save(everything(), tmp_path / "everything")
    found = [*run.glob("*/manifest.json"), *(tmp_path / "everything").glob("*/manifest.json")]
    found += list((root / "tests" / "compat").rglob("manifest.json"))
    assert len(found) > 5
    for path in found:
        fits_its_schema("manifest", json.loads(path.read_bytes()))


def test_a_schema_of_the_manifest_refuses_what_is_none(run):
    document = json.loads((run / "step-00000006" / "manifest.json").read_bytes())
    document["components"][0]["node"] = {"pickle": "x"}
    with pytest.raises(jsonschema.ValidationError):
        fits_its_schema("manifest", document)


def test_the_schemas_lie_in_the_package():
    """They are files beside the module, and a wheel contains them too."""
    folder = Path(schema_of.__code__.co_filename).parent / "schemas"
    assert {path.name for path in folder.iterdir()} == {f"{name}.schema.json" for name in names()}
