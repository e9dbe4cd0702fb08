"""`kvsim trace COMMAND`: what is done to traces as files."""

from __future__ import annotations

import typer

from kvsim.cli import sharing

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Work on traces as files: pack and unpack.",
)
app.command()(sharing.pack)
app.command()(sharing.unpack)
