"""The server of rounds: a worker that is late, hangs, ends or is hostile loses what it sends, and no other worker loses anything."""

import socket
import threading
import time

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold.backends.diloco.messages import VERSION
from trainfold.backends.diloco.outer_client import OuterClient
from trainfold.backends.diloco.outer_server import DilocoServer
from trainfold.backends.peers.introduction import introduced
from trainfold.backends.weights.served import ServedWeights
from trainfold.core.diloco.outer_step import NESTEROV, outer_state
from trainfold.core.diloco.work_units import WorkUnit
from trainfold.core.errors import InvalidArgument, InvalidState, PeerLost, PeerRefused, TrainfoldError
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Opaque
from trainfold.core.weights.source import Wanted
from trainfold.properties.contracts import check_weight_source

TOKEN = "a token that both sides know"
PLAIN = trainfold.optimizer(torch.optim.SGD, lr=1.0)
WANTED = {
    "weight": Wanted("float32", (1, 3), ((0, 1), (0, 3))),
    "bias": Wanted("float32", (1,), ((0, 1),)),
}


class Rounds:
    """A server of a tiny model, whose loop runs in a thread."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        state = outer_state(self.model, optimizer=PLAIN)
        given = {"unit_samples": 4, "total_samples": 16, "grace_secs": 30.0, "secs": 10.0, "optimizer": PLAIN}
        self.server = DilocoServer(state, token=TOKEN, **{**given, **options})
        self.states = []
        self.thread = threading.Thread(target=lambda: self.states.extend(self.server.rounds()), daemon=True)
        self.thread.start()

    def client(self, **options):
        return OuterClient("127.0.0.1", self.server.port, token=TOKEN, **{"secs": 10.0, "retry_secs": 0.0, **options})

    def channel(self):
        sock = socket.create_connection(("127.0.0.1", self.server.port))
        channel = introduced(sock, TOKEN, is_server=False, secs=5.0, peer="the server")
        channel.send({"join": VERSION})
        assert channel.receive()["joined"] == VERSION
        return channel

    def work_off(self):
        """A worker that does all that is left; return the units that it got."""
        client, found = self.client(), []
        dict(client.take(WANTED))
        while (unit := client.work()) != "over":
            if unit == "stale":
                dict(client.take(WANTED))
                continue
            found.append(unit)
            client.send(unit, self.local())
        client.close()
        return found

    def local(self):
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def end(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.states[-1]


@pytest.fixture
def rounds(request):
    made = Rounds(**getattr(request, "param", {}))
    yield made
    made.server.close()


def units(*starts):
    return [WorkUnit(start, start + 4) for start in starts]


def test_one_worker_does_all(rounds):
    assert rounds.work_off() == units(0, 4, 8, 12)
    assert rounds.end().trainer.samples == 16


def test_its_weights_keep_the_contract_of_a_source(rounds):
    """J01: for workers, and for those who only read."""
    tensors = {name: each.detach() for name, each in rounds.model.named_parameters()}
    check_weight_source(lambda: ServedWeights("127.0.0.1", rounds.server.port, token=TOKEN), tensors)


def stuck(rounds):
    """A worker that has a unit, and does nothing."""
    client = rounds.client()
    dict(client.take(WANTED))
    return client, client.work()


@pytest.mark.parametrize("rounds", [{"grace_secs": 0.3}], indirect=True)
def test_a_worker_that_is_late_has_weight_zero_and_its_unit_is_handed_out_again(rounds):
    late, unit = stuck(rounds)
    assert rounds.work_off() == units(4, 0, 8, 12)
    assert late.send(unit, rounds.local()) is None
    assert late.work() == "over"
    late.close()
    assert rounds.end().trainer.samples == 16


@pytest.mark.parametrize("rounds", [{"grace_secs": 0.3, "total_samples": 4}], indirect=True)
def test_a_worker_that_hangs_with_the_last_unit_does_not_stop_the_run(rounds):
    """The others have nothing to send, so no round would ever be over."""
    late, _ = stuck(rounds)
    assert rounds.work_off() == units(0)
    late.close()
    assert rounds.end().trainer.samples == 4


@pytest.mark.parametrize("rounds", [{"grace_secs": 0.2, "total_samples": 4}], indirect=True)
def test_a_unit_that_takes_longer_than_the_grace_counts_while_another_worker_is_idle(rounds):
    """Each of the two lost the unit to the other while it was at it, and what it had made was refused: the unit was handed out for ever."""
    (slow, unit), (idle, found) = stuck(rounds), [rounds.client(), []]
    dict(idle.take(WANTED))
    thread = threading.Thread(target=lambda: found.append(idle.work()))
    thread.start()
    thread.join(20)
    assert found == [unit], "it was handed over after the grace"
    assert slow.send(unit, rounds.local()) is not None
    assert idle.send(unit, rounds.local()) is None
    for client in (slow, idle):
        assert client.work() == "over"
        client.close()
    assert rounds.end().trainer.samples == 4


def test_the_unit_of_a_worker_that_ends_is_handed_out_at_once(rounds):
    client, unit = stuck(rounds)
    client.close()
    assert unit in units(0)
    assert sorted(rounds.work_off()) == units(0, 4, 8, 12)


def test_the_end_of_a_connection_does_not_lose_the_work(rounds):
    """It comes again with the same unit and mark, as after a kill of the server."""
    client, unit = stuck(rounds)
    client.close()
    assert client.send(unit, rounds.local()) is not None
    client.close()
    assert rounds.work_off() == units(4, 8, 12)


def test_weights_are_there_before_the_loop_and_no_round_is_lost_if_it_is_left(rounds):
    """A loop may end early, such as for a budget of rounds, and another one goes on."""
    state = outer_state(rounds.model, optimizer=PLAIN)
    with DilocoServer(state, token=TOKEN, unit_samples=4, total_samples=16, optimizer=PLAIN, secs=10.0) as server:
        client = OuterClient("127.0.0.1", server.port, token=TOKEN, secs=10.0, retry_secs=0.0)
        dict(client.take(WANTED))
        found = []

        def work():
            while (unit := client.work()) != "over":
                found.append(client.send(unit, rounds.local()))
            client.close()

        thread = threading.Thread(target=work)
        thread.start()
        for _ in server.rounds():
            break
        states = list(server.rounds())
        thread.join()
        assert len(states) == 3
        assert states[-1].trainer.samples == 16
        assert None not in found


ASKED = "a tensor that was asked for, with the shape"
SENDS = {
    "a name that is not due": ({"name": "other", "dtype": "float32", "shape": [1, 3]}, ASKED),
    "another shape": ({"name": "weight", "dtype": "float32", "shape": [1 << 40, 3]}, ASKED),
    "no dtype": ({"name": "weight", "dtype": "object", "shape": [1, 3]}, ASKED),
    "nothing": ({"end": 0}, "all 2 tensors, found nothing for bias, weight"),
    "no message": ({"x": 1}, ASKED),
}


@pytest.mark.parametrize("case", SENDS)
def test_what_a_worker_sends_is_checked_before_memory_is_taken(case, rounds):
    """U05: it gets the reason and loses its connection, and its unit goes to another."""
    client, unit = stuck(rounds)
    client.close()
    channel = rounds.channel()
    channel.send({"send": [unit.start, unit.stop], "mark": client.mark})
    assert "go" in channel.receive()
    message, reason = SENDS[case]
    channel.send(message)
    with pytest.raises(PeerRefused, match=reason):
        channel.receive()
    channel.close()
    assert sorted(rounds.work_off()) == units(0, 4, 8, 12)


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda each: each * float("nan"), "not finite"), (lambda each: each.long(), "floating tensors")],
)
def test_what_is_no_number_is_refused_and_the_others_go_on(change, said, rounds):
    client, unit = stuck(rounds)
    with pytest.raises(PeerRefused, match=said):
        client.send(unit, {name: change(each) for name, each in rounds.local().items()})
    client.close()
    assert sorted(rounds.work_off()) == units(0, 4, 8, 12)
    assert all(each.isfinite().all() for each in rounds.end().model.params.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=6), each, max_size=3),
    max_leaves=8,
)
ASKS = st.dictionaries(st.sampled_from(["join", "wanted", "work", "send", "mark", "end"]), JSON, max_size=3)


def test_no_message_stops_the_server():
    """U05: whatever a program that knows the token says; afterwards another one does all the work."""
    rounds = Rounds(secs=0.5)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(ASKS, min_size=1, max_size=3))
    def say(messages):
        channel = rounds.channel()
        try:
            for each in messages:
                channel.send(each)
            channel._sock.shutdown(socket.SHUT_WR)
            while True:
                channel.receive()
        except TrainfoldError:
            pass
        finally:
            channel.close()

    say()
    assert sorted(rounds.work_off()) == units(0, 4, 8, 12)
    rounds.end()
    rounds.server.close()


def test_strangers_get_nothing(rounds):
    with pytest.raises(TrainfoldError):
        OuterClient("127.0.0.1", rounds.server.port, token=TOKEN + "!", secs=5.0, retry_secs=0.0).connect()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", rounds.server.port)) as stranger:
            stranger.sendall(greeting)
    assert rounds.work_off() == units(0, 4, 8, 12)


JOINED = {"joined": 1, "fragments": [["bias"], ["weight"]]}
SAYS = {
    "another version": ["connect", {"joined": 2}],
    "fragments that are not names": ["connect", {"joined": 1, "fragments": [[3]]}],
    "a unit without an end": ["work", JOINED, {"unit": [3], "round": 0}],
    "a unit that ends before it begins": ["work", JOINED, {"unit": [3, 1], "round": 0}],
    "no round": ["work", JOINED, {"unit": [0, 4]}],
    "a round that is not a number": ["work", JOINED, {"unit": [0, 4], "round": "1"}],
    "a tensor that was not asked for": ["take", JOINED, {"name": "x", "dtype": "float32", "shape": [1]}],
    "a mark that is too long": ["take", JOINED, {"end": 0, "mark": "m" * 100}],
    "a fragment of another size": ["send", JOINED, {"go": 1}, {"name": "bias", "dtype": "float32", "shape": [1 << 40]}],
}


@pytest.mark.parametrize("case", SAYS)
def test_what_a_server_says_is_checked(case):
    """U05."""
    what, *says = SAYS[case]
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listening.accept()
        with sock:
            channel = introduced(sock, TOKEN, is_server=True, secs=5.0, peer="a client")
            for each in says:
                channel.send(each)
            while sock.recv(1 << 16):  # whatever the client sends: an end here would be its error
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    client = OuterClient("127.0.0.1", listening.getsockname()[1], token=TOKEN, secs=5.0, retry_secs=0.0)
    do = {
        "connect": client.connect,
        "work": client.work,
        "take": lambda: dict(client.take(WANTED)),
        "send": lambda: client.send(WorkUnit(0, 4), {"bias": torch.ones(1)}),
    }
    with pytest.raises(PeerRefused):
        do[what]()
    client.close()
    thread.join()
    listening.close()


def test_a_server_that_stays_away_is_an_error_in_time(caplog):
    """Meanwhile the log has the reason, once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port}"):
        OuterClient("127.0.0.1", port, token=TOKEN, secs=5.0, retry_secs=0.3).work()
    assert 0.1 < time.monotonic() - begun < 5.0
    assert len(caplog.messages) == 1
    assert f"127.0.0.1:{port}" in caplog.text
    assert "(tries again for 0.3 s)" in caplog.text


