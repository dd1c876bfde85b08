"""Manifests of version 1, as old releases wrote them."""

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.json_values import canonical_json


def encode_v1(manifest):
    """The bytes of a manifest as version 1."""
    head = {**attrs.asdict(manifest.head), "schema_version": 1}
    order = ("schema_version", "run_id", "step", "timeline", "forks", "parent", "revision")
    body = {
        "world_size": manifest.world_size,
        "omitted": list(manifest.omitted),
        "contract": dict(manifest.contract),
        "versions": dict(manifest.versions),
        "files": [attrs.asdict(file) for file in manifest.files],
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
    covered = first + b",\n" + canonical_json(body)[1:-1]
    return covered + TAIL + digest_of(covered).encode() + END


def tensor(record):
    shards = [[s.file, s.start, s.stop, [list(side) for side in s.box], s.digest] for s in record.shards]
    return {"path": record.path, "dtype": record.dtype, "shape": list(record.shape), "shards": shards}
