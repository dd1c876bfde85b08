"""The specification page suffices to read a checkpoint: its reader imports neither trainfold nor torch."""

import math
import subprocess
import sys
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from kit.backends.reuse_cases import SHAPES, Chain, whole_state

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.core.tensor_memory import tensor_bytes

TIED = torch.arange(6.0).reshape(2, 3)
SCALARS = {
    "none": None,
    "yes": True,
    "text": "a'b\"c\\d\né\u2028\ud800",
    "small": -(2**53),
    "big": 2**53 + 1,
    "huge": -(10**4001),
    "float": -0.0,
    "nan": float("nan"),
    "inf": -math.inf,
    "bytes": b"\x00\xff",
    "numpy": np.float32(1.5),
    "counter": Counter({"a": 2, 3: 1}),
    "tuple": (1, [2.0, ()]),
    "map": {1: "int", (1, "a"): "tuple", None: "none", b"b": "bytes"},
    "odict": OrderedDict([("z", 1), ("a", 2)]),
}


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype that the format supports, with arbitrary bits."""
    made = {}
    for name, stored in STORED.items():
        data = torch.randint(0, 2 if name == "bool" else 256, (3 * stored.itemsize,), dtype=torch.uint8)
        made[name] = data.view(torch_dtype(name))
    return made


@pytest.fixture
def reader(root):
    """The page's reader, as a module that cannot import trainfold or torch."""
    page = (root / "docs" / "explanation" / "native-format.md").read_text()
    (code,) = [part.partition("```")[0] for part in page.split("```python\n")[1:]][-1:]
    assert "import trainfold" not in code
    assert "import torch" not in code
    namespace: dict = {}
    exec(compile(code, "native-format.md", "exec"), namespace)
    return namespace


TABLE = torch.rand(3, 300, 100)  # two ranks divide it inside of a row


def same_bits(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return array.tobytes() == bytes(tensor_bytes(tensor)) and array.shape[:-1] == tuple(tensor.shape)


def test_the_reader_of_the_specification_reads_every_kind_of_leaf(reader, tmp_path):
    """The written bytes match the page, for every dtype, scalar, container and tie."""
    tensors = {
        **every_dtype(),
        "empty": torch.empty(0, 5),
        "zero_d": torch.tensor(3.5),
        "strided": torch.rand(4, 3).t(),
    }
    state = TrainState(
        model=ModelState(
            Leaves({"w": TIED, "b.c'd": torch.rand(4)}), Leaves({"running": torch.rand(2)}), ties=(("v", "w"),)
        ),
        trainer=Progress(step=7, samples=2**60),
        extra={"leaves": tensors, "scalars": SCALARS, "tied": [TIED, TIED], "array": {"x": np.arange(5)}},
    )
    trainfold.save(state, tmp_path / "run")
    found = reader["read_checkpoint"](tmp_path / "run" / "step-00000007")
    assert same_bits(TIED, found["model"]["params"]["w"])
    assert found["model"]["ties"] == (("v", "w"),)
    assert found["trainer"] == {"step": 7, "epoch": 0, "samples": 2**60, "tokens": 0}
    for name, tensor in tensors.items():
        assert same_bits(tensor, found["leaves"][name]), name
    assert found["tied"][0] is found["tied"][1]
    assert found["array"]["x"].view("<i8")[..., 0].tolist() == list(range(5))
    assert math.isnan(found["scalars"].pop("nan"))
    expected = {name: value for name, value in SCALARS.items() if name != "nan"}
    assert found["scalars"] == expected
    assert math.copysign(1, found["scalars"]["float"]) == -1


def test_the_reader_of_the_specification_puts_the_slices_of_many_ranks_together(reader, tmp_path):
    whole = torch.arange(35.0).reshape(7, 5)

    def on_rank(collectives):
        rows = slice(2, 7) if collectives.rank else slice(0, 2)
        shard = Shard(whole[rows].clone(), whole.shape, (rows.start, 0))
        extra = {"ema": {"w": shard, "all": TABLE}}
        state = TrainState(trainer=Progress(step=1), rng={"rank": collectives.rank}, extra=extra)
        trainfold.save(state, tmp_path / "run", collectives=collectives)

    run_threads(2, on_rank)
    found = reader["read_checkpoint"](tmp_path / "run" / "step-00000001")
    assert same_bits(whole, found["ema"]["w"])
    assert same_bits(TABLE, found["ema"]["all"])
    sizes = [path.stat().st_size for path in (tmp_path / "run" / "step-00000001").glob("ema-*")]
    assert max(sizes) < TABLE.nbytes  # each rank wrote a part of it
    assert found["rng"] == [{"rank": 0}, {"rank": 1}]


def test_the_reader_of_the_specification_reads_through_references(reader, tmp_path):
    chain = Chain(2, cut=True, store=LocalStore(tmp_path / "run"))
    chain.save(1, dict.fromkeys(SHAPES, 0))
    chain.save(2, {name: int(name == "half") for name in SHAPES})
    found = reader["read_checkpoint"](tmp_path / "run" / "step-00000002")
    for name, tensor in whole_state(2, chain.expected["step-00000002"]).model.params.items():
        assert same_bits(tensor, found["model"]["params"][name]), name


def test_the_reader_of_the_specification_reads_files_of_ranks(reader, tmp_path):
    """Version 5: two components in each file, streams of each rank, and references to such files."""
    chain = Chain(2, cut=True, store=LocalStore(tmp_path / "run", prefers=FilePreference(1)))
    chain.save(1, dict.fromkeys(SHAPES, 0))
    chain.save(2, {name: int(name == "half") for name in SHAPES})
    for step in (1, 2):
        folder = tmp_path / "run" / f"step-0000000{step}"
        assert b'"schema_version":5' in (folder / "manifest.json").read_bytes()
        assert (
            sorted(path.name for path in folder.glob("*.safetensors"))
            == [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)][: 3 - step]
        )
        found = reader["read_checkpoint"](folder)
        for name, tensor in whole_state(step, chain.expected[folder.name]).model.params.items():
            assert same_bits(tensor, found["model"]["params"][name]), name


def test_the_reader_needs_neither_trainfold_nor_torch(root):
    page = (root / "docs" / "explanation" / "native-format.md").read_text()
    code = page.split("```python\n")[-1].partition("```")[0]
    blocked = "import sys; sys.modules['trainfold'] = sys.modules['torch'] = sys.modules['optree'] = None\n"
    subprocess.run([sys.executable, "-c", blocked + code], check=True)


def test_the_table_of_dtypes_in_the_specification_is_complete(root):
    page = (root / "docs" / "explanation" / "native-format.md").read_text()
    for name, stored in STORED.items():
        assert f"`{name}`" in page, name
        assert f"`{stored.name}`" in page, stored.name


def test_the_reader_of_the_specification_reads_the_checkpoints_of_old_releases(reader, root):
    """These files are never rewritten, so the page and its reader must support them forever."""
    steps = sorted(root.glob("tests/compat/v*/run/step-*"))
    assert steps
    for step in steps:
        assert reader["read_checkpoint"](step)
