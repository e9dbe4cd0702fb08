"""What holds of every page of a trace: controls, hostile tokens, traces without text."""

import pytest

SPOKEN = ("markdown", "caption", "header", "subheader", "info", "warning", "error")


def find(app, kind, key):
    """The control of a page."""
    (control,) = [one for one in app.get(kind) if one.key == key]
    return control


@pytest.mark.parametrize(
    ("page", "kind", "key", "value"),
    [
        ("segments", "selectbox", "layer", 0),
        ("retention", "selectbox", "head", 3),
        ("retention", "selectbox", "policy", "snapkv@gkv"),
        ("retention", "selectbox", "beside_scorer", "snapkv"),
        ("retention", "selectbox", "policy_reader", "topk"),
        ("retention", "selectbox", "beside_quantizer", "kivi"),
        ("retention", "number_input", "interval", 0),
    ],
)
def test_every_control_runs_the_page_anew(opened, folder, page, kind, key, value):
    """No exception, and the control has the value."""
    app = opened(folder, page, trace="sample.zarr")

    find(app, kind, key).set_value(value)
    app.run()

    assert not app.exception
    assert not app.error
    assert find(app, kind, key).value == value


@pytest.mark.parametrize(("page", "texts"), [("retention", 2), ("segments", 0)])
def test_tokens_are_text(opened, folder, page, texts):
    """In the page's HTML no token opens an element; in no other text do tokens occur."""
    app = opened(folder, page, trace="more/hostile.zarr")

    assert not app.exception
    shown = [one.proto.body for one in app.get("html") if "tokens.invalid" in one.proto.body]
    assert len(shown) == texts
    for text in shown:
        assert "&lt;img src=&#x27;http://tokens.invalid/a.png&#x27;&gt;" in text
    for text in (*shown, *(chart.proto.spec for chart in app.get("plotly_chart"))):
        assert "<img" not in text
        assert "<script" not in text
    assert not any("invalid" in one.value for kind in SPOKEN for one in app.get(kind))
