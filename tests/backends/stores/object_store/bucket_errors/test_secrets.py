"""What a provider repeats of a request in its answer is shown nowhere: it may be a session token or what was signed."""

import traceback

import pytest
import torch
from kit.backends.buckets.s3_cases import settings_at, store_at

import trainfold
from trainfold.backends.stores.object_store.bucket_errors import without_secrets
from trainfold.core.errors import CheckpointError

SECRET = "IQoJb3JpZ2luSESSIONTOKEN"
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
        shown = "".join(traceback.format_exception(failed.value))
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


def test_a_plain_text_is_kept():
    """R09: what a gateway says in words is what is known."""
    assert (
        without_secrets(OSError("503 Service Unavailable: no healthy upstream"))
        == "503 Service Unavailable: no healthy upstream"
    )
