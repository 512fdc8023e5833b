"""What mkdocs does besides: docstrings mark literal blocks with two colons, which Markdown would show."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r"<p>\s*::\s*</p>", "", html)
    return html.replace("::</p>", ":</p>")
