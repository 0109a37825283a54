"""The address in `rpc://HOST:PORT`: where nodes and owners meet, and which of the owners this is."""

import os
import re
from dataclasses import dataclass

_SPEC = re.compile(
    r"rpc://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})(/rank-(?P<owner>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Address:
    """The address of a meeting point, as seen by one owner.

    >>> Address.parse("rpc://10.0.0.5:29400/rank-3")
    Address(host='10.0.0.5', port=29400, owner=3)
    >>> Address.meeting("somewhere")
    Traceback (most recent call last):
    ValueError: meet is 'somewhere': write it HOST:PORT, such as 127.0.0.1:29400
    """

    host: str
    port: int
    owner: int = 0

    @classmethod
    def parse(cls, spec: str) -> "Address":
        """Parse the name of a store: rpc://HOST:PORT or rpc://HOST:PORT/rank-N."""
        match = _SPEC.fullmatch(spec)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ValueError(f"store is {spec!r}: write it rpc://HOST:PORT, such as rpc://127.0.0.1:29400")
        return cls(match["host"].strip("[]"), int(match["port"]), int(match["owner"] or 0))

    @classmethod
    def meeting(cls, text: str) -> "Address":
        """Parse the value of `--meet`: HOST:PORT."""
        try:
            return cls.parse(f"rpc://{text}")
        except ValueError:
            raise ValueError(f"meet is {text!r}: write it HOST:PORT, such as 127.0.0.1:29400") from None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hush() -> None:
    """Keep PyTorch from printing a warning for each connection that ends. It has to be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
