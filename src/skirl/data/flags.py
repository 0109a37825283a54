"""The flags that say where batches come from."""

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from skirl.data.files.find import find
from skirl.tools.flags import check_types

if TYPE_CHECKING:
    from skirl.data.files.stream import Files
    from skirl.data.source import Source

SYNTHETIC_STEPS = 1000  # of a run over a synthetic stream, which has no end
FILE_KINDS = ("criteo", "avazu", "mind", "csv", "parquet")
_OF_FILES = (
    "epochs", "schema", "rows", "vocab", "admit", "stale", "shuffle", "workers", "bad_rows", "repeats",
    "session_order",
)  # fmt: skip
SESSIONS = "sessions"  # the synthetic data whose samples repeat their lists
OPEN = "open"  # the `vocab` that grows
_LEAST = {"shuffle": 0, "workers": 0}
_LEAST |= dict.fromkeys(("batch", "epochs", "steps", "admit", "stale"), 1)


@dataclass(frozen=True)
class DataFlags:
    """Where batches come from. Files and schema are checked on construction, so that a wrong path is reported at once.

    >>> stream = DataFlags("synthetic:tiny", batch=64, steps=10, valid="20%").stream()
    >>> stream.samples, stream.held_out.samples
    (640, 128)
    """

    group: ClassVar[str] = "data"
    labelled: ClassVar[bool] = True
    """Whether files must have labels."""

    data: str = "synthetic:criteo-kaggle"
    """Where batches come from: synthetic:NAME (tiny, avazu, criteo-kaggle, criteo-terabyte, sessions), or criteo:PATH,
    avazu:PATH, mind:PATH, csv:PATH or parquet:PATH: a file, a folder, a pattern like day_*, or several with commas."""
    _: KW_ONLY
    batch: int = 4096
    """Samples in a step."""
    epochs: int = 1
    """Passes over the files."""
    steps: int | None = None
    """Steps of the whole run; none: as many as the epochs hold, or 1000 of a synthetic stream."""
    valid: str | None = None
    """What to hold out for evaluation: 20% (the last rows), or from a time on: time>=14102900, time>=2026-03-01."""
    seed: int = 0
    """Seed of the data, the initial rows and the initial weights."""
    data_seed: int | None = None
    """Seed of the data alone, so that runs with different seeds see the same batches; --seed if not given."""
    rows_scale: float = 1.0
    """With synthetic data: multiply the number of rows of each table by this."""
    pooling_factor: int = 1
    """With synthetic data: average number of ids of a feature in a sample; 1 means exactly one, or 75 in sessions."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    rows: str | None = None
    """Rows that ids are hashed to: 100000 for all tables, C3=2000000 for one; if not given, the schema's, else 1000000."""
    vocab: str | None = None
    """Give ids rows of their own: a file made by `skirl vocab`, or open for a vocabulary that grows."""
    admit: int = 10
    """With --vocab open: give an id a row of its own at this occurrence."""
    stale: int | None = None
    """With --vocab open: forget an id that has not occurred in this many batches; if not given, none is forgotten."""
    shuffle: int = 0
    """Rows in the shuffle window; 0 keeps the order of the files."""
    session_order: Literal["keep", "shuffle"] = "keep"
    """With --shuffle: shuffle chunks of up to 8 rows of the same session, not single rows; keep: do not."""
    repeats: Literal["stored", "find"] = "stored"
    """stored: batches share the lists that files leave out; find: every list that repeats in them, for files of others."""
    workers: int = 0
    """Processes that read files; with 0 the training process reads them. Batches are the same for any number."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse the run, or skip the row and count it."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: set it to {least} or more")
        for name in ("seed", "data_seed"):
            if not 0 <= (getattr(self, name) or 0) < 1 << 63:
                raise ValueError(f"{name} is {getattr(self, name)}: set it between 0 and 2**63 - 1")
        if self.kind == "synthetic" and self.steps is None:
            object.__setattr__(self, "steps", SYNTHETIC_STEPS)
        if self.kind not in (*FILE_KINDS, "synthetic"):
            kinds = "synthetic:NAME, criteo:PATH, avazu:PATH, mind:PATH, csv:PATH or parquet:PATH"
            ending = re.search(r"\.(csv|parquet)$", self.data.replace(".tsv", ".csv"))
            like = "" if ending is None else f"{ending[1]}:{self.data}, or to "
            raise ValueError(f"data is {self.data!r}: set it to {like}{kinds}")
        self._refuse_unread()
        self.stream()

    @property
    def kind(self) -> str:
        return self.data.partition(":")[0]

    @property
    def path(self) -> str:
        return self.data.partition(":")[2]

    @property
    def stream_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    def stream(self) -> "Source":
        if self.kind == "synthetic":
            return self._synthetic()
        files: Any = self.files()
        if self.vocab != OPEN:
            return files
        from skirl.data.vocabulary.growing import Growing

        return Growing(files, self.admit, self.stale)  # type: ignore[return-value]

    def files(self, part_bytes: int | None = None) -> "Files":
        """The source of batches from files, before an open vocabulary maps ids to rows."""
        from skirl.data.open import open_files  # imports Arrow, which only files need

        return open_files(self, part_bytes)

    def _synthetic(self) -> "Source":
        from skirl.data.synthetic import Sessions, Synthetic  # imports torch, which help does without

        held_out = 0
        if self.valid is not None:
            if (share := share_of(self.valid)) is None:
                raise ValueError(
                    f"valid is {self.valid!r}: a synthetic stream has no time, set it to a share such as 20%"
                )
            held_out = max(1, round(share * (self.steps or SYNTHETIC_STEPS)))
        shape: dict[str, Any] = {
            "batch_size": self.batch, "batches": self.steps, "seed": self.stream_seed, "rows_scale": self.rows_scale,
            "pooling_factor": self.pooling_factor, "held_out_batches": held_out,
        }  # fmt: skip
        return Sessions(**shape) if self.path == SESSIONS else Synthetic(self.path, **shape)

    def _refuse_unread(self) -> None:
        files = self.kind != "synthetic"
        for unread, names, of in (
            (not files, _OF_FILES, "files, and data is synthetic: leave it out"),
            (files, ("rows_scale", "pooling_factor"), "synthetic data, and data is files: leave it out"),
            (self.vocab != OPEN, ("admit", "stale"), "an open vocabulary: set vocab to open, or leave it out"),
        ):
            for name in names:
                if unread and getattr(self, name) != getattr(DataFlags, name):
                    raise ValueError(f"{name} is a flag of {of}")
        if self.session_order == "shuffle" and not self.shuffle:
            raise ValueError(
                "session_order is 'shuffle', and there is no window: set shuffle to its rows, such as 65536"
            )
        if self.repeats == "find" and self.vocab == OPEN:
            raise ValueError(
                "repeats is 'find', and an open vocabulary gives ids rows when batches are made: write its vocabulary with "
                "`skirl vocab`, or leave repeats out"
            )


def share_of(text: str) -> float | None:
    """The share that a text such as 20% means, or None if the text is not a share."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share < 1:
        raise ValueError(f"valid is {text!r}: set it to a share above 0% and below 100%")
    return share


@dataclass(frozen=True)
class Unlabelled(DataFlags):
    """The same flags for predictions, where files may lack labels."""

    labelled: ClassVar[bool] = False


def check_files(data: str, out: Path | str | None = None) -> None:
    """Raise unless data names files, and none of them is `out`."""
    kind, _, paths = data.partition(":")
    if kind not in FILE_KINDS:
        raise ValueError(f"data is {data!r}: set it to files, one of {', '.join(f'{k}:PATH' for k in FILE_KINDS)}")
    if out is not None and Path(out).exists() and any(Path(path).samefile(out) for path in find(paths)):
        raise ValueError(f"out is {out}, which is one of the data files: name another file")
