"""The table of RULER's scores in benchmarks.md."""

import ruler
from kvsim.text.ruler import RULER


def test_the_page_has_the_scores_so_far():
    """The table follows from the stored scores, each of which is a share of the answers."""
    text = ruler.PAGE.read_text("utf-8")
    scores = ruler.results()

    assert ruler.page(text) == text
    assert {each["task"] for each in scores} <= {*RULER}
    assert all(0 <= each["score"] <= 1 for each in scores)
    assert len({(x["task"], x["length"], x["index"]) for x in scores}) == len(scores)


def test_means_are_those_of_the_prompts():
    """What has no prompt is left out; a length has a mean once all tasks have prompts."""
    scores = [
        {"task": "vt", "length": 1024, "score": value, "index": i}
        for i, value in enumerate((0.2, 0.4, 0.6))
    ]
    lines = ruler.table([*scores, {"task": "cwe", "length": 1024, "score": 1.0, "index": 0}])

    assert lines.splitlines()[2:] == ["| `vt` | 40 (3) |", "| `cwe` | 100 (1) |"]
