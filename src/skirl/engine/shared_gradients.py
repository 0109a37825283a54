"""Gradients of outputs whose samples share bags: that of a shared bag is the sum over its samples."""

import torch

from skirl.engine.engine import Engine
from skirl.engine.work import Work


def keep_shared(
    engine: Engine, work: Work, bank: int, micro: int, grad: torch.Tensor | None, of_bags: torch.Tensor | None
) -> None:
    """Keep the gradient of a micro-batch whose samples share bags.

    - `grad`: gradient of the output, [batch * features, dim]; None: it has none.
    - `of_bags`: gradient of the shared bags themselves, [shared bags, dim], if the loop used them; None: they have
      none.
    """
    shared, rows, dim = work.micros[micro].banks[bank].folded, engine.banks[bank], engine.schema.banks[bank].dim
    assert shared is not None
    empty, alone = engine.device.empty, len(work.micros) == 1 and engine.rows.local
    if alone and rows.reads_apart and grad is not None and work.micros[micro].learned is None:
        work.grads[bank, micro] = grad  # not copied: it may be far larger than that of the shared bags
        work.apart[bank] = folded = empty(shared.bags, dim)
    else:
        into = work.room(bank, micro, dim, empty)
        folded = into[shared.samples :]
        if grad is not None and shared.plain.any():
            into[: shared.samples].copy_(grad)
    rows.fold(shared, grad, folded)
    if of_bags is not None:
        folded += of_bags
