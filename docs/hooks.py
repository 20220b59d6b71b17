"""What `make docs` adds to a page: `<!-- help -->` becomes the `--help` of every command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it for each page, with the text as it is in the file."""
    return re.sub(r"^<!-- help -->$", lambda _: _help_of_all(), markdown, flags=re.MULTILINE)


def _help_of_all() -> str:
    top = _help()
    names = re.findall(r"^  ([a-z]+)  ", top.partition("Commands:\n")[2].partition("\n\n")[0], re.MULTILINE)
    if len(names) < 5:
        raise ValueError(f"keyfold --help lists only these commands: {names}")
    parts = [("keyfold", top), *((f"keyfold {name}", _help(name)) for name in names)]
    return "\n".join(f"### {title}\n\n```text\n{text}```\n" for title, text in parts)


def _help(*words: str) -> str:
    command = [str(Path(sys.executable).with_name("keyfold")), *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
