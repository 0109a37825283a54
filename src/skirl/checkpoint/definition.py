"""Check that a checkpoint fits a run, field by field, before anything changes: an error names the first difference."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.core.initial import Given, Initial
from skirl.engine.engine import Engine
from skirl.nn.collection import Collection
from skirl.pipeline.lookahead import Lookahead
from skirl.tools.sealed_json import CheckpointError


def definition(collection: Collection) -> dict[str, Any]:
    engine, pack = collection.engine, collection.pack
    groups = pack.optimizers
    rules = [{"type": rule.name} | asdict(rule) for rule in groups]
    for rule, of in zip(rules, groups, strict=True):
        if not of.weight_follows_state:
            del rule["lr"]  # it is state, which the optimizer's handle keeps
    frozen = collection.frozen
    tables = [
        {
            **{name: getattr(table, name) for name in ("name", "rows", "dim", "features", "pooling")},
            "init": _init(table.initial),
            "optimizer": rules[t],
            "pattern": groups.all[groups.of[t]].name,
            "frozen": table.name in frozen,
        }
        for t, table in enumerate(pack.tables)
    ]
    found = {
        "collection": next(
            kind.__name__ for kind in type(collection).__mro__ if kind.__module__.startswith("skirl.nn")
        ),
        "seed": pack.seed,
        "dtype": str(engine.torch_dtype).removeprefix("torch."),
        "tables": tables,
    }
    return json.loads(json.dumps(found))


def _init(initial: Initial) -> dict[str, Any]:
    """Describe an initialiser, or an array by its digest, for which the first save or load reads the whole array."""
    facts = {"digest": initial.digest} if isinstance(initial, Given) else asdict(initial)
    return {"type": type(initial).__name__} | facts


def check_definitions(saved: Any, here: dict[str, Any], path: Path) -> None:
    if saved.keys() != here.keys():
        names = [", ".join(name or "the model itself" for name in found) for found in (saved, here)]
        raise CheckpointError(
            f"{path} has the rows of {names[0]}, and here they are of {names[1]}: load into the model that was saved, or "
            "take the rows alone with skirl.import_rows"
        )
    for name in here:
        check_definition(saved[name], here[name], path)


def check_definition(saved: Any, here: Any, path: Path, where: str = "") -> None:
    if isinstance(saved, dict) and isinstance(here, dict) and saved.get("type") != here.get("type"):
        check_definition(saved.get("type"), here.get("type"), path, where)
    elif isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == here.keys():
        for key in here:
            check_definition(saved[key], here[key], path, f"{where}.{key}" if where else key)
    elif isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here) and where == "tables":
        for i, table in enumerate(here):
            check_definition(saved[i], table, path, f"table {table['name']!r}")
    elif where == "tables":
        names = [", ".join(repr(table["name"]) for table in tables) for tables in (saved, here)]
        raise CheckpointError(f"{path} has the tables {names[0]}, this model {names[1]}: make them as they were saved")
    elif saved != here and where.endswith(".init.digest"):
        raise CheckpointError(
            f"{path} was saved with another array as {where.removesuffix('.digest')} (digest {saved}, here {here}): give "
            "the one that its rows began from"
        )
    elif saved != here:
        raise CheckpointError(
            f"{path} was saved with {where} = {saved!r}, here it is {here!r}: set it to what was saved"
        )


def check_optimizers(saved: list[Any], parts: list[Any], model: nn.Module) -> None:
    if not parts:
        return
    if len(saved) != len(parts):
        types = ", ".join(entry["type"] for entry in saved) or "none"
        raise CheckpointError(f"{len(parts)} optimizers given, the checkpoint has {len(saved)} ({types}): pass these")
    for i, (entry, part) in enumerate(zip(saved, parts, strict=True)):
        if entry["type"] != type(part).__name__:
            raise CheckpointError(
                f"optimizers[{i}] is of type {type(part).__name__}, it was {entry['type']}: pass them as they were saved"
            )
        if entry["parameters"] != parameters(part, model):
            raise CheckpointError(
                f"optimizers[{i}] has other parameters or groups than it had: make both as they were saved"
            )


def check_model(saved: dict[str, Any], model: nn.Module) -> None:
    here = model.state_dict()
    if saved.keys() != here.keys():
        alone = {
            "the checkpoint": [name for name in saved if name not in here],
            "this model": [name for name in here if name not in saved],
        }
        texts = [f"{whose} has {_some(names)}" for whose, names in alone.items() if names]
        raise CheckpointError(f"{', and '.join(texts)}, which the other lacks: make the model as it was saved")
    for name, value in here.items():
        if isinstance(value, torch.Tensor) and saved[name].shape != value.shape:
            raise CheckpointError(
                f"{name} is {list(saved[name].shape)} in the checkpoint, {list(value.shape)} here: make it as it was"
            )
        if isinstance(value, torch.Tensor) and saved[name].dtype != value.dtype:  # torch would round it silently
            raise CheckpointError(
                f"{name} is of {saved[name].dtype} in the checkpoint, of {value.dtype} here: make it as it was"
            )


def check_data(saved: Any, data: Any, engines: Sequence[Engine]) -> None:
    if data is None:
        return
    if saved is None:
        raise CheckpointError("the checkpoint was saved without data: leave data out, or save with data=batches")
    if isinstance(data, Lookahead) and not {*engines} <= {*data.engines}:
        raise CheckpointError("data is a lookahead over another model: pass the one over the model that is loaded")
    if hasattr(data, "check_state"):
        data.check_state(saved)


def listed(optimizers: Sequence[Any]) -> list[Any]:
    if hasattr(optimizers, "state_dict"):
        raise TypeError(f"optimizers is one {type(optimizers).__name__}: pass a list of them, optimizers=[...]")
    for i, part in enumerate(parts := list(optimizers)):
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"optimizers[{i}] is a {type(part).__name__}: pass what has state_dict and load_state_dict")
    return parts


def parameters(part: Any, model: nn.Module) -> list[list[str]] | None:
    if not isinstance(part, torch.optim.Optimizer):
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in part.param_groups]


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
