"""The dashboard: widgets and layout; every number comes from `kvsim.analysis`.

    app          the file that streamlit runs
    navigation   the pages and the sidebar
    views        one module per page, each with a function `page`
    controls     widgets that pages share, with their values in the link
    replays      policies on the chosen trace, and a text by what became of its tokens
    readings     what a chart shows, in a sentence computed from its numbers
    cache        opened traces, records, tables and tiles
    runs         runs of the folder, and a small sweep over the chosen trace
    tiles        large arrays as pictures
    html_text    text of tokens by their state or KL
    elements     titles, notes of fidelity, labels of tokens, heat maps
    downloads    tables below pictures, as files
    line_charts  lines over budgets, entries and layers
    event_charts events of one head: retention, and segments of AMS

The package is `apps.dashboard` in a checkout and `kvsim._dashboard` in a wheel; its imports are
relative, so that they are the same in both.
"""
