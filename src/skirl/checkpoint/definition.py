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
from skirl.nn.collection import Collection, collections_of
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


def check_fits(body: dict[str, Any], model: nn.Module, parts: Sequence[Any], state: dict[str, Any], path: Path) -> None:
    """Raise unless collections, optimizers (if given) and the model's `state` were like those of a header when saved."""
    here = {name: definition(collection) for name, collection in collections_of(model).items()}
    check_same(dict.fromkeys(body["definition"]), dict.fromkeys(here), path)
    for name, of in here.items():
        check_same(_by_table(body["definition"][name]), _by_table(of), path)
    if parts:
        each = body["run"]["optimizers"], [optimizer(part, model) for part in parts]
        saved, now = (
            {f"optimizers[{i}]": {n: p[n] for n in ("type", "parameters")} for i, p in enumerate(of)} for of in each
        )
        check_same(saved, now, path)
    check_same(_described(state), _described(model.state_dict()), path)


def _by_table(definition: dict[str, Any]) -> dict[str, Any]:
    tables = {table["name"]: table for table in definition["tables"]}
    return {**definition, "tables": [*tables], **{f"table {name!r}": table for name, table in tables.items()}}


def _described(state: dict[str, Any]) -> dict[str, str]:
    """Torch itself refuses other shapes, but would round other dtypes silently."""
    return {n: f"{list(v.shape)} {v.dtype}" if isinstance(v, torch.Tensor) else "" for n, v in state.items()}


def check_same(saved: Any, here: Any, path: Path, where: str = "") -> None:
    """Raise a CheckpointError that names the first difference between what was saved and what is here."""
    if not (isinstance(saved, dict) and isinstance(here, dict)):
        if saved != here:
            was, now = f"{saved!r:.300}", f"{here!r:.300}"
            raise CheckpointError(f"{path} was saved with {where} = {was}, here it is {now}: set it to what was saved")
    elif saved.get("type") != here.get("type"):
        check_same(saved.get("type"), here.get("type"), path, where)
    else:
        for name in dict.fromkeys([*saved, *here]):
            if name not in saved or name not in here:
                there = "has" if name in saved else "has no"
                raise CheckpointError(
                    f"{path} {there} {name or 'rows of the model itself'}, unlike this model: make all as it was "
                    "saved, or take the rows alone with skirl.import_rows"
                )
            check_same(saved[name], here[name], path, f"{where}.{name}" if where else name)


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


def optimizer(part: Any, model: nn.Module) -> dict[str, Any]:
    """Describe an optimizer, or what else has a state, by its class and the parameters of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
    return {"type": type(part).__name__, "parameters": [[names.get(id(p), "?") for p in g["params"]] for g in groups]}
