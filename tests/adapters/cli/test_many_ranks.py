"""The commands on a checkpoint that 64 ranks have written: as short as on one of a single rank, and each damage by name."""

import json
from collections import Counter

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.formats.native import header_check
from trainfold.backends.stores.local import LocalStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.format.indexes import shard_rows
from trainfold.core.format.manifest import END, TAIL, box_by_rule
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.save.file_layout import stored_in
from trainfold.ranks import run_threads

RANKS = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one checkpoint of 64 ranks: an average that they share, and streams of each rank."""
    folder = tmp_path_factory.mktemp("many") / "run"
    weights = {f"w{index}": torch.full((64, 4), float(index)) for index in range(80)}

    def save(collectives):
        rng = {"torch": torch.full((16,), collectives.rank, dtype=torch.uint8)}
        trainer = trainfold.states.make_progress(step=1)
        state = trainfold.TrainState(trainer=trainer, extra={"ema": weights}, rng=rng)
        trainfold.save(state, folder, collectives=collectives)

    run_threads(RANKS, save)
    return folder


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "plan"])
def test_what_is_printed_does_not_grow_with_the_number_of_ranks(run, command, capsys):
    """W09: no row for each of a hundred files; the JSON has them all."""
    assert main([command, str(run)]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 50, shown
    assert "-of-00064" not in shown
    if command in ("inspect", "verify"):
        assert f"rng: {RANKS} files" in shown
        main([command, str(run), "--json"])
        names = {each["name"] for each in json.loads(capsys.readouterr().out)["files"]}
        assert {f"rng-{rank:05d}-of-00064.safetensors" for rank in range(RANKS)} <= names


def test_the_damaged_file_of_one_rank_has_its_own_row(run, capsys):
    (path,) = (run / "step-00000001").glob("rng-00017-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert main(["verify", str(run)]) == CheckpointDamaged.exit_code
    finally:
        path.write_bytes(whole)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(row[:1] == [path.name] and row[-1] == "damaged" for row in rows)
    assert any(row[:3] == ["rng:", "63", "files"] and row[-1] == "verified" for row in rows)


def test_ls_reads_no_index_and_misses_one_that_is_not_there(run, capsys):
    """W09: what it prints is in the root; the contents of an index are for `verify`, its size is not."""
    (path,) = (run / "step-00000001").glob("*00017-of-00064.json")
    whole = path.read_bytes()
    answers = []
    for found in (whole, whole[:-1] + b" ", whole[:-1]):
        path.write_bytes(found)
        try:
            answers.append((main(["ls", str(run)]), main(["verify", str(run)])))
        finally:
            path.write_bytes(whole)
    capsys.readouterr()
    ls, verify = zip(*answers, strict=True)
    assert ls[0] == ls[1] == verify[0] == 0
    assert 0 not in (ls[2], verify[1], verify[2])


def test_the_work_of_a_command_does_not_grow_with_tensors_times_ranks(run, capsys, monkeypatch):
    """W09: 64 ranks of 80 tensors: verify reads a file once, whatever is in it, and a box is computed once for each shape and rank."""
    reads, boxes, walks = Counter(), Counter(), Counter()

    def counted(count, key, inner):
        def call(*args, **options):
            count[key(*args)] += 1
            return inner(*args, **options)

        return call

    monkeypatch.setattr(LocalStore, "read", counted(reads, lambda _store, name: name, LocalStore.read))
    monkeypatch.setattr(shard_rows, "box_by_rule", counted(boxes, lambda *args: args, box_by_rule))
    monkeypatch.setattr(header_check, "stored_in", counted(walks, lambda _: 0, stored_in))
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()
    data = {name: count for name, count in reads.items() if name.endswith(".safetensors")}
    assert len(data) == 2 * RANKS
    assert max(data.values()) <= 3  # the length of the header, the header, and everything
    assert max(count for name, count in reads.items() if "index-" in name) == 1
    assert max(boxes.values()) == 1
    assert sum(boxes.values()) <= 3 * RANKS
    assert walks.total() == 1


@pytest.fixture
def few(tmp_path):
    """A run of three ranks of which each has one data file, and the same in files of components."""
    weights = {f"w{index}": torch.arange(4000.0) + index for index in range(3)}

    def save(collectives, store):
        rng = {"torch": torch.full((16,), collectives.rank, dtype=torch.uint8)}
        trainer = trainfold.states.make_progress(step=1)
        extra = {"ema": weights, "other": {name: -each for name, each in weights.items()}}
        state = trainfold.TrainState(trainer=trainer, extra=extra, rng=rng)
        trainfold.save(state, store, collectives=collectives)

    for name, ranks in (("few", 3), ("many", 4)):
        store = LocalStore(tmp_path / name, prefers=FilePreference(one_a_rank_from=ranks))
        run_threads(3, lambda world, store=store: save(world, store))
    return tmp_path / "few"


def test_files_of_ranks_are_shown_with_their_components_and_these_with_their_own_bytes(few, capsys):
    """R03: a component has the size that it has in files of its own."""
    found = {}
    for name in ("few", "many"):
        for command in ("inspect", "verify", "ls"):
            assert main([command, str(few.parent / name), "--json"]) == 0
            found[name, command] = json.loads(capsys.readouterr().out)
            fits_its_schema(command, found[name, command])
    files = found["few", "inspect"]["files"]
    assert [each["name"] for each in files] == [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
    assert files[0]["components"] == ["rng", "ema", "other"]
    for key in ("name", "fingerprint", "size_bytes"):
        one, other = ([each[key] for each in found[name, "inspect"]["components"]] for name in ("few", "many"))
        assert one == other
    assert found["few", "verify"]["components"] == found["many", "verify"]["components"]
    assert main(["diff", str(few), str(few.parent / "many")]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("what", "hurt"), [("ema['w0']", {"ema"}), ("rng['torch']", {"rng"}), ("", {"ema", "other", "rng"})]
)
def test_damage_in_a_file_of_a_rank_is_that_of_the_component_whose_leaf_it_is(few, what, hurt, capsys):
    """The others in the file are verified all the same; a header belongs to all of them."""
    manifest = decode_manifest(
        (few / "step-00000001" / "manifest.json").read_bytes(),
        "m",
        read=lambda name, _: (few / "step-00000001" / name).read_bytes(),
    )
    shards = {
        record.path: shard
        for each in manifest.components
        for record in each.tensors[0]
        for shard in record.shards
        if shard.file == 0
    }
    path = few / "step-00000001" / manifest.files[0].name
    data = bytearray(path.read_bytes())
    data[shards[what].start if what else 40] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(few), "--json"]) == CheckpointDamaged.exit_code
    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["components"] if each["status"] == "damaged"} == hurt
    if what:
        assert any(what in each["where"] for each in found["problems"])


def test_verify_finds_digests_of_pieces_that_a_load_of_a_part_would_refuse(tmp_path, capsys):
    """X03: the digest of the whole tensor fits its bytes, and those of its pieces do not."""
    run = tmp_path / "run"
    state = trainfold.TrainState(
        trainer=trainfold.states.make_progress(step=1), extra={"ema": {"w": torch.ones(600, 1000)}}
    )
    trainfold.save(state, run)
    path = run / "step-00000001" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), "m")
    pieces = manifest.component("ema").tensors[0][0].shards[0].pieces
    assert len(pieces) == 3 * 32
    covered = path.read_bytes().partition(TAIL)[0].replace(pieces.encode(), pieces[::-1].encode())
    path.write_bytes(covered + TAIL + digest_of(covered).encode() + END)
    assert main(["verify", str(run)]) == CheckpointDamaged.exit_code
    assert "the digests of its pieces" in capsys.readouterr().out


def test_a_tensor_whose_rows_several_ranks_wrote_is_shown_as_one(tmp_path, capsys):
    """W09, R03: the JSON of `inspect` and the manifest fit their schemas, and a leaf has one row."""
    run = tmp_path / "run"
    state = trainfold.TrainState(
        trainer=trainfold.states.make_progress(step=1), extra={"ema": {"w": torch.ones(600, 1000)}}
    )
    run_threads(3, lambda collectives: trainfold.save(state, run, collectives=collectives))
    for command in ("inspect", "verify"):
        assert main([command, str(run), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        fits_its_schema(command, shown)
        assert {each["name"]: each["fingerprint"] for each in shown["components"]} == trainfold.fingerprint(state)
    document = json.loads((run / "step-00000001" / "manifest.json").read_text())
    fits_its_schema("manifest", document)
    assert len(document["index"]["shards"]["ema"][0]) == 6
