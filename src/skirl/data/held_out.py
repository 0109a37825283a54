"""The share of the samples that --valid holds out."""

import re


def share_of(text: str) -> float | None:
    """Return the share that a text such as 20% means, or None if the text is not a share.

    >>> share_of("20%"), share_of("time>=3")
    (0.2, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share < 1:
        raise ValueError(f"valid is {text!r}: set it to a share above 0% and below 100%")
    return share
