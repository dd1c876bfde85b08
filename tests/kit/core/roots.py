"""Roots of version 1, as old releases wrote them, and changed documents with a matching digest, as an attacker would write them."""

import json

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.format.structure.places import places
from trainfold.core.json_values import canonical_json

FIRST_LINE = (
    "format", "schema_version", "run_id", "step", "timeline", "forks", "parent", "revision", "size_bytes", "omitted", "fingerprints", "refers",
)  # fmt: skip


def covered_by(document):
    """The bytes of a document that its digest covers."""
    first = {key: document[key] for key in FIRST_LINE if key in document}
    rest = {key: value for key, value in document.items() if key not in first and key != "digest"}
    head, body = (json.dumps(part, separators=(",", ":")).encode() for part in (first, rest))
    return head[:-1] + b",\n" + body[1:-1]


def resealed(document):
    """The bytes of a document, with a digest that fits."""
    return sealed_bytes(covered_by(document))


def sealed_bytes(covered):
    """The bytes of a root, from those that its digest covers."""
    return covered + TAIL + digest_of(covered).encode() + END


def as_version_2(document):
    """Change a document of version 3 with its only rank's index into one of version 2, as a release of its time wrote it."""
    del document["size_bytes"]
    prints = document.pop("fingerprints")
    document["schema_version"] = 2
    for component in document["components"]:
        component["fingerprint"] = prints[component["name"]]
        if "node" in component:
            component["tensors"] = rows_of(component["node"], component["tensors"], component["name"])


def rows_of(node, table, name):
    """The table of version 2 for one of version 3."""
    paths = {}
    for leaf in places(node, name):
        if leaf.tensor is not None:
            paths.setdefault(leaf.tensor, leaf.path)
    return [[paths[number], *table["kinds"][kind]] for number, kind in enumerate(table["of"])]


def encode_v1(manifest):
    """The bytes of a manifest as version 1."""
    head = {**attrs.asdict(manifest.head), "schema_version": 1}
    order = ("schema_version", "run_id", "step", "timeline", "forks", "parent", "revision")
    body = {
        "world_size": manifest.world_size,
        "omitted": list(manifest.omitted),
        "contract": dict(manifest.contract),
        "versions": dict(manifest.versions),
        "files": [
            {
                "name": file.name,
                "component": file.components[0],
                "rank": file.rank,
                "size_bytes": file.size_bytes,
                "digest": file.digest,
            }
            for file in manifest.files
        ],
        "components": [
            {
                "name": component.name,
                "fingerprint": component.fingerprint,
                "nodes": list(component.nodes),
                "tensors": [[tensor(record) for record in table] for table in component.tensors],
            }
            for component in manifest.components
        ],
    }
    first = canonical_json({"format": "trainfold", **{key: head[key] for key in order}})[:-1]
    return sealed_bytes(first + b",\n" + canonical_json(body)[1:-1])


def tensor(record):
    shards = [[s.file, s.start, s.stop, [list(side) for side in s.box], s.digest] for s in record.shards]
    return {"path": record.path, "dtype": record.dtype, "shape": list(record.shape), "shards": shards}
