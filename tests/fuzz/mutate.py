"""Mutations, each drawn from a seed: of bytes, of fields in text, of a JSON tree.

A mutated input should get past the first checks: one flipped bit in a valid file reaches more of a parser than random
bytes do. So each case begins with a valid seed and changes it in one to four places, putting in pieces of the seeds
themselves and numbers at the limits of their types. Coverage feedback would find deeper paths per CPU hour, but needs
an instrumented interpreter, and most of the parsing here happens in native code that it could not see.
"""

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

LIMITS = [0, 1, -1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1]
LIMITS += [2**63, 2**64 - 1, -(2**31), -(2**63), 1 << 20, 1 << 16]
MOST = 1 << 20
"""Most bytes of a tensor that a mutation makes."""
TEXTS = [
    "", "0", "-0", "1", "-1", "+1", "2", "0.5", "1.", ".5", "1.0", "3.0", "1e5", "1E+3", "1e", "1e-400", "1e309", "-1e309",
    "3.4e38", "3.5e38", "nan", "NaN", "inf", "-Infinity", "NULL", "null", "0x1f", "0X1", "1_0", " 1", "1 ", " ", "00012",
    "127", "128", "999", "1000", "2147483647", "2147483648", "4294967296", "9007199254740993", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "18446744073709551615", "1" * 40, "1" * 400,
    "0" * 30 + "7", "f", "F0", "f" * 16, "f" * 17, "g", "é", "\u0967", "\ufeff", "\x01", "'", '"', '""', '"a"', "|",
    "||", "1|2", "1||x", "a|b|", ",", ";", "#", "\\N", "true", "2014-10-21", "14102100", "\u2028", "\x85", "\x1c",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**48, 2**63, -(2**70), 0.5, -0.0, 1e308, "", "x", "../x", "a" * 99,
    "0", "float32", "float16", "int64", "object", "O", "é\u2028", "\x00", "nan", [], {}, [1], [[]], {"~tensor": "x"},
    {"~else": 1}, {"~tuple": 3}, {"~float": "x"}, {"~dict": [[[], 1]]}, {"~bytes": "zz"}, [1 << 40, 1 << 40], [-1],
    {"~array": ["run.generators.numpy.1", "<f8", [1 << 50], False]}, {"": {}},
]  # fmt: skip


class Draw(random.Random):
    """The random choices of a case."""

    def some(self, most: int = 4) -> range:
        """Return a range of one to `most` repetitions, mostly few."""
        return range(min(most, 1 + int(self.expovariate(1.0))))

    def place(self, data: Sequence[Any]) -> int:
        """Return an index, more often near the ends, where headers and footers are."""
        n = len(data)
        if n == 0:
            return 0
        match self.randrange(4):
            case 0:
                return min(n - 1, int(self.expovariate(0.02)))
            case 1:
                return max(0, n - 1 - int(self.expovariate(0.02)))
        return self.randrange(n)

    def piece(self, data: bytes, most: int = 64) -> bytes:
        """Return a piece of the data."""
        at = self.place(data)
        return data[at : at + self.randint(1, most)]


def mutated(draw: Draw, data: bytes, others: Sequence[bytes] = (), most: int = 4) -> bytes:
    """Return bytes with one to four changes; inserted pieces come from `data` and `others`."""
    for _ in draw.some(most):
        data = draw.choice(_BYTES)(draw, data, draw.choice([data, *others]))
    return data


