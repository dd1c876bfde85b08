"""The place of a run: a path or a ``file://`` URL of this machine; a bucket's URL never becomes a folder."""

from pathlib import Path

import pytest
import torch

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.stores.place import is_own_disk, local_path
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState
from trainfold.weights import HubFiles, write_adapter_directory, write_dcp_directory, write_hub_directory

STATE = trainfold.TrainState(trainer=trainfold.Progress(step=3))
MODEL = ModelState(Leaves({"w": torch.ones(2)}), Leaves({}))
ADAPTER = ModelState(Leaves({"q.lora_A.default.weight": torch.ones(1, 2)}), Leaves({}))
URLS = ["ftp://host/run", "HDFS://bucket", "hdfs:///data/run", "http://host/run", "az+x.y-z://c/run", "a_b://c/run"]
CALLS = (
    lambda run: trainfold.save(STATE, run),
    lambda run: trainfold.load(run, like=STATE),
    lambda run: trainfold.plan(run, like=STATE),
    trainfold.CheckpointManager,
    trainfold.StopFile,
)
CHAINS = [
    "simplecache::s3://bucket/chain",
    "filecache::memory://b/c",
    "zip://a.zip::s3://bucket/a.zip",
    "simplecache::file:///data/run",
]


@pytest.mark.parametrize("url", [*URLS, *CHAINS])
def test_a_url_without_a_store_is_refused_and_makes_no_folder(url, tmp_path, monkeypatch, capsys):
    """W22: ``hdfs://bucket/run`` became a folder of that name, as a string or a path, from a manager, a stop file and the commands."""
    monkeypatch.chdir(tmp_path)
    for run in (url, Path(url)):
        for call in CALLS:
            with pytest.raises(
                InvalidArgument, match=r"found '(?i:ftp|hdfs|http|az|a_b|simplecache|filecache|zip)"
            ) as refused:
                call(run)
            assert "pass a store of your own" in refused.value.fix
    for command in (
        ["ls", url],
        ["plan", url],
        ["inspect", url],
        ["verify", url],
        ["diff", url, url],
        ["demo", "--run", url],
    ):
        assert main(command) != 0
        assert "pass a store of your own" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    ["s3:user:pa55@b", "S3:user:pa55@b/run", " s3://user:pa55@b/run", "\ts3://b/run?sig=pa55", "'gs://user:pa55@b'", "\ufeffaz://user:pa55@b", "file:user:pa55@b", " hdfs://user:pa55@b", "\u202as3://user:pa55@b/run", "[s3://user:pa55@b/run]", "(hdfs://user:pa55@b)", "=gs://b/run"],
)  # fmt: skip
def test_what_was_meant_as_a_url_is_no_directory_and_its_password_is_not_shown(
    url, tmp_path, monkeypatch, capfd, caplog
):
    """U05: each was the name of a directory, and stood with its password in messages."""
    monkeypatch.chdir(tmp_path)
    trainfold.save(STATE, "run")
    for run in (url, Path(url)):
        for call in CALLS:
            with pytest.raises(InvalidArgument, match="which is neither") as refused:
                call(run)
            assert "pa55" not in str(refused.value)
    for command in (
        ["ls", url], ["plan", url], ["inspect", url], ["verify", url], ["diff", url, "run"], ["diff", "run", url], ["files", url], ["best", url], ["prune", url, "--keep-last", "1"],
        ["copy", "run", url], ["copy", url, "copy"], ["link", "run", url], ["convert", "run", url, "--to", "native"], ["convert", url, "new", "--to", "native"], ["page", url, "-o", "a.html"],
        ["page", "run", "-o", url], ["bisect", "run", url], ["replay", url, "--from", "1", "--", "true"], ["demo", "--run", url],
    ):  # fmt: skip
        try:
            code = main([*command, "--json"] if "--" not in command else command)  # the text goes to stderr
        except SystemExit as end:  # of the parser
            code = end.code
        assert code, command
    assert "pa55" not in "".join(capfd.readouterr()) + caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_path_may_have_colons(tmp_path, monkeypatch):
    """W22: only what begins as a URL is one."""
    for path in (
        "a:b@c", "runs/s3:a", "./s3:a", "2026-11-28T12:00", " a", "exp:user:x@y", "exp:1/run", "C:/x", "-exp:/b", "+lr:/x", "(ab:/c", "=ab:/x", "🚀ab:/x", "é:/x", "'q/x", " a:/b",
        str(tmp_path / "s3:a"),
    ):  # fmt: skip
        assert local_path(path) == path


