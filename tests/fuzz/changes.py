"""Changes of a checkpoint that know its structure: of the manifest's JSON, of its text, of headers, tensors and file sizes.

A case is a list of numbers, each the seed of one change; so a case that fails shrinks by leaving numbers out. Hypothesis is not used:
what it needs for its own records for each example is ten times what a reader needs to refuse a manifest.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final, TypeAlias, final

import attrs
from kit.core.roots import covered_by, sealed_bytes

from trainfold.core.digest import digest_of
from trainfold.core.format.dtypes import size_bytes

Json: TypeAlias = Any

SCALARS: Final = ("int", "float", "bytes", "counter", "numpy")
TAGS: Final = ("t", "as", "node", "dict", "leaves", "list", "tuple", "map", "odict", "fields", "static", *SCALARS)
CLASSES: Final = tuple(
    f"trainfold.{name}"
    for name in ("TrainState", "ModelState", "OptimizerState", "ParamGroup", "Progress", "Opaque", "Key", "DataCursor", "Tally", "None")
)  # fmt: skip
ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ud800\nstep 9: verified\r"
TEXTS: Final = (
    "", "model", "extra", "trainer", "float32", "bfloat16", "bool", "complex64", "float4_e2m1fn_x2", "uint64", "MT19937", "PCG64",
    "../x", "/etc/passwd", "a/b", ".", "manifest.json", "step-00000001", "x" * 300, ESCAPES, "\ud800", "\0", "é", "0x" + "f" * 5000, "-0x1",
    "7ff0000000000000", "7ff8000000000001", "AA==", "AA=", "xxh3:" + "0" * 32, "numpy", *TAGS, *CLASSES,
)  # fmt: skip
NUMBERS: Final = (
    0, 1, -1, 2, 3, 7, 8, 255, 624, 625, 4096, 2**15, 2**31, 2**32, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63, 2**64, -(2**63), 10**30,
    10**4000, 0.0, -0.0, 0.5, 1e308, -1e-320, True, False, None,
)  # fmt: skip
DEEP: Final = {  # deeper than `json` can write: they stay text until the document is written
    **{f"@list {depth}": "[" * depth + "1" + "]" * depth for depth in (60, 66, 300, 5000)},
    **{f"@dict {depth}": '{"dict":{"a":' * depth + "1" + "}}" * depth for depth in (30, 64, 70, 400)},
    "@counter 200": '{"counter":[["a",' * 200 + "1" + "]]}" * 200,
    "@nan": "NaN", "@inf": "-Infinity", "@huge": "1e999", "@digits": "9" * 5000, "@wide": "[" + "0," * 20_000 + "0]",
}  # fmt: skip


@final
@attrs.define
class Checkpoint:
    """A checkpoint that is being changed.

    Attributes:
        document: the manifest without its digest.
        files: name -> bytes of the data files.
        edits: changes to the manifest's text after it is written.
    """

    document: dict[str, Json]
    files: dict[str, bytes]
    edits: list[Callable[[bytes], bytes]] = attrs.field(factory=list)

    def sealed(self) -> bytes:
        """The bytes of the manifest, with a matching digest."""
        covered = covered_by(self.document)
        if b'"@' in covered:
            for mark, text in DEEP.items():
                covered = covered.replace(json.dumps(mark).encode(), text.encode())
        for edit in self.edits:
            covered = edit(covered)
        return sealed_bytes(covered)


def changed(text: bytes, files: Mapping[str, bytes], seeds: list[int]) -> Checkpoint:
    """The checkpoint with one change for each seed."""
    found = Checkpoint(json.loads(text), dict(files))
    found.document.pop("digest", None)
    for seed in seeds:
        random = Random(seed)
        change = random.choices(_CHANGES, _WEIGHTS)[0]
        change(found, random)
    return found


# --- the manifest ----------------------------------------------------------------------------------------------------


def _place(document: Json, random: Random) -> tuple[Json, Any]:
    """A container in the document and one of its keys; chosen by a random walk, so that deep places are as frequent as shallow ones."""
    at, key = document, None
    root = random.choice(("components", "components", "components", None))
    if document.get(root):
        at, key = document, root
    holder = None
    while True:
        inside = at if key is None else at[key]
        keys = list(inside) if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
        if not keys or (holder is not None and random.random() < 0.12):
            break
        holder, key = inside, random.choice(keys)
        at = holder
    return (document, random.choice(list(document))) if holder is None and key is None else (at, key)


def _any(random: Random, depth: int = 0) -> Json:
    """A JSON value that the format has, or nearly has."""
    kind = random.randrange(9 if depth < 3 else 4)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind < 4:
        return random.choice(TEXTS) if random.random() < 0.9 else random.choice(list(DEEP))
    if kind == 4:
        return [_any(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 5:
        return {random.choice(TEXTS): _any(random, depth + 1) for _ in range(random.randrange(3))}
    if kind == 6:
        return {"t": random.choice((0, 1, 2, 99, -1, True, 0.5, None))} | (
            {"as": "numpy"} if random.random() < 0.4 else {}
        )
    if kind == 7:
        return {
            "node": random.choice(CLASSES),
            "fields": {random.choice(("value", "step", "bits", "params", "hyper")): _any(random, depth + 1)},
        }
    tag = random.choice(TAGS)
    held = _any(random, depth + 1)
    if tag in ("map", "odict", "counter"):
        held = [[_any(random, depth + 2), held]]
    return {tag: {"a": held} if tag in ("dict", "leaves") else [held] if tag in ("list", "tuple") else held}


def _near(held: Json, random: Random) -> Json:
    """Another value of the same kind, or of a similar one."""
    if type(held) is int:
        as_other = (float(held), str(held)) if abs(held) < 2**64 else (0.5, hex(held))
        return random.choice((held + 1, held - 1, -held, held * 2, held + 4096, *as_other, random.choice(NUMBERS)))
    if type(held) is str:
        at = random.randrange(len(held) + 1)
        other = random.choice(TEXTS)
        return random.choice(
            (held + "x", held[:-1], held.upper(), other, other, held[:at] + ESCAPES + held[at:], held[at:] + held[:at])
        )
    if type(held) is list and held:
        other = copy.deepcopy(held)
        random.shuffle(other)
        return random.choice(
            (held[:-1], held[1:], held + held[:1], other, [], held[0], {"list": held}, {"tuple": held})
        )
    if type(held) is dict and held:
        key = random.choice(list(held))
        rest = {name: value for name, value in held.items() if name != key}
        renamed = {(random.choice(TEXTS) if name == key else name): value for name, value in held.items()}
        return random.choice(
            (
                rest,
                renamed,
                {**held, random.choice(TEXTS): _any(random)},
                list(held.values()),
                held[key],
                {},
                {"list": [held]},
            )
        )
    if type(held) is float:
        return random.choice((-held, 0.0, int(held) if abs(held) < 2**53 else 1, "@nan", "@huge", 1e308, str(held)))
    return _any(random)


def _replace(checkpoint: Checkpoint, random: Random) -> None:
    holder, key = _place(checkpoint.document, random)
    holder[key] = _any(random) if random.random() < 0.35 else _near(holder[key], random)


def _value(checkpoint: Checkpoint, random: Random) -> None:
    """Another value of the same kind in a structure: it is well formed, but may not be a valid state of its owner."""
    found: list[tuple[Any, Any]] = []
    try:
        nodes = [component["node"] for component in checkpoint.document["components"]]
        todo: list[Any] = [random.choice(nodes)]
        while todo:
            held = todo.pop()
            items = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
            for key, value in items:
                todo.append(value)
                if not isinstance(value, dict | list) and key not in ("t", "as", "node"):
                    found.append((held, key))
    except (KeyError, TypeError, IndexError):
        return
    if found:
        holder, key = random.choice(found)
        holder[key] = _near(holder[key], random) if random.random() < 0.8 else _any(random)


def _delete(checkpoint: Checkpoint, random: Random) -> None:
    holder, key = _place(checkpoint.document, random)
    del holder[key]


def _copy(checkpoint: Checkpoint, random: Random) -> None:
    source, name = _place(checkpoint.document, random)
    value = copy.deepcopy(source[name])
    holder, key = _place(checkpoint.document, random)
    holder[key] = value


def _swap(checkpoint: Checkpoint, random: Random) -> None:
    one, key = _place(checkpoint.document, random)
    other, name = _place(checkpoint.document, random)
    one[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(one[key])


# --- its text --------------------------------------------------------------------------------------------------------


def _text(checkpoint: Checkpoint, random: Random) -> None:
    """A duplicate key, a byte outside ASCII, a cut, white space, or a number that JSON does not have."""
    kind, share = random.randrange(6), random.random()

    def edit(text: bytes) -> bytes:
        keys = [found.end() for found in re.finditer(rb"[{,](?=\")", text)]
        at = keys[int(share * len(keys))] if keys else 0
        if kind == 0:
            key = re.match(rb'"[^"\\]*"', text[at:])
            return text[:at] + (key[0] if key else b'"a"') + b":0," + text[at:]
        if kind == 1:
            return text[:at] + "\u00e9\ufeff".encode() + text[at:]
        if kind == 2:
            return text[: max(60, int(share * len(text)))]
        if kind == 3:
            return text[:at] + b" \t\n" + text[at:]
        if kind == 4:
            return re.sub(
                rb":\d+", random.choice((b":NaN", b":-Infinity", b":1e999", b":01", b":+1", b":0x1")), text, count=1
            )
        return text.replace(b",\n", random.choice((b",", b"\n", b",\n,\n")), 1)

    checkpoint.edits.append(edit)


# --- data files ------------------------------------------------------------------------------------------------------


def _records(checkpoint: Checkpoint) -> list[tuple[dict[str, Json], list[Json], int]]:
    """Each file's record with a shard in it and where that ends, if the document still has them."""
    try:
        records = {each["component"]: each for each in checkpoint.document["files"]}
        tables = {each["name"]: each["tensors"] for each in checkpoint.document["components"]}
        found = [
            (records[name], shard, shard[1] + size_bytes(tables[name][shard[0]][1], tuple(tables[name][shard[0]][2])))
            for name, shards in checkpoint.document["index"]["shards"].items()
            for shard in shards
            if records[name]["name"] in checkpoint.files
        ]
        return [
            (record, shard, stop)
            for record, shard, stop in found
            if 0 <= shard[1] < stop <= len(checkpoint.files[record["name"]])
        ]
    except (KeyError, TypeError, IndexError, AttributeError):
        return []


