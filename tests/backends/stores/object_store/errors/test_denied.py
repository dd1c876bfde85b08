"""What a provider denies may be there: it is never a save that did not finish, and no run goes on from an older checkpoint because of it."""

import pytest
import torch
from kit.adapters import cli_cases
from kit.backends.buckets.planted import SECRET, always, answer
from kit.backends.buckets.s3_cases import settings_at, store_at

import trainfold
from trainfold.backends.stores.local import open_store
from trainfold.core.errors import CheckpointMissing, CheckpointUnreadable, ResumeRefused, TrainfoldError

call, answered = cli_cases.call, cli_cases.answered
STATE = trainfold.TrainState(trainer=trainfold.Progress(step=0))
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
)
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
NEWEST = "step-00000003/manifest.json"


@pytest.fixture
def url(proxy, monkeypatch):
    """A run of three steps, behind the proxy."""
    for name, value in settings_at(proxy.port).items():
        monkeypatch.setenv(name, value)
    store = store_at(proxy.port)
    for step in (1, 2, 3):
        trainfold.save(trainfold.TrainState(trainer=trainfold.Progress(step=step)), store)
    return store.url


def deny(proxy, key=NEWEST, *, status=403, text=DENIED, method="GET"):
    proxy.fault = lambda number, verb, path: (status, text) if verb == method and key in path else None


REFUSALS = [
    pytest.param(403, DENIED, "the right to read", id="403"),
    pytest.param(401, b"", "credentials that the store takes", id="401"),
    pytest.param(400, EXPIRED, "credentials that the store takes", id="expired"),
]


@pytest.mark.parametrize(("status", "text", "expected"), REFUSALS)
def test_a_denied_manifest_is_named_and_no_older_checkpoint_is_resumed(url, proxy, status, text, expected):
    """V03, V05: a manager went on from step 2 because "a save did not finish", and the run parted in two."""
    deny(proxy, status=status, text=text)
    with pytest.raises(ResumeRefused, match=r"may be the newest.*step=2") as refused:
        trainfold.load(url, like=STATE)
    (reason,) = refused.value.refusal.reasons
    assert (reason.error, reason.expected) == ("CheckpointUnreadable", expected)
    live = trainfold.attach(torch.nn.Linear(2, 2))
    with trainfold.CheckpointManager(url) as manager, pytest.raises(ResumeRefused):
        manager.restore(live)
    assert trainfold.load(url, like=STATE, step=2).trainer.step == 2
    deny(proxy, "no such key")
    assert trainfold.load(url, like=STATE).trainer.step == 3


def test_commands_say_of_a_denied_manifest_what_is_denied(url, proxy, answered, tmp_path):
    """R09: each of them called it torn, and a copy left it out with exit code 0."""
    code = CheckpointUnreadable.exit_code
    deny(proxy)
    found, _ = answered("ls", url)
    (entry,) = [each for each in found["checkpoints"] if each["name"] == "step-00000003"]
    assert "the right to read" in str(entry)
    _, error = answered("copy", url, tmp_path / "a", code=code)
    assert error["where"].endswith(NEWEST)
    assert "s3:ListBucket" in error["fix"]
    assert error["found"].endswith("manifest.json: 403 Forbidden: AccessDenied …")
    assert "`aws s3` prints them" in error["fix"]
    answered("plan", url, code=code)
    _, error = answered("verify", url, code=code)
    assert f"such as {url}/step-00000002" in error["fix"]
    answered("verify", f"{url}/step-00000002")
    answered("prune", url, "--keep-last", "1", code=code)
    assert [name for name in store_at(proxy.port, run=url.removeprefix("s3://bucket/")).list() if "step" in name] == [
        f"step-0000000{step}" for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("verb", [["verify"], ["inspect"], ["files"], ["diff", "{run}"]], ids=lambda verb: verb[0])
def test_a_checkpoint_that_is_gone_is_missing(url, answered, verb):
    """W22, R09: such as one that was pruned; it ended in an AssertionError, and `--json` printed nothing."""
    _, error = answered(
        *(each.format(run=url) for each in verb), f"{url}/step-00000099", code=CheckpointMissing.exit_code
    )
    assert error["where"] == f"{url}/step-00000099"
    assert f"trainfold ls {url}" in error["fix"]


@pytest.mark.parametrize("options", [["--newest"], []])
def test_a_copy_names_what_it_passed_over_and_ends_with_its_exit_code(url, proxy, answered, tmp_path, options):
    """V03: the newest that can be read is copied, and a program that copies each night sees that it is not the newest."""
    deny(proxy)
    found, error = answered("copy", url, tmp_path / "a", *options, code=CheckpointUnreadable.exit_code)
    assert "step-00000002" in [each["name"] for each in found["checkpoints"]]
    assert "the right to read" in found["left_out"]["step-00000003"]
    assert error["where"].endswith(NEWEST)


@pytest.mark.parametrize(("status", "text", "expected"), REFUSALS)
def test_a_denied_list_is_not_about_the_network(url, proxy, status, text, expected):
    """R09: the advice was to look at the network, after five tries."""
    deny(proxy, "list-type", status=status, text=text)
    before = len(proxy.requests)
    with pytest.raises(CheckpointUnreadable) as failed:
        open_store(url).list()
    assert failed.value.expected == expected
    assert "credentials" in failed.value.fix
    assert len(proxy.requests) - before <= 3


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.quarantine_file.QuarantineIgnored")
@pytest.mark.parametrize("body", ["html", "json", "plain"])
def test_a_page_in_place_of_each_answer_is_no_empty_run(url, proxy, answered, body):
    """R09: what a gateway or a login page answers with 200 was a list without objects, and "no run there"."""
    proxy.fault = always(answer(200, body, headers=()))
    for verb in (["ls"], ["inspect"], ["verify"], ["plan"], ["page", "-o", "a.html"]):
        _, error = answered(verb[0], url, *verb[1:], code=CheckpointUnreadable.exit_code)
        assert ("login page" in error["fix"]) == (body == "html")  # the client itself refuses anything but XML
        assert SECRET not in str(error)
    with pytest.raises(ResumeRefused, match="CheckpointUnreadable"):
        trainfold.load(url, like=STATE)
    live = trainfold.attach(torch.nn.Linear(2, 2))
    with pytest.raises(TrainfoldError), trainfold.CheckpointManager(url) as manager:
        manager.restore(live)


def test_an_empty_place_whose_lease_may_not_be_read_is_no_empty_run(proxy):
    """E06: a list that lags shows nothing either, and the lease would name what was committed."""
    store = store_at(proxy.port)
    assert store.list() == []
    before = len(proxy.requests)
    assert store.glimpse().list() == []
    assert len(proxy.requests) - before == 2, "a list, and the lease"
    deny(proxy, ".lease")
    for looked in (store, store.glimpse()):
        with pytest.raises(CheckpointUnreadable, match="the right to read"):
            looked.list()
    proxy.fault = always(None)
    trainfold.save(STATE, store)
    deny(proxy, ".lease")
    assert "run.json" in store.list()
