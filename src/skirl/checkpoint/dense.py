"""The dense part of a checkpoint, which is everything but rows: one safetensors file in a folder of its own, so that the
HuggingFaceStorageReader of torch.distributed.checkpoint can read it.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit, sync_folder, to_disk

NAME = "model.safetensors"


def write(folder: Path, mark: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors and wait until they are on disk. Return their entry for the header."""
    own = folder / f"dense-{mark}"
    own.mkdir()
    path = own / NAME
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        to_disk(file)
    sync_folder(own)
    sync_folder(folder)
    return {"file": f"{own.name}/{NAME}", "bytes": path.stat().st_size, "sha256": digest}


def read(folder: Path, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that `write` was given, after a check of the file's checksum."""
    if (wrong := misfit(entry, {"file": TEXT, "bytes": COUNT, "sha256": TEXT})) is not None:
        raise CheckpointError(f"the dense part is incomplete or damaged ({wrong}): use another checkpoint")
    path = folder / entry["file"]
    if path.parent.parent != folder or ".." in path.parts[-2:]:
        raise CheckpointError(f"{entry['file']!r} is a file outside its folder: do not trust this checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise CheckpointError(f"{path} has {size:,} bytes, {entry['bytes']:,} were written: use another checkpoint")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged, its checksum differs: use another checkpoint")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}): use another checkpoint") from None
