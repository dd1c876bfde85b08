"""The reference page of the command line has every command, every option, and the command that prints each schema."""

import importlib.util
import re

import pytest

from trainfold.adapters.cli.app import app
from trainfold.adapters.cli.schema import names

COMMANDS = sorted(name for name in app if not name.startswith("-"))


@pytest.fixture(scope="module")
def page(pytestconfig):
    spec = importlib.util.spec_from_file_location("docs_conf", pytestconfig.rootpath / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf.page_of_commands()


def section(page, command):
    found = re.search(rf"^trainfold {command}\n-+\n(.*?)(?=^trainfold \w+\n-|\Z)", page, re.MULTILINE | re.DOTALL)
    return found[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_of_a_command_is_in_its_section(page, command):
    options = {name for each in app[command].assemble_argument_collection() for name in each.names if each.show}
    keywords = {name for name in options if name.startswith("--")}
    listed = set(re.findall(r"``(--[a-z-]+)``", section(page, command)))
    assert listed <= keywords
    assert {"--json"} <= listed or command in ("completion", "schema")
    positional = {
        each.field_info.name for each in app[command].assemble_argument_collection() if each.field_info.is_positional
    }
    assert keywords - listed <= {f"--{name}" for name in positional}, "an argument that is given by its place"
    assert all(f"``{name.upper()}``" in section(page, command) for name in positional)


def test_each_schema_is_named_in_the_section_of_its_command(page):
    for name in set(names()) - {"manifest"}:
        assert f"``trainfold schema {name}``" in section(page, name)
