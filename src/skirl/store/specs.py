"""Names of stores: one, or a list of several with weights, such as `disk:a,disk:b*2`."""

import re
from fractions import Fraction
from pathlib import Path

_KNOWN = "memory, disk:FOLDER, rpc://HOST:PORT, or a list of these with weights, such as disk:a,disk:b*2"


def _split(spec: str) -> list[tuple[str, str]]:
    """Return each store of a list and the text of its weight, with its asterisk."""
    if "," not in spec:
        return [(spec, "")]
    ends = [(item, re.search(r"(\*[^*/]*)?$", item)) for item in spec.split(",")]
    return [(item[: end.start()], end[0]) for item, end in ends if end is not None]


def shards(spec: str) -> list[tuple[str, Fraction]]:
    """Return the stores that a spec names, with their weights. Raise a ValueError unless each can be opened.

    >>> [(store, str(weight)) for store, weight in shards("disk:a,rpc://10.0.0.5:7000*2.5")]
    [('disk:a', '1'), ('rpc://10.0.0.5:7000', '5/2')]
    """
    out: list[tuple[str, Fraction]] = []
    for store, weight in _split(spec):
        if store.startswith("rpc:"):
            from skirl.store.remote.meeting import Address

            Address.parse(store)
        elif store != "memory" and not re.fullmatch("disk:.+", store):
            if "," in spec:
                raise ValueError(
                    f"store is {spec!r}, a list in which {store!r} is no store: set each to memory, disk:FOLDER or "
                    "rpc://HOST:PORT, and name folders without a comma"
                )
            raise ValueError(f"store is {spec!r}: set it to {_KNOWN}")
        if not re.fullmatch(r"(\*[0-9]+(\.[0-9]+)?)?", weight) or (number := Fraction(weight[1:] or 1)) <= 0:
            raise ValueError(f"store is {spec!r}: the weight of {store} is {weight[1:]!r}, set it to a number above 0")
        if store != "memory" and any(store == other for other, _ in out):
            raise ValueError(f"store is {spec!r}, which has {store} twice: name it once, with a weight")
        out.append((store, number))
    return out


def inside(spec: str, folder: str) -> str:
    """Return the spec of a folder in each store on disk. Other stores stay as they are.

    >>> inside("memory,disk:b*2", "adam")
    'memory,disk:b/adam*2'
    """
    return ",".join(
        f"{store}/{folder}{weight}" if store.startswith("disk:") else store + weight for store, weight in _split(spec)
    )


def own_part(spec: str, rank: int, *, among_others: bool) -> str:
    """Return the spec of one trainer's own part of stores on disk or on nodes. Other stores stay as they are.

    A trainer that is alone uses the first trainer's part if there is one, so that a job that lost all its other trainers
    goes on there.
    """

    def part(store: str) -> str:
        if store.startswith("rpc:"):
            return f"{store}/rank-{rank}"
        if store.startswith("disk:") and (among_others or (Path(store[len("disk:") :]) / "rank-0").is_dir()):
            return f"{store}/rank-{rank}"
        return store

    return ",".join(part(store) + weight for store, weight in _split(spec))
