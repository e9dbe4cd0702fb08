"""Regions of a text for the wipe-out rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: What ends a sentence, as the last character of a token; also in full width, as in Chinese.
_ENDS = tuple(".;!?\u3002\uff1b\uff01\uff1f")


def steps(texts: Sequence[str], prompt_len: int, least: int = 8) -> NDArray[np.int64]:
    """Steps of a text from the `texts` of its tokens; [R, 2] start and stop of each, ascending.

    A step ends after a token that holds a newline or, where the response holds none, after one that
    ends in . ; ! or ?. Steps of fewer than `least` tokens are joined with what follows, so that
    blank lines and numbered points are no regions of their own. What follows the last end is no
    step.
    """
    ends = ["\n" in text for text in texts]
    if not any(ends[prompt_len:]):
        ends = [text.rstrip().endswith(_ENDS) for text in texts]
    cuts = [0]
    for stop in np.flatnonzero(ends) + 1:
        if stop - cuts[-1] >= least:
            cuts.append(int(stop))
    return np.stack([cuts[:-1], cuts[1:]], axis=1).astype(np.int64)