@pytest.mark.parametrize("run", ["s3:", "gs:1/run", "file:a", " exp:/run", "'exp:/run"])
def test_a_directory_that_is_there_is_a_path_whatever_its_name(run, tmp_path, monkeypatch):
    """W22: a run in it was read and continued before such names were taken for URLs, and pathlib takes ``./`` away."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="absolute path"):
        trainfold.save(STATE, run)
    trainfold.save(STATE, tmp_path / run)
    for place in (run, Path(run), f"./{run}", Path(f"./{run}")):
        assert trainfold.load(place, like=STATE) == STATE
        assert main(["verify", str(place)]) == 0


def test_a_file_url_is_the_path_that_it_names(tmp_path, capsys):
    """W22: ``file://`` is local, with and without a host, and even after pathlib has removed a slash."""
    run = tmp_path / "run 1"
    trainfold.save(STATE, f"file://{tmp_path}/run%201")
    for place in (f"file://localhost{tmp_path}/run%201", Path(f"file://{tmp_path}/run%201"), run):
        assert trainfold.load(place, like=STATE).trainer.step == 3
    assert main(["ls", f"file://{tmp_path}/run%201"]) == 0
    assert "3" in capsys.readouterr().out
    assert {each.name for each in tmp_path.iterdir()} == {"run 1"}


@pytest.mark.parametrize("url", ["file://elsewhere/run", "file://run", "file://"])
def test_a_file_url_of_another_machine_is_refused(url):
    with pytest.raises(InvalidArgument, match="three slashes"):
        local_path(url)


@pytest.mark.parametrize(
    "path", ["runs/a", "C:/runs", "a:b/c", "./s3:/x", "a::b/c", "./a::s3:/x", "/s3://x", "lr=0.1:wd=0/run"]
)
def test_a_path_stays_as_it_is(path):
    assert local_path(path) == path


def _files(path):
    files = HubFiles("*")
    files.load_state_dict({"source": "", "files": {"config.json": torch.zeros(2, dtype=torch.uint8)}})
    return files.write(path)


WRITERS = {
    "a directory of a hub": lambda path: write_hub_directory(STATE.evolve(model=MODEL), path),
    "an adapter": lambda path: write_adapter_directory(STATE.evolve(model=ADAPTER), path, config={"peft_type": "LORA"}),
    "a directory of torch": lambda path: write_dcp_directory(path, STATE.evolve(model=MODEL)),
    "files beside weights": _files,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_of_a_directory_refuses_a_url_and_takes_that_of_a_file(writer, tmp_path, monkeypatch):
    """K09: an export to ``s3://bucket/x`` succeeded, into a folder of that name."""
    monkeypatch.chdir(tmp_path)
    for path in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(InvalidArgument, match="path: expected a path or a file:// URL, found 's3:/"):
            WRITERS[writer](path)
    assert not any(tmp_path.iterdir())
    WRITERS[writer](f"file://{tmp_path}/a")
    assert any((tmp_path / "a").iterdir())


@pytest.mark.parametrize("to", ["hf", "dcp", "native", "link", "plan"])
def test_nothing_is_exported_into_a_checkpoint(to, tmp_path, capsys):
    """A checkpoint holds what its manifest lists, and a directory step-... of a run is a checkpoint; other names in a run are free."""
    run, hub = tmp_path / "run", tmp_path / "hub"
    trainfold.save(STATE.evolve(model=MODEL), run)
    write_hub_directory(STATE.evolve(model=MODEL), hub)
    (run / "link").symlink_to("step-00000003")
    before = sorted(tmp_path.rglob("*"))
    command = {"link": ["link", str(hub)], "plan": ["convert", str(hub), "--to", "hf", "--dry-run"]}.get(to, ["convert", str(hub), "--to", to])  # fmt: skip
    for inside in ("step-00000003/x", "step-00000003/deep/er", "step-00000003", "step-00000009", "link/x"):
        assert main([*command[:2], str(run / inside), *command[2:]]) == 2
        shown = capsys.readouterr().err
        assert "expected  a directory that is not in a checkpoint" in shown
        assert str(run / "step-0000000") in shown
        with pytest.raises(InvalidArgument, match="not in a checkpoint"):
            write_hub_directory(STATE.evolve(model=MODEL), run / inside)
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*command[:2], str(run / "other"), *command[2:]]) == 0


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:40 / /data rw shared:2 master:1 - nfs4 server:/data rw
24 23 0:41 / /data/my\\040disk rw - xfs /dev/sdb1 rw
25 22 0:42 / /scratch rw - ext4 /dev/sdc1 rw
26 22 0:43 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
27 22 0:44 / /bucket rw - fuse.s3fs s3fs rw
28 22 0:45 / /pool rw - btrfs /dev/sdd rw
29 22 0:46 / /new rw - quantumfs none rw
"""


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/root/run", True), ("/data/run", False), ("/data/my disk/run/step-1", True), ("/datasets/run", True), ("/scratch/run", False), ("/bucket/run", False),
        ("/pool", True), ("/new/run", False),
    ],
)  # fmt: skip
def test_a_disk_of_this_machine_is_known_by_its_filesystem(monkeypatch, path, is_own):
    """P07: what another filesystem, or one that is not known, does not give may still be there."""
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *more: MOUNTS if "mountinfo" in str(self) else read(self, *more)
    )
    assert is_own_disk(path) == is_own


def test_without_a_list_of_filesystems_no_disk_is_known(monkeypatch):
    def read(self, *more):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", read)
    assert not is_own_disk("/")
