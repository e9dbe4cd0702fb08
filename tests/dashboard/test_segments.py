"""The page of segments: its numbers are those of kvsim, every control works, tokens are text."""

import base64
import json

import numpy as np
import pytest

import kvsim
from kvsim.samples import sample_trace
from kvsim.studies.segments.segments import ams_segments, segmented
from tests.dashboard.test_retention import spoken


@pytest.fixture
def page(opened, folder):
    """The page of the sample, or of what its link says."""

    def run(**link):
        return opened(folder, "segments", **{"trace": "sample.zarr", **link})

    return run


@pytest.fixture(scope="module")
def trace():
    """The sample."""
    return kvsim.open_trace(sample_trace())


def replayed(trace, layer, budget=128, interval=32, scorer="tova", **params):
    """AMS as the page has it by default, and the scorer alone on the same events."""
    policy = kvsim.policy(f"ams@scaled+{scorer}", **params)
    terms = {"interval": interval, "prefill": True, "layers": [layer]}
    return (
        kvsim.replay(trace, policy, budget, internals=True, **terms),
        kvsim.replay(trace, kvsim.policy(scorer), budget, **terms),
    )


def drawn(app):
    """The traces of the figure by name, with their numbers."""
    spec = json.loads(app.get("plotly_chart")[0].proto.spec)

    def numbers(values):
        if isinstance(values, dict):
            raw = base64.b64decode(values["bdata"])
            return np.frombuffer(raw, np.dtype(values["dtype"])).astype(float)
        return np.array([np.nan if value is None else value for value in values or []], float)

    return {one.get("name"): (numbers(one["x"]), numbers(one["y"])) for one in spec["data"]}


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_numbers_are_those_of_kvsim(page, trace, mode):
    """Metrics of both; segments and their moves, credit and mass, at an event of the link."""
    app = page(layer="1", head="2", budget="96", interval="64", event="417", mode=mode)
    assert not app.exception
    record, _ = replayed(trace, 1, 96, 64, mode=mode)

    found = ams_segments(record, 1)
    number = found.rows.tolist().index(417)
    (one,) = [one for one in segmented(record, 1, 2) if one.row == 417]
    told = {one.label: one for one in app.metric}
    assert told["Segments"].value == str(len(one.quota)) == str(found.count[2, number])
    assert told["Boundaries moved, positions"].value == f"{found.shift[2, number - 1]:.1f}"
    assert told["Credit held"].value == f"{one.credit.sum():.3f}"
    window = kvsim.policy("ams@scaled").at(96).allocator.window
    suffix = one.mass[one.pos > 417 - window].sum()
    assert told["Mass of recent rows"].value == f"{suffix:.1%}"
    assert any("fidelity **exact**" in one for one in spoken(app))


def test_the_figure_draws_the_event(page, trace):
    """Curves, boundaries of both events, bars and ticks are those of the replay."""
    app = page(layer="2", head="1", event="353")
    record, alone = replayed(trace, 2)
    events = {one.row: one for one in segmented(record, 2, 1)}
    one, before = events[353], events[321]

    figure = drawn(app)

    for name, label in (("mass", "mass that is cut"), ("observed", "observed by the window")):
        x, y = figure[label]
        np.testing.assert_array_equal(x, one.pos)
        np.testing.assert_allclose(y, getattr(one, name).cumsum(), atol=1e-6)
    x, y = figure["credit"]
    np.testing.assert_allclose(y, one.credit.cumsum() / one.credit.sum(), atol=1e-6)
    for label, which in (("boundaries", one), ("boundaries of the event before", before)):
        x, _ = figure[label]
        assert x[~np.isnan(x)].tolist() == np.repeat(which.boundaries, 2).tolist()
    assert figure["entries"][1].tolist() == one.counts().tolist()
    assert figure["quota"][1].tolist() == one.quota.tolist()
    assert figure["kept"][1].tolist() == one.counts(one.kept).tolist()
    held = np.flatnonzero(alone.retained(353)[0, 1])
    assert figure["stays with the scorer alone"][0].tolist() == held.tolist()
    assert (
        figure["tova alone holds"][1].tolist()
        == np.histogram(held, [0, *one.boundaries, 354])[0].tolist()
    )
    recent = kvsim.policy("ams@scaled").at(128).allocator.recent
    must = [p for p in range(354) if p < 4 or p > 353 - recent]
    assert figure["protected"][0].tolist() == must
    both = sorted([*figure["stays"][0].tolist(), *must])
    assert both == np.flatnonzero(record.retained(353)[0, 1]).tolist()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ({"scorer": "cake"}, "share one budget"),
        ({"scorer": "snapkv@original"}, ""),
        ({"min_segment": "100", "max_segment": "50"}, "max_segment is 50"),
        ({"scorer": "full"}, ""),
    ],
)
def test_what_cannot_be_replayed_says_why(page, link, said):
    """A message instead of a figure, or a figure."""
    app = page(**link)

    assert not app.exception
    if app.get("plotly_chart"):
        assert not said
    else:
        assert app.warning[0].value == "There are no segments with these settings."
        assert said in app.text[0].value
