"""Selection of each token of a response, by the settings of transformers' `generate`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from kvsim.errors import CaptureError, error_line

#: Applied settings that change logits; and those that only concern sampling.
OF_DRAWS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
APPLIED = (
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "min_length"),
    *("min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", *OF_DRAWS),
)
# Settings of other decoding methods.
_OTHER = (
    *("num_beams", "num_beam_groups", "num_return_sequences", "penalty_alpha", "dola_layers"),
    *("guidance_scale", "constraints", "force_words_ids", "watermarking_config", "token_healing"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "stop_strings", "max_time"),
)


class Choice:
    """How tokens follow from logits, with the settings of a model's generation_config.

    stop: tokens that end a response. temperature: 0 takes the most likely token. given: `seed`, and
    settings that replace the model's, unless None. `settings` has the applied ones, ready for JSON,
    `others` the rest. Raises CaptureError for settings that transformers refuses.
    """

    def __init__(
        self, model: Any, stop: Collection[int], *, temperature: float = 0, **given: Any
    ) -> None:
        self.temperature, self.seed = float(temperature), int(given.pop("seed", 0))
        config = copy.deepcopy(getattr(model, "generation_config", None) or GenerationConfig())
        self._config, given = config, {name: x for name, x in given.items() if x is not None}
        self._owner: Any = model if isinstance(model, GenerationMixin) else GenerationMixin()
        try:
            unknown = [name for name in OF_DRAWS if name in given and not temperature]
            unknown += config.update(**given) if given else ()
            unlike = config.do_sample and not temperature
            self.others = {"do_sample": True} | self._stated(*OF_DRAWS) if unlike else {}
            self.others |= {k: x for k, x in self._stated(*_OTHER).items() if x not in (0, 1)}
            for name in _OTHER:
                setattr(config, name, None)
            config.do_sample, config.temperature = temperature > 0, self.temperature
            config._eos_token_tensor = torch.tensor(sorted(stop)) if stop else None  # noqa: SLF001  as `generate` does
            self.likeliest = not (temperature or self._processors(1, 1))
        except (TypeError, ValueError) as error:
            unknown = [f"a setting of generation_config.json ({error_line(error)})"]
        if unknown:
            raise CaptureError(
                f"{unknown[0]} cannot be applied, expected settings that transformers' `generate` "
                "takes, and settings of drawing only with a temperature above 0; leave it out"
            )
        applied = () if self.likeliest else APPLIED if temperature else APPLIED[: -len(OF_DRAWS)]
        self.settings: dict[str, Any] = json.loads(json.dumps(self._stated(*applied), default=str))

    def _stated(self, *names: str) -> dict[str, Any]:
        values = {name: getattr(self._config, name, None) for name in names}
        return {name: x for name, x in values.items() if x is not None}

    def _processors(self, start: int, count: int) -> Any:
        self._config.max_length = start + count
        options = {"input_ids_seq_length": start, "device": "cpu"}
        return self._owner._get_logits_processor(self._config, **options)  # noqa: SLF001  no public one

    @property
    def notes(self) -> list[str]:
        """A note on settings that are not applied."""
        names = ", ".join(f"{name} {value!r:.80}" for name, value in self.others.items())
        return [f"not applied, of the model's generation_config: {names}"] if names else []

    def begin(
        self, start: int, count: int, generator: torch.Generator | None = None
    ) -> Callable[[Tensor, Sequence[int]], int]:
        """Return a function that chooses the next token from logits [V] and all tokens so far.

        start: tokens before the response, of at most `count`.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        processors = self._processors(start, count)

        def choose(logits: Tensor, tokens: Sequence[int]) -> int:
            if self.likeliest:
                return int(logits.argmax())
            # on the CPU in float64, so that the draw is the same on every device
            scores = logits.to("cpu", torch.float64 if self.temperature else torch.float32)
            scores = processors(torch.tensor([tokens]), scores[None])[0]
            if not self.temperature:
                return int(scores.argmax())
            if (cold := scores.isposinf()).any():  # overflow of very low temperatures
                return int(logits.cpu().masked_fill(~cold, -torch.inf).argmax())
            return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

        return choose


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, by generation settings, model and tokenizer."""
    tokens: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for holder in (settings, model.config, tokenizer):
        token = getattr(holder, "eos_token_id", None)
        tokens.update([token] if isinstance(token, int) else token or [])
    return frozenset(tokens)


def following(question: Sequence[int], last: int, stop: Collection[int]) -> list[int]:
    """Return a later question, without a first token that has already ended the answer."""
    return [*question[int(len(question) > 1 and question[0] == last and last in stop) :]]
