"""Whether the hub answers, checked once: transformers retries for more than a minute."""

from __future__ import annotations

import httpx
from huggingface_hub import constants, get_session


def unreachable() -> str | None:
    """Return why the hub cannot be reached, or None if it answers at all."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # OSError: HF_HUB_OFFLINE is set
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return f"{constants.ENDPOINT} cannot be reached ({reason})"
    return None
