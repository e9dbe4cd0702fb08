"""Page *Trace*: what was recorded, and what its attention looks at."""

from __future__ import annotations

import html

import polars as pl
import streamlit as st

import cached
import chosen
import shown
from kvsim.schema import plural

trace = chosen.trace()
layer = chosen.layer()

shown.title(
    "Trace",
    "What the model read and wrote, and where its attention went. Each row of the map is a token "
    "that was read; it looks back at the positions on its left. Narrow the windows to come down "
    "to single tokens.",
)
st.caption(
    f"{trace.n_pos:,} tokens, {trace.prompt_len:,} of them prompt; "
    f"{plural(trace.n_layers, 'layer')}, {plural(trace.n_qheads, 'query head')}, "
    f"{plural(trace.n_heads, 'KV head')}."
)

texts = trace.token_text
group = list(range(chosen.head() * trace.group, (chosen.head() + 1) * trace.group))
first, left, right = st.columns([1, 3, 3])
qhead = first.selectbox("Query head", group, key="qhead", bind="query-params")
rows = left.slider(
    "Rows", 0, trace.n_pos, (0, trace.n_pos), key="rows", bind="query-params", help="queries"
)
positions = right.slider(
    "Positions", 0, trace.n_pos, (0, trace.n_pos), key="positions", bind="query-params", help="keys"
)
if rows[0] == rows[1] or positions[0] == positions[1]:
    st.warning("A window is empty; move one of its ends.")
    st.stop()
tile = cached.attention(chosen.source(), layer, qhead, range(*rows), range(*positions))
shown.heat_map(tile, texts, key="attention")
shown.fidelity(["exact"])
if tile.pooled:
    st.caption("A cell shows the largest weight of its rows and positions.")

st.subheader("Heads of this layer", anchor=False)
st.markdown(
    "Means over the rows of the response: attention on the first 4 positions (*sink*), on the 32 "
    "most recent ones (*local*), entropy in nats, and the share of positions that get less than "
    "1 % of the row's largest weight (*sparsity*)."
)
profile = cached.profile(chosen.source(), layer)
heads = pl.DataFrame(
    {
        "query head": range(trace.n_qheads),
        "KV head": [one // trace.group for one in range(trace.n_qheads)],
        "sink": profile.sink,
        "local": profile.local,
        "entropy": profile.entropy,
        "sparsity": profile.sparsity,
    }
)
st.dataframe(heads, hide_index=True)
st.download_button(
    "Download as CSV", heads.write_csv(), f"{trace.name}-layer-{layer}-heads.csv", "text/csv"
)

st.subheader("Text", anchor=False)
if texts is None:
    st.info("This trace has no text of its tokens; record it with a tokenizer.")
else:
    low, high = positions
    spans = "".join(
        f'<span title="{at}" style="border-left:1px solid #8888;padding:0 1px;'
        f'{"" if at < trace.prompt_len else "font-weight:600"}">{html.escape(texts[at])}</span>'
        for at in range(low, high)
    )
    st.caption(f"Positions {low} to {high - 1}; the response is bold. Hover shows the position.")
    st.html(f'<div style="line-height:1.9;white-space:pre-wrap">{spans}</div>')