def _flip(draw: Draw, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in draw.some(8):
        if out:
            out[draw.place(out)] ^= 1 << draw.randrange(8)
    return bytes(out)


def _cut(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = draw.place(data)
    return data[:at] if draw.random() < 0.5 else data[at:]


def _drop(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = draw.place(data)
    return data[:at] + data[at + draw.choice([1, 2, 4, 8, draw.randint(1, 300)]) :]


def _insert(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = draw.place(data)
    return data[:at] + draw.randbytes(draw.choice([1, 2, 4, 8, draw.randint(1, 100)])) + data[at:]


def _repeat(draw: Draw, data: bytes, other: bytes) -> bytes:
    at, piece = draw.place(data), draw.piece(data, 300)
    return data[:at] + piece * draw.randint(1, 20) + data[at:]


def _splice(draw: Draw, data: bytes, other: bytes) -> bytes:
    at, piece = draw.place(data), draw.piece(other, 500)
    return data[:at] + piece + data[at + len(piece) * draw.randrange(2) :]


def _number(draw: Draw, data: bytes, other: bytes) -> bytes:
    size = draw.choice([1, 2, 4, 8])
    raw = (draw.choice(LIMITS) & (1 << 8 * size) - 1).to_bytes(size, draw.choice(["little", "big"]))
    at = draw.place(data)
    return data[:at] + raw + data[at + size :]


_BYTES: list[Callable[[Draw, bytes, bytes], bytes]] = [
    _flip, _flip, _flip, _cut, _drop, _insert, _repeat, _splice, _number, _number,
]  # fmt: skip


def mutated_text(draw: Draw, data: bytes, delimiter: bytes) -> bytes:
    """Return text with changed or moved fields, with lines joined or repeated, or with other line ends."""
    for _ in draw.some():
        lines = data.split(b"\n")
        i = draw.randrange(len(lines))
        fields = lines[i].split(delimiter)
        j = draw.randrange(len(fields))
        match draw.randrange(14):
            case 0 | 1 | 2 | 3 | 4 | 5:
                fields[j] = draw.choice(TEXTS).encode()
            case 6:
                fields[j] = mutated(draw, fields[j] or b"0", most=1)
            case 7:
                k = draw.randrange(len(fields))
                fields[j], fields[k] = fields[k], fields[j]
            case 8:
                fields[j:j] = [fields[j]] * draw.choice([1, 1, 3])
            case 9:
                del fields[j]
            case 10:
                fields[-1] += draw.choice([b"\r", b"\r\r", b"", b"\xff", b"\xef\xbb\xbf"])
            case 11:
                fields[0] = draw.choice([b"\xef\xbb\xbf", b"\n", b"\r\n", b"\r"]) + fields[0]
            case 12:
                fields = [draw.choice(lines)] if draw.random() < 0.5 else fields + lines[i - 1].split(delimiter)
            case 13:
                lines = [line + b"\r" for line in lines] if draw.random() < 0.3 else lines[: i + 1]
                fields = lines[i].split(delimiter)
        lines[i] = delimiter.join(fields)
        data = b"\n".join(lines)
    return data


def mutated_tree(draw: Draw, value: Any, most: int = 3) -> Any:
    """Return JSON with other values, or with entries moved, duplicated, renamed or removed."""
    value = copy.deepcopy(value)
    nodes = [(value, key) for key in _keys(value)]
    for _ in draw.some(most):
        places = list(_places(value))
        if not places:
            return draw.choice(VALUES)
        at, key = draw.choice(places) if draw.random() < 0.7 else draw.choice(places[: 1 + len(nodes)])
        if isinstance(at, list) and key >= len(at):
            continue
        old = at[key]
        match draw.randrange(8):
            case 0 | 1 | 2:
                at[key] = copy.deepcopy(draw.choice(VALUES))
            case 3 if isinstance(old, int) and not isinstance(old, bool):
                at[key] = draw.choice([old + 1, old - 1, old * 2, -old, draw.choice(LIMITS), float(old), str(old)])
            case 3 if isinstance(old, str):
                text = mutated(draw, old.encode(), most=2).decode("utf-8", "replace")
                at[key] = draw.choice([text, old.upper(), old + " ", "../" + old, old[:-1]])
            case 4:
                other, name = draw.choice(places)
                if not (isinstance(other, list) and name >= len(other)) and name in _keys(other):
                    at[key] = copy.deepcopy(other[name])
            case 5:
                del at[key]
            case 6 if isinstance(at, list):
                at.insert(key, copy.deepcopy(old))
            case 6:
                at[draw.choice(["x", key + "x", "~tensor", ""])] = at.pop(key)
            case _:
                at[key] = [old] if draw.random() < 0.5 else {"x": old}
    return value


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def _places(value: Any) -> list[tuple[Any, Any]]:
    found, todo = [], [value]
    while todo:
        at = todo.pop()
        for key in _keys(at):
            found.append((at, key))
            todo.append(at[key])
    return found


def mutated_json(draw: Draw, data: bytes) -> bytes:
    """Return a JSON text with its tree or its bytes changed."""
    if draw.random() < 0.3:
        return mutated(draw, data)
    try:
        tree = json.loads(data)
    except ValueError:  # already mutated
        return mutated(draw, data)
    return json.dumps(mutated_tree(draw, tree), indent=draw.choice([None, 1])).encode()


def safetensors(header: Any, body: bytes) -> bytes:
    """Return a safetensors file made of its parts."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def mutated_safetensors(draw: Draw, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return a safetensors file with its bytes, its header or its tensors changed."""
    n = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + n], data[8 + n :]
    match draw.randrange(4):
        case 0:
            return mutated(draw, data, others)
        case 1:
            return safetensors(mutated_tree(draw, json.loads(header)), body)
        case 2:
            return data[: 8 + n] + mutated(draw, body, others)[: len(body)].ljust(len(body), b"\0")
    tree = json.loads(header)
    names = [name for name in tree if name != "__metadata__"]
    for _ in draw.some():
        entry = tree[draw.choice(names)]
        if draw.random() < 0.5:
            entry["dtype"] = draw.choice(
                ["F32", "F64", "I64", "U64", "BF16", "F16", "I32", "U8", "BOOL", "F8_E4M3", "C64"]
            )
        if draw.random() < 0.3:
            entry["shape"] = [draw.choice([0, 1, *entry["shape"]]) for _ in range(draw.randint(0, 3))]
        size = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}.get(entry["dtype"], 8)
        for n in entry["shape"]:
            size *= n
        if size > MOST:
            entry["shape"], size = [0], 0
        entry["data_offsets"] = [0, size]
    end, at = 0, []
    for name in names:  # one after another, so that sizes agree and the change gets past the header
        size = tree[name]["data_offsets"][1] - tree[name]["data_offsets"][0]
        tree[name]["data_offsets"] = [end, end + size]
        at.append((name, size))
        end += size
    return safetensors(tree, (body * (1 + end // max(1, len(body))))[:end])
