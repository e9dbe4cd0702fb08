"""The page of the response: what an event evicted, and what tokens lose until the next one."""

import html
import re
import shutil

import numpy as np
import pytest

import kvsim
from apps.dashboard.html_text import token_html
from kvsim.analysis.kept.text import spaced
from kvsim.samples import sample_trace
from kvsim.sweeps.driver import replay_all
from tests.dashboard.test_retention import said, texts

TERMS = {"interval": 32, "judge": True}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The sample, a run with the KL of its tokens, and one without."""
    root = tmp_path_factory.mktemp("response")
    shutil.copytree(sample_trace(), root / "sample.zarr")
    trace = kvsim.open_trace(root / "sample.zarr")
    wide = kvsim.policy("tova", heads="group")
    policies, metrics = ["tova", wide, "h2o", "full"], ["response_kl_tokens"]
    replay_all([trace], policies, [64, "30%"], metrics=metrics, **TERMS).save(root / "tokens")
    replay_all([trace], ["h2o"], [64], metrics=["retained_mass"], **TERMS).save(root / "plain")
    return root


@pytest.mark.parametrize(
    ("result", "policy", "budget"),
    [("h2o, budget 64", "h2o", 64), ("tova (heads=group), budget 30%", "tova", 141)],
)
def test_an_event_has_the_text_and_the_tokens_until_the_next(
    opened, judged, result, policy, budget
):
    """The sums are those of a loop over rows of the run; the text is that of the record."""
    link = {"run": "tokens", "trace": "sample.zarr", "layer": "1", "head": "2", "event": "289"}
    app = opened(judged, "response", **link, result=result)
    trace = kvsim.open_trace(judged / "sample.zarr")
    chosen = kvsim.policy(policy, **({"heads": "group"} if policy == "tova" else {}))
    record = kvsim.replay(trace, chosen, budget, interval=32, prefill=True)
    judgement = kvsim.judge("tiny", trace, record, tokens=True).filter(metric="response_kl_tokens")
    kl, changed = (
        dict(judgement.filter(variant=name)["event", "value"].rows()) for name in ("", "changed")
    )
    period = [x for x in kl if 289 < x - 1 <= 321]  # predicted by rows that see what 289 left

    assert not app.exception
    assert f"After row 289, 32 tokens lose {sum(kl[x] for x in period):.3g} nats" in said(app)
    share = sum(kl[x] for x in period) / sum(kl.values())
    first = next(x for x in period if changed[x])
    assert f"{share:.0%} of all" in said(app)
    assert f"{sum(changed[x] for x in period):.0f} changes, first at position {first}." in said(app)
    left, right = texts(app)
    weights = trace.attention(1, slice(0, trace.n_pos))[4:6].amax(0) >= 0.05
    later = np.array([max([-1, *column.nonzero()[:, 0].tolist()]) for column in weights.T])
    place = {"layer": 1, "head": 2, "row": 289, "needed": later}
    assert left == token_html(trace, record, **place, stop=290)
    words = spaced(trace.token_text)
    assert html.unescape(re.sub("<.*?>", "", right)) == "".join(words[x] for x in period)
    marked = re.findall(r'outline:2px solid">(.*?)</span>', right)
    assert [html.unescape(x) for x in marked] == [words[first]]
    assert any("judged" in one.value for one in app.caption)
