"""The choice of each token of a response, by the settings of generation of model and user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from kvsim.errors import CaptureError, error_line

# Settings of transformers' `generate`, with the values that have no effect: those that change the
# logits of every response, those of drawn tokens alone, and those of other ways to write.
_OF_LOGITS = {"repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0}
_OF_LOGITS |= {"min_new_tokens": 0, "bad_words_ids": None, "sequence_bias": None}
_OF_LOGITS |= {"forced_bos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": None}
_OF_LOGITS |= {"begin_suppress_tokens": None, "exponential_decay_length_penalty": None}
OF_DRAWS = {"top_k": 0, "top_p": 1, "min_p": None, "top_h": None, "typical_p": 1}
OF_DRAWS |= {"epsilon_cutoff": 0, "eta_cutoff": 0}
_OTHER = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1}
_OTHER |= {"penalty_alpha": 0, "dola_layers": None, "constraints": None, "force_words_ids": None}
_OTHER |= {"watermarking_config": None, "token_healing": False, "stop_strings": None}
_OTHER |= {"max_time": None, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}

#: Settings that a trace notes where they were applied.
APPLIED = (*_OF_LOGITS, *OF_DRAWS)


class Choice:
    """How tokens follow from logits: with the processors of transformers' `generate`.

    stop: tokens that end a response. temperature: 0 takes the most likely token. top_k, top_p: of
    drawn tokens, by default as the model's generation_config says, or all. given: more settings,
    before those of the model.

    Attributes:
        settings: that are applied, ready for JSON. others: that are not, such as `num_beams`.

    Raises CaptureError for settings that transformers refuses, or does not know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop: Collection[int],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_k: int | None = None,
        top_p: float | None = None,
        **given: Any,
    ) -> None:
        of_draws = {"top_k": top_k, "top_p": top_p}
        given |= {name: x for name, x in of_draws.items() if x is not None}
        self.temperature, self.seed, drawn = temperature, seed, temperature > 0
        config = copy.deepcopy(getattr(model, "generation_config", None) or GenerationConfig())

        def stated(neutral: Mapping[str, Any]) -> dict[str, Any]:
            values = {name: getattr(config, name, None) for name in neutral}
            return {name: x for name, x in values.items() if x not in (None, neutral[name])}

        unknown = config.update(**given) if given else {}
        if unknown := [*unknown, *(name for name in of_draws if name in given and not drawn)]:
            raise CaptureError(
                f"{unknown[0]} is given, expected settings of generation, those of drawn tokens "
                "with a temperature above 0; leave it out"
            )
        settings = stated(_OF_LOGITS) | (stated(OF_DRAWS) if drawn else {})
        plain = {k: x if isinstance(x, int | float | list) else str(x) for k, x in settings.items()}
        self.settings: dict[str, Any] = plain
        self.others = stated(_OTHER)
        if config.do_sample and not drawn:
            self.others |= stated({"do_sample": False, "temperature": None, **OF_DRAWS})
        for name, value in _OTHER.items():
            setattr(config, name, value)
        config.do_sample, config.temperature = drawn, float(temperature)
        config._eos_token_tensor = torch.tensor(sorted(stop)) if stop else None  # noqa: SLF001  as `generate` does
        self._config, self._writer = config, model if isinstance(model, GenerationMixin) else None
        self.likeliest = not (drawn or self.settings)
        try:
            self.begin(1, 1)
        except (TypeError, ValueError) as error:
            raise CaptureError(
                f"the model's generation_config cannot be applied ({error_line(error)}), expected "
                "settings that transformers accepts; correct its generation_config.json"
            ) from error

    @property
    def notes(self) -> list[str]:
        """A note on settings that are not applied."""
        names = ", ".join(f"{name} {value!r:.80}" for name, value in self.others.items())
        return [f"not applied, of the model's generation_config: {names}"] if names else []

    def begin(
        self, start: int, count: int, generator: torch.Generator | None = None
    ) -> Callable[[Tensor, Sequence[int]], int]:
        """Return what chooses the tokens of a response, from logits [V] and all tokens so far.

        start: tokens before the response. count: its tokens at most.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        self._config.max_length = start + count
        processors = (self._writer or GenerationMixin())._get_logits_processor(  # noqa: SLF001  no public one
            self._config, input_ids_seq_length=start, device="cpu"
        )

        def choose(logits: Tensor, tokens: Sequence[int]) -> int:
            if self.likeliest:
                return int(logits.argmax())
            # on the CPU in float64, so that the draw is the same on every device
            scores = logits.to("cpu", torch.float64 if self.temperature else torch.float32)
            scores = processors(torch.tensor([tokens]), scores[None])[0]
            if not self.temperature:
                return int(scores.argmax())
            cold = scores.isposinf()  # so cold that it overflows
            if cold.any():
                return int(logits.cpu().masked_fill(~cold, -torch.inf).argmax())
            return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

        return choose
