"""What bisect says of steps whose results are not known: no loss was recorded, and no state was saved or digested."""

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema

from trainfold import CheckpointManager, attach
from trainfold.adapters.cli.flights.bisect_runs import bisect_runs


def train(run, *, records_loss=True, record=2, every=2, rate_changes_in=None, other_batch_in=None, extra=None):
    """Five steps of a loop that may change its rate, and may swap a batch; it is killed after them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.full((1, 2), float(at)) for at in range(1, 7)]
    if other_batch_in is not None:
        batches[other_batch_in - 1] += 1.0
    live = attach(model, sgd, loader=torch.utils.data.DataLoader(torch.cat(batches), batch_size=1), extra=extra)
    with CheckpointManager(run, every=every, record=record) as manager:
        manager.restore(live)
        for x in live.batches(epochs=1):
            step = live.progress.step + 1
            sgd.param_groups[0]["lr"] = 0.2 if step == rate_changes_in else 0.1
            loss = model(x).square().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            sgd.param_groups[0]["lr"] = 0.1
            if records_loss:
                live.record(loss=loss)
            live.advance(samples=1)
            manager.step(live)
            if live.progress.step == 5:
                break


def found(tmp_path):
    answer = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "replay", patience_secs=60)
    fits_its_schema("bisect", answer.data)
    return answer.data


@pytest.mark.parametrize(("options", "said"), [
    ({"records_loss": False}, ["no loss, norm or state after step 4 is known of both: the results of step 5 were not compared"]),
    ({"records_loss": False, "every": 100, "record": 0}, ["no loss, norm or state is known of both: the results of steps 1 to 5 were not compared", "there is no step of which both have a checkpoint: their states were not compared"]),
    ({}, ["no state after step 4 is known of both: after it their losses and norms alone were compared"]),
    ({"record": 1}, None),
])  # fmt: skip
def test_steps_whose_results_nothing_shows_are_said_not_to_be_compared(tmp_path, options, said):
    """The rates of the fifth step differ, and "nothing that is known differs" was all that was said."""
    train(tmp_path / "a", **options)
    train(tmp_path / "b", **options, rate_changes_in=5)
    data = found(tmp_path)
    assert (data["step"], data["warnings"]) == ((5, []) if said is None else (None, said))


@pytest.mark.parametrize("records_loss", [True, False])
def test_a_batch_does_not_say_that_nothing_differed_before_where_no_result_is_known(tmp_path, records_loss):
    """It said "part in step 5" for certain, and they part in step 3, in which the rates differ."""
    options = {"every": 100, "record": 0, "records_loss": records_loss}
    train(tmp_path / "a", **options)
    train(tmp_path / "b", **options, rate_changes_in=3, other_batch_in=5)
    text = found(tmp_path)["text"]
    assert text.startswith(
        "part in step 4 at the latest: only results"
        if records_loss
        else "part in step 5 at the latest: they read other data"
    )


def test_a_component_of_one_log_alone_is_said_not_to_be_compared(tmp_path):
    """As a scaler that only one of the programs attaches: their checkpoints would show it, and they have none in common."""
    train(tmp_path / "a", every=100)
    train(tmp_path / "b", every=100, extra={"beside": torch.nn.Linear(1, 1)})
    data = found(tmp_path)
    assert data["step"] is None
    assert data["warnings"][0] == "the log of one of them alone has states of beside, which were not compared"


def test_a_log_whose_end_is_torn_off_is_named(tmp_path):
    """That the other log alone has states of a component was all that was said, and both programs have it."""
    for name in "ab":
        train(tmp_path / name, every=100, record=1)
    log = tmp_path / "b" / "flight-00000.log"
    log.write_bytes(log.read_bytes()[:-10])
    assert found(tmp_path)["warnings"][0].endswith(
        "flight-00000.log lacks the states of trainer at step 5, the last one there: its end may be torn off"
    )
