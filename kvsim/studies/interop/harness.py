"""lm-evaluation-harness: a policy as one of its models, so that all of its tasks run.

    from lm_eval import simple_evaluate
    from kvsim.studies.interop.harness import PolicyLM

    simple_evaluate(model=PolicyLM(model, tokenizer, "snapkv", "25%so-far"), tasks=["gsm8k"])

Written for lm-eval 0.4.13 (https://github.com/EleutherAI/lm-evaluation-harness);
`pip install 'kvsim[lm-eval]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvsim.core.policy import PolicyLike
from kvsim.errors import PolicyError, missing_extra
from kvsim.policies import as_policy
from kvsim.runner.decoding import Decoding, RunningModel, check_live

try:
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["PolicyLM"]


class PolicyLM(HFLM):  # type: ignore[misc]  # it comes without types
    """The harness's own model of transformers, whose cache a policy compresses.

    The context of a request is the prompt of a live run, and its continuation or response follows
    row by row. One request runs at a time, without beams; the harness chooses tokens.

    Args:
        model: a decoder model of transformers.
        tokenizer: the model's.
        policy: a Policy, its name, or only a scorer.
        budget: as for `kvsim.replay`; the final length is that of context and continuation, of a
            response that of the longest.
        interval: rows between events after the context; the policy's own by default.
        prefill: whether an event ends the context; as the policy says by default.
        options: the keywords of `lm_eval.models.huggingface.HFLM`.

    Raises:
        PolicyError: a policy that a running model cannot follow; in an evaluation, a task with
            beams.
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
        check_live(rule := as_policy(policy))
        how: dict[str, Any] = {"interval": interval, "prefill": prefill}
        self._decoding = partial(Decoding, RunningModel(model), rule, budget, **how)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return of each request the log-likelihood of its continuation, and if it is greedy."""
        results = []
        for texts, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length + 1) :][:-1]
            prompt_len = len(tokens) - len(continuation) + 1
            with self._decoding(prompt_len=prompt_len, n_pos=len(tokens)) as decoding:
                logits = decoding.feed(tokens, len(continuation))
            logprobs = logits.float().log_softmax(-1)
            expected = torch.tensor(continuation, device=logprobs.device)
            greedy = bool((logprobs.argmax(-1) == expected).all())
            value = float(logprobs.gather(-1, expected.unsqueeze(-1)).sum())
            results.append((value, greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Return context and response, [1, n], as the harness writes it."""
        sizes: dict[str, Any] = {"prompt_len": context.shape[1], "n_pos": max_length}
        with self._decoding(**sizes) as decoding, _feeding(decoding):
            out: Tensor = super()._model_generate(context, max_length, stop, **options)
        return out


@contextmanager
def _feeding(decoding: Decoding) -> Iterator[None]:
    """Let forwards of the model be those of a live run, inside the block."""
    model = decoding.running.model
    forward, within = model.forward, False

    @wraps(forward)
    def fed(*args: Any, **options: Any) -> Any:
        nonlocal within
        if within:  # of the live run itself
            return forward(*args, **options)
        ids, *others = options["input_ids"].tolist()
        if others:
            raise PolicyError(f"{1 + len(others)} sequences run at once; expected one: no beams")
        new = ids[len(decoding.tokens) :] if len(ids) > len(decoding.tokens) else ids
        within = True
        logits = decoding.feed(new)[None]
        within = False
        cache = {x: y for x, y in options.items() if x in ("cache", "past_key_values")}
        return CausalLMOutputWithPast(logits=logits, **cache)

    vars(model)["forward"] = fed
    try:
        yield
    finally:
        del model.forward
