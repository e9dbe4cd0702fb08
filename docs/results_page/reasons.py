"""Why a claim has another verdict on SmolLM2 than on tiny, as far as the numbers show it."""

from __future__ import annotations

#: By the number of the claim and its words.
REASONS: dict[tuple[str, str], str] = {}
