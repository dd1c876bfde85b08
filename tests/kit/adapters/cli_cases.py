"""Helpers shared by the tests of cli."""

import functools
import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch

from trainfold.adapters.cli import main
from trainfold.adapters.cli.schema import names, schema_of
from trainfold.backends.runs.api import save
from trainfold.core.data.cursor import make_cursor
from trainfold.core.optim.schedule import wsd
from trainfold.core.state.state import Progress
from trainfold.core.step.init_state import init_state
from trainfold.core.step.optimizer import optimizer

EXPLAINED = ("expected", "found", "fix")


def state_at(step, *, seed=0, total=10):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    adamw = optimizer(torch.optim.AdamW, lr=1e-3)
    schedule = wsd(total, warmup_steps=1, decay_steps=2)
    extra = {"ema": {"w": torch.full((3,), 1.0)}}
    state = init_state(model, adamw, seed=0, schedule=schedule, dataset=make_cursor(100), extra=extra)
    return state.evolve(trainer=Progress(step=step, samples=8 * step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "a"
    for step in (2, 4, 6):
        save(state_at(step), run)
    return run


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "a", symlinks=True))


@pytest.fixture
def call(capsys):
    def call(*arguments, code=0):
        assert main([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture
def answered(call):
    def answered(*arguments, code=0):
        out, err = call(*arguments, "--json", code=code)
        found = json.loads(out)
        name = str(arguments[0])
        fits_its_schema(name if name in names() else "ls", found)  # every schema has the errors
        error = found.pop("error", None)
        assert (error is None) == (code == 0) == (err == "")
        assert error is None or (error["exit_code"] == code and all(error[part] for part in EXPLAINED))
        assert error is None or err.startswith(f"{error['kind']}: {error['where']}\n")
        return found, error

    return answered


@functools.cache
def validator_of(name):
    """What checks documents; the schema itself is checked once."""
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def fits_its_schema(name, document):
    """Check a document of JSON against the schema that the package has for it."""
    validator_of(name).validate(document)


def flip(path, offset=-1):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