def test_a_worker_that_sends_much_is_given_the_reason_of_a_refusal_and_does_not_try_again():
    """The server had closed the connection while the worker was still sending, so it raised PeerLost, and tried again for ten minutes."""
    size = 16 << 20  # bytes: more than the buffers of the sockets
    model = torch.nn.ParameterDict({name: torch.zeros(size // 8) for name in "ab"})
    state = outer_state(model, optimizer=PLAIN)
    with DilocoServer(state, token=TOKEN, unit_samples=4, total_samples=8, optimizer=PLAIN) as server:
        threading.Thread(target=lambda: list(server.rounds()), daemon=True).start()
        client = OuterClient("127.0.0.1", server.port, token=TOKEN, secs=10.0, retry_secs=600.0)
        dict(client.take({name: Wanted("float32", (size // 8,), ((0, size // 8),)) for name in "ab"}))
        unit = client.work()
        with pytest.raises(PeerRefused, match=r"expected a tensor that was asked for, .* found 'b', float32"):
            client.send(unit, {"b": torch.zeros(size // 4), "a": torch.zeros(size // 8)})


def test_what_was_trained_for_other_fragments_does_not_count():
    """A server may be started again with another plan. What a worker has trained for the one before is late, and it takes the weights first."""
    model = torch.nn.Linear(3, 1)
    given = {"token": TOKEN, "unit_samples": 4, "total_samples": 8, "optimizer": PLAIN}
    state = outer_state(model, optimizer=PLAIN)
    with DilocoServer(state, **given) as server:
        client = OuterClient("127.0.0.1", server.port, token=TOKEN, secs=10.0, retry_secs=10.0)
        position = server._rounds.position()
        dict(client.take(WANTED))
        unit, port = client.work(), server.port
    state = state.evolve(dataset=Opaque(position))  # as a checkpoint has it
    with DilocoServer(state, **given, fragments=2, port=port) as server:
        local = {name: each.detach() for name, each in model.named_parameters()}
        assert client.send(unit, local) is None
        assert client.work() == "stale"
        assert client.fragments == server.plan.names
        client.close()


@pytest.mark.parametrize("rounds", [{"most_workers": 1}], indirect=True)
def test_a_worker_that_is_one_too_many_is_given_the_reason(rounds):
    client, _ = stuck(rounds)
    with pytest.raises(
        PeerLost, match="expected at most 1 that are connected, found one more; wait until one has ended"
    ):
        rounds.client().work()
    client.close()


@pytest.mark.parametrize("rounds", [{"total_samples": 40}, {"total_samples": 40, "fragments": 2}], indirect=True)
def test_a_round_sends_the_due_fragment_once_each_way(rounds):
    """Beside it, less than 600 bytes a tensor: heads, digests, names, the unit."""
    client = rounds.client()
    dict(client.take(WANTED))
    for number in range(4):
        unit = client.work()
        before = client.sent_bytes, client.received_bytes
        due = rounds.server.plan.due(number)
        local = {name: each for name, each in rounds.local().items() if name in due}
        assert client.send(unit, local).keys() == local.keys()
        size = sum(each.nbytes for each in local.values())
        for now, then in zip((client.sent_bytes, client.received_bytes), before, strict=True):
            assert size <= now - then < size + 600 * len(local)
    client.close()


@pytest.mark.parametrize("samples", [8, 4])
def test_workers_hear_from_a_server_that_was_started_again_that_all_is_over(samples):
    """It had been killed after its last round, or shortly before. It ended at once, or with the first worker, and the others waited for it for ten minutes."""
    model = torch.nn.Linear(3, 1)
    given = {"token": TOKEN, "unit_samples": 4, "optimizer": PLAIN, "grace_secs": 1.5}
    local = {name: each.detach() for name, each in model.named_parameters()}

    def client(port):
        return OuterClient("127.0.0.1", port, token=TOKEN, secs=10.0, retry_secs=20.0)

    with DilocoServer(outer_state(model, optimizer=PLAIN), total_samples=4, **given) as server:
        first, port = client(server.port), server.port
        dict(first.take(WANTED))
        thread = threading.Thread(target=lambda: first.send(first.work(), local))
        thread.start()
        state = next(server.rounds())  # it is killed before the worker hears of it
    with DilocoServer(state, total_samples=samples, port=port, **given) as server:
        states = []
        loop = threading.Thread(target=lambda: states.extend(server.rounds()))
        loop.start()
        thread.join(20)
        if samples > 4:
            dict(first.take(WANTED))
            first.send(first.work(), local)
        assert first.work() in {"stale", "over"}
        first.close()
        for _ in range(2):  # one after the other, so that none keeps the server up for the next
            other = client(port)
            assert other.work() == "over"
            other.close()
        loop.join(20)
        assert not loop.is_alive()
    assert [each.trainer.samples for each in states] == ([8] if samples > 4 else [])


def test_a_request_is_as_long_as_the_names_of_the_model_need(rounds):
    """U05: a program that knows the token could have the server keep 64 MB for each connection."""
    client, unit = stuck(rounds)
    channel = rounds.channel()
    channel.send({"wanted": {f"{number}": ["float32", [1], [[0, 1]], None] for number in range(1000)}})
    with pytest.raises(
        PeerRefused, match=r"at most \d{4} bytes, found .* use the same version and model on both sides"
    ):
        channel.receive()
    channel.close()
    assert client.send(unit, rounds.local()) is not None
    client.close()


def test_a_state_that_has_rounds_and_no_data_position_is_refused(rounds):
    """It began with the first sample again, in silence: as where a state was loaded without its dataset."""
    rounds.work_off()
    state = rounds.end()
    given = {"token": TOKEN, "unit_samples": 4, "total_samples": 16, "optimizer": PLAIN}
    for dataset in (None, Opaque({"loader": 3})):
        with pytest.raises(
            InvalidState, match=r"state.dataset: expected the data position of a server, after 4 rounds"
        ):
            DilocoServer(state.evolve(dataset=dataset), **given)
    with DilocoServer(state.evolve(dataset=None, trainer=trainfold.Progress()), **given) as server:
        assert server._rounds.units.next_index == 0


def test_a_model_that_is_not_on_the_cpu_is_refused():
    """A model on meta failed in the first outer step, and one on a GPU where workers had trained."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 1)
    with pytest.raises(
        InvalidState, match=r"model\['weight'\]: expected the first weights .* only workers build theirs on meta"
    ):
        outer_state(model)
    state = outer_state(torch.nn.Linear(2, 1))
    elsewhere = attrs.evolve(
        state.model, params=Leaves({name: each.to("meta") for name, each in state.model.params.items()})
    )
    with pytest.raises(InvalidState, match=r"expected a tensor on the CPU"):
        DilocoServer(state.evolve(model=elsewhere), token=TOKEN, unit_samples=4, total_samples=8)


def test_numbers_are_checked():
    state = outer_state(torch.nn.Linear(2, 1))
    for wrong in ({"unit_samples": 0}, {"total_samples": -1}, {"fragments": 3}, {"grace_secs": 0}):
        with pytest.raises(InvalidArgument):
            DilocoServer(state, token=TOKEN, **{"unit_samples": 4, "total_samples": 8, **wrong})
    with pytest.raises(PeerRefused, match="token"):
        DilocoServer(state, token="short", unit_samples=4, total_samples=8)


def test_a_server_with_another_optimizer_than_its_state_is_refused_before_a_worker_trains():
    """Other options were ignored in silence, and another class failed after all workers had trained."""
    for of_state, of_server in (
        (NESTEROV, PLAIN),
        (PLAIN, NESTEROV),
        (NESTEROV, trainfold.optimizer(torch.optim.AdamW)),
    ):
        state = outer_state(torch.nn.Linear(2, 1), optimizer=of_state)
        with pytest.raises(
            InvalidArgument, match=r"optimizer: expected that of the state, .*; pass the same optimizer="
        ):
            DilocoServer(state, token=TOKEN, unit_samples=4, total_samples=8, optimizer=of_server)
