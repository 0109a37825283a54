"""The dense part of a checkpoint: one safetensors file, in a folder that torch.distributed.checkpoint reads as its own.

Everything that is no row goes here as named tensors: parameters, buffers, optimizer states, random generators. DCP's usual
writer would do, but for its metadata, which is a pickle, and a pickle runs any code when it is read. DCP has a second
format, that of Hugging Face: a folder of safetensors files and no pickle. A file alone is such a folder, so
`torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader(folder))` reads ours, sharded or not,
while writing it needs neither DCP's import (0.7 s) nor a process group.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skirl.tools.sealed_json import CheckpointError, sync_folder, to_disk
from skirl.tools.shape_of import COUNT, TEXT, misfit

NAME = "model.safetensors"


def write(folder: Path, mark: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors, made to last; what the header says of them."""
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
    """What `write` was given; its checksum is compared first."""
    if (wrong := misfit(entry, {"file": TEXT, "bytes": COUNT, "sha256": TEXT})) is not None:
        raise CheckpointError(f"the dense part lacks something ({wrong}): use another checkpoint")
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
        raise CheckpointError(f"{path} is no safetensors file ({error}): use another checkpoint") from None
