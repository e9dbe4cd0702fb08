"""The script behind each page, which `server` runs on the traces and runs of a folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

# streamlit knows this file by its path alone; its package is apps.dashboard or kvsim._dashboard
PACKAGE = Path(__file__).resolve().parent
if str(PACKAGE.parents[1]) not in sys.path:
    sys.path.append(str(PACKAGE.parents[1]))
import_module(f"{PACKAGE.parent.name}.{PACKAGE.name}.navigation").run()
