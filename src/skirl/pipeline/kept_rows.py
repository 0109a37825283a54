"""Writing the rows in the cache to a store that outlives the process, when a lookahead ends."""

import logging
from collections.abc import Sequence

from skirl.engine.engine import Engine
from skirl.store.base import DISK_ROWS
from skirl.tools.interrupts import Hold

log = logging.getLogger("skirl")


def keep_rows(engines: Sequence[Engine], torn: bool, *, whole: bool, hold: Hold) -> None:
    """Write the resident rows of all engines, so that stores on disk have all rows as after the last step.

    Rows that are not all of one step are left as a kill leaves them, with a warning. A sweep writes its rows itself.
    """
    hold.most = hold.count + 1
    for engine in engines:
        if not isinstance(engine, Engine) or engine.store.frozen_kind != DISK_ROWS:
            continue
        if not engine.table_steps.any():
            continue  # nothing was trained
        reason = engine.damage
        if torn:
            reason = reason or "the last step had updated the rows of only some collections when the loop ended"
        elif not whole:
            reason = reason or "the loop ended with an error, and other trainers may be at another step"
        if reason is not None:
            if any(len(cache.unwritten) for cache in engine.caches):
                log.warning("rows in the cache are not written to %r: %s", engine.store, reason)
            continue
        try:
            engine.flush()
        except KeyboardInterrupt:
            log.warning("rows in the cache are not all in stores on disk: Ctrl-C came while they were being written")
            raise
