"""What a provider repeats of a request in its answer is shown nowhere: it may be a session token or what was signed."""

import socket

import pytest
import torch
from kit.backends.buckets.planted import SECRET, answer, said_by
from kit.backends.buckets.s3_cases import settings_at, store_at

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.errors import CheckpointError, SaveFailed

STATE = trainfold.TrainState(trainer=trainfold.Progress(step=4))
ANSWERS = {
    "signature": (403, f"<Error><Code>SignatureDoesNotMatch</Code><Message>not {SECRET}</Message><CanonicalRequest>GET\nx-amz-security-token:{SECRET}</CanonicalRequest></Error>", "renew"),
    "expired": (400, f"<Error><Code>ExpiredToken</Code><Message>It has expired.</Message><Token-0>{SECRET}</Token-0></Error>", "renew"),
    "clock": (403, f"<Error><Code>RequestTimeTooSkewed</Code><Message>The time differs.</Message><Token>{SECRET}</Token></Error>", "set this machine's clock"),
    "region": (400, f"<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is wrong</Message><H>{SECRET}</H></Error>", "AWS_REGION"),
    "json": (403, f'{{"error": {{"code": 403, "message": "No access.", "token": "{SECRET}"}}}}', "credentials"),
    "gateway": (400, f"<!DOCTYPE html><html><head><title>Bad gateway</title></head><body>{SECRET}</body></html>", "look at the network"),
}  # fmt: skip


def begin(url, mode):
    live = trainfold.attach(torch.nn.Linear(2, 2))
    with trainfold.CheckpointManager(url, mode=mode) as manager:
        manager.restore(live)
        live.advance()
        manager.save(live)
        manager.finish(live)


CALLS = {
    "save": lambda url: trainfold.save(STATE, url),
    "load": lambda url: trainfold.load(url, like=STATE),
    "manager": lambda url: begin(url, "sync"),
}


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.quarantine_file.QuarantineIgnored")
@pytest.mark.parametrize("answer", ANSWERS)
def test_no_traceback_shows_what_an_answer_repeats_and_the_advice_is_about_its_cause(proxy, monkeypatch, answer):
    """C03: the message was reduced, and the whole answer stood in its cause."""
    status, text, advice = ANSWERS[answer]
    for name, value in settings_at(proxy.port).items():
        monkeypatch.setenv(name, value)
    proxy.fault = lambda number, verb, path: (status, text.encode())
    for doing in CALLS.values():
        with pytest.raises(CheckpointError) as failed:
            doing(store_at(proxy.port).url)
        shown = said_by(failed.value)
        assert SECRET not in shown
        assert advice in shown


@pytest.mark.parametrize("answer", ["signature", "expired"])
def test_no_log_of_a_save_in_the_background_shows_it(proxy, monkeypatch, caplog, capfd, answer):
    """C03: its failure is logged with the traceback where the loop's own error is raised."""
    status, text, _ = ANSWERS[answer]
    for name, value in settings_at(proxy.port).items():
        monkeypatch.setenv(name, value)
    url = store_at(proxy.port).url

    def loop():
        live = trainfold.attach(torch.nn.Linear(2, 2))
        with trainfold.CheckpointManager(url, mode="async") as manager:
            manager.restore(live)
            live.advance()
            proxy.fault = lambda number, verb, path: (status, text.encode())
            manager.save(live)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    proxy.fault = None
    shown = caplog.text + "".join(capfd.readouterr())
    assert "credentials that the store takes" in shown
    assert SECRET not in shown


VERBS = (
    ["ls", "{url}"],
    ["inspect", "{url}"],
    ["verify", "{url}"],
    ["plan", "{url}"],
    ["copy", "{url}", "{here}"],
    ["copy", "{run}", "{new}"],
)


def at(where, given):
    """An answer to some requests."""
    return lambda number, verb, path: given if where in f"{verb} {path}" else None


USUAL = (("", "json"), ("manifest.json", "html"))


@pytest.mark.parametrize(
    ("where", "body"),
    [
        pytest.param(where, body, id=f"{where}-{body}", marks=[] if (where, body) in USUAL else [pytest.mark.long])
        for where in ("", "manifest.json", "PUT")
        for body in ("xml", "json", "html", "plain")
    ],
)
def test_no_command_shows_what_an_answer_repeats(proxy, monkeypatch, capfd, caplog, tmp_path, where, body):
    """C03, U05: neither on the terminal nor in a log, whichever request it is that is answered so. A page with 200 is what a gateway has for everything."""
    for name, value in settings_at(proxy.port).items():
        monkeypatch.setenv(name, value)
    url = store_at(proxy.port).url
    trainfold.save(STATE, url)
    trainfold.save(STATE, tmp_path / "run")
    for status in (200, 400, 401, 403, 404, 409, 412):
        given = answer(status, body, headers=("Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT", 'ETag: "1"'))
        proxy.fault = at(where, given)
        for number, verb in enumerate(VERBS):
            names = {
                "url": url,
                "here": tmp_path / f"{status}-{number}",
                "run": tmp_path / "run",
                "new": f"{url}-{status}",
            }
            main([*(part.format(**names) for part in verb), "--json"])  # the text goes to stderr
    shown = caplog.text + "".join(capfd.readouterr())
    assert "403 Forbidden" in shown
    assert SECRET not in shown
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_no_file_of_a_run_shows_it(proxy, tmp_path, caplog):
    """U05: the journal on the disk says why an upload failed, and so does a warning."""
    far = store_at(proxy.port)

    def run():
        live = trainfold.attach(torch.nn.Linear(2, 2))
        with trainfold.CheckpointManager(TwoTiers(tmp_path / "near", far), record=1) as manager:
            manager.restore(live)
            live.advance()
            proxy.fault = lambda number, verb, path: answer(403, "xml") if verb in {"PUT", "POST"} else None
            manager.save(live)

    with pytest.raises(SaveFailed) as failed:
        run()
    files = {path: path.read_bytes() for path in (tmp_path / "near").rglob("*") if path.is_file()}
    assert any(b"403 Forbidden: InvalidRequest" in data for data in files.values())
    assert not [path for path, data in files.items() if SECRET.encode() in data]
    assert SECRET not in said_by(failed.value) + caplog.text


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.quarantine_file.QuarantineIgnored")
def test_no_log_shows_what_the_program_of_a_login_prints_when_it_fails(monkeypatch, tmp_path, caplog, capfd):
    """U05: botocore warns of a login that it cannot renew, with all that the program has printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    program, once, file = tmp_path / "login.sh", tmp_path / "once", tmp_path / "config"
    given = f'{{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "{SECRET}", "Expiration": "2020-01-01T00:00:00Z"}}'
    program.write_text(
        f"if [ -e {once} ]; then echo {SECRET} >&2; exit 1; fi\ntouch {once}\necho '{given}'\n", encoding="ascii"
    )
    file.write_text(f"[default]\nregion = us-east-1\ncredential_process = sh {program}\n", encoding="ascii")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(CheckpointError) as failed:
        trainfold.load("s3://bucket/a", like=STATE)
    assert "CredentialRetrievalError" in str(failed.value) + caplog.text
    assert SECRET not in said_by(failed.value) + caplog.text + "".join(capfd.readouterr())