def _reseal(checkpoint: Checkpoint, record: dict[str, Json], data: bytes) -> None:
    checkpoint.files[record["name"]] = data
    record["size_bytes"], record["digest"] = len(data), digest_of(data)


def _tensor(checkpoint: Checkpoint, random: Random) -> None:
    """Other bytes in a tensor, such as that of a random stream, with matching digests."""
    found = _records(checkpoint)
    if not found:
        return
    record, shard, stop = random.choice(found)
    data = bytearray(checkpoint.files[record["name"]])
    start = shard[1]
    for _ in range(random.choice((1, 1, 4, 64))):
        place = start + random.randrange(random.choice((8, 32, stop - start)) if stop - start > 32 else stop - start)
        data[place] = random.choice((0, 255, 1, 127, 128, random.randrange(256)))
    shard[3] = digest_of(bytes(data[start:stop]))
    _reseal(checkpoint, record, bytes(data))


def _header(checkpoint: Checkpoint, random: Random) -> None:
    """Another header of a safetensors file, with the same length or another."""
    found = _records(checkpoint)
    if not found:
        return
    record, _, _ = random.choice(found)
    data = checkpoint.files[record["name"]]
    length = int.from_bytes(data[:8], "little")
    kind = random.randrange(4)
    if kind == 0:
        other = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data)))
        _reseal(checkpoint, record, (other % 2**64).to_bytes(8, "little") + data[8:])
        return
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return
    holder, key = _place({"header": header}, random)
    if kind == 1:
        holder.pop(key) if isinstance(holder, dict) else None
    else:
        holder[key] = _near(holder[key], random)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text[:length].ljust(length) if kind < 3 else text
    _reseal(checkpoint, record, len(text).to_bytes(8, "little") + text + data[8 + length :])


def _size(checkpoint: Checkpoint, random: Random) -> None:
    """A shorter or longer file, with a record of its new or of its old size."""
    found = _records(checkpoint)
    if not found:
        return
    record, _, _ = random.choice(found)
    data = checkpoint.files[record["name"]]
    data = random.choice((data[:-1], data[: len(data) // 2], b"", data + b"\0", data * 2, data[8:]))
    if random.random() < 0.5:
        _reseal(checkpoint, record, data)
    else:
        checkpoint.files[record["name"]] = data


_CHANGES: Final = (_replace, _value, _delete, _copy, _swap, _text, _tensor, _header, _size)
_WEIGHTS: Final = (7, 9, 2, 1, 1, 1, 5, 1, 1)
