"""lm-evaluation-harness: a policy behind its model interface, so that all of its tasks run.

    from lm_eval import simple_evaluate
    from kvsim.studies.interop.harness import PolicyLM

    simple_evaluate(model=PolicyLM(model, tokenizer, "snapkv", "25%so-far"), tasks=["gsm8k"])

Written for lm-eval 0.4.13 (https://github.com/EleutherAI/lm-evaluation-harness);
`pip install 'kvsim[lm-eval]'`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsim.core.policy import PolicyLike
from kvsim.errors import PolicyError, missing_extra
from kvsim.policies import as_policy
from kvsim.recorder.choice import OF_DRAWS, Choice, stop_tokens
from kvsim.runner.decoding import Decoding, RunningModel, check_live

try:
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["PolicyLM"]


class PolicyLM(HFLM):  # type: ignore[misc]  # it comes without types
    """The harness's own model of transformers, whose cache a policy compresses.

    The context of a request is the prompt of a live run, and its continuation or response follows
    row by row. One request runs at a time, with greedy decoding.

    Args:
        model: a decoder model of transformers.
        tokenizer: the model's.
        policy: a Policy, its name, or a scorer alone.
        budget: as for `kvsim.replay`; the final length is that of context and continuation, of a
            response that of the longest.
        interval: rows between events after the context; the policy's own by default.
        prefill: whether an event ends the context; as the policy says by default.
        options: the keywords of `lm_eval.models.huggingface.HFLM`.

    Raises:
        PolicyError: a policy that a running model cannot follow; a task that draws tokens.
        BudgetError: in an evaluation, the policy has no rule for the budget.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: PolicyLike,
        budget: int | str,
        *,
        interval: int | None = None,
        prefill: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1, **options)
        self._policy, self._size = as_policy(policy), budget
        check_live(self._policy)
        self._running, self._events = RunningModel(model), (interval, prefill)

    def _decoding(self, prompt_len: int, n_pos: int) -> Decoding:
        interval, prefill = self._events
        how: dict[str, Any] = {"prompt_len": prompt_len, "n_pos": n_pos, "interval": interval}
        return Decoding(self._running, self._policy, self._size, **how, prefill=prefill)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return of each request the log-likelihood of its continuation, and if it is greedy."""
        results = []
        for texts, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length + 1) :][:-1]
            prompt_len = len(tokens) - len(continuation) + 1
            with self._decoding(prompt_len, len(tokens)) as decoding:
                logits = decoding.feed(tokens, len(continuation))
            logprobs = logits.float().log_softmax(-1)
            expected = torch.tensor(continuation, device=logprobs.device)
            greedy = bool((logprobs.argmax(-1) == expected).all())
            value = float(logprobs.gather(-1, expected.unsqueeze(-1)).sum())
            results.append((value, greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    @torch.inference_mode()
    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Return context and response, [1, n]."""
        prompt, eos = context[0].tolist(), options.get("eos_token_id")
        ends = {
            *stop_tokens(self.model, self.tokenizer),
            *(eos if isinstance(eos, list) else [eos]),
        }
        temperature = options.pop("temperature", None)
        if temperature == 0 or temperature is options.get("do_sample") is None:
            options["do_sample"] = False  # as in the harness
        given = {key: x for key, x in options.items() if key not in ("attention_mask", *OF_DRAWS)}
        choice = Choice(self.model, ends - {None}, **given)
        if choice.others:
            raise PolicyError(
                f"the task or the model's generation_config has {', '.join(choice.others)}, "
                "expected greedy decoding, one token after the other"
            )
        choose = choice.begin(len(prompt), max_length - len(prompt))
        written: list[int] = []
        with self._decoding(len(prompt), max_length) as decoding:
            logits = decoding.feed(prompt)[-1]
            while len(prompt) + len(written) < max_length:
                written.append(choose(logits, [*prompt, *written]))
                text = self.tokenizer.decode(written)
                if written[-1] in ends or any(each in text for each in stop if each):
                    break
                if len(prompt) + len(written) < max_length:
                    logits = decoding.feed(written[-1:])[-1]
        return torch.tensor([[*prompt, *written]], device=context.device)
