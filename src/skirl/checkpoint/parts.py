"""Headers of parts: each of several trainers writes one for its part, and the checkpoint's own header names all of them."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.core.placement import Placement
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit, read_sealed, skirl_version, write_sealed

FORMAT = "skirl-checkpoint-part"
FORMAT_VERSION = 1
NAME = re.compile(r"part-[0-9]{6,18}-[0-9]+-of-[0-9]+-[0-9a-f]{16}\.json")
_TRAINERS = {"count": COUNT, "shards": COUNT, "digest": TEXT, "parts": [{"file": TEXT, "sha256": TEXT}]}
_PART = {
    "number": COUNT,
    "rank": COUNT,
    "trainers": COUNT,
    "digest": TEXT,
    "rows": {...: {"store": {}, "cache": {"files": [{}]}}},
    "counters": {...: {...: COUNT}},
    "split": {},
}

Body = Mapping[str, Any]
"""The content of a header."""


def name(number: int, rank: int, trainers: int, mark: str) -> str:
    """Return the file name of the header of a part.

    >>> name(12, 0, 2, "0" * 16)
    'part-000012-0-of-2-0000000000000000.json'
    """
    return f"part-{number:06}-{rank}-of-{trainers}-{mark}.json"


def write(folder: Path, body: Body, mark: str) -> dict[str, str]:
    """Write the header of a part, once all that it names is on disk. Return its entry for the checkpoint's header."""
    path = folder / name(body["number"], body["rank"], body["trainers"], mark)
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "skirl": skirl_version()}
    write_sealed(path, head | dict(body), mark)
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def read(header: Path, body: Body) -> list[dict[str, Any]]:
    """Read the parts that a checkpoint's header names, in the order of ranks. Raise a CheckpointError if one is damaged."""
    trainers, number = body.get("trainers"), body.get("number")
    if (wrong := misfit(trainers, _TRAINERS, "trainers")) is not None:
        raise CheckpointError(f"{header} is incomplete or damaged ({wrong}): use another checkpoint")
    assert isinstance(trainers, dict)
    try:
        saved = Placement.of(trainers["placement"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{header} has an impossible placement of rows ({error}): use another checkpoint"
        ) from None
    count = trainers["count"]
    if not (saved.sites == count == len(trainers["parts"]) > 1 and saved.digest == trainers["digest"]):
        raise CheckpointError(f"{header} does not have the parts of all its trainers: use another checkpoint")
    found = []
    for rank, entry in enumerate(trainers["parts"]):
        path = header.parent / entry["file"]
        if NAME.fullmatch(entry["file"]) is None:
            raise CheckpointError(
                f"{header} names {entry['file']!r}, which is not a part of a checkpoint: do not trust this checkpoint"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
        part = read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="part of a checkpoint")
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path} is not the one that {header.name} names: use another checkpoint")
        if (wrong := misfit(part, _PART)) is not None:
            raise CheckpointError(f"{path} is incomplete or damaged ({wrong}): use another checkpoint")
        if [part[n] for n in ("number", "rank", "trainers", "digest")] != [number, rank, count, saved.digest]:
            raise CheckpointError(f"{path} is a part of another checkpoint than {header.name}: use another checkpoint")
        if any(part[of].keys() != body["definition"].keys() for of in ("rows", "counters", "split")):
            raise CheckpointError(f"{path} has other collections than {header.name}: use another checkpoint")
        found.append(part)
    return found


def of(body: Body) -> list[Body]:
    """Return the parts of a checkpoint, each with `rows`. With one trainer, the header itself is the only part."""
    return body["parts"] if "trainers" in body else [body]


def placement(body: Body) -> Placement:
    """Return the placement of rows among the trainers that saved a checkpoint."""
    return Placement.of(body["trainers"]["placement"]) if "trainers" in body else Placement.even(1)


def files(body: Body) -> set[str]:
    """Return the file names of the headers of parts that a header names."""
    return {entry["file"] for entry in body["trainers"]["parts"]} if "trainers" in body else set()
