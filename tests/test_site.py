"""The documentation as a site: it builds without a warning and is offline."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.waiting import ended

pytestmark = pytest.mark.documents


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = ended([*command, "--config-file", ROOT / "mkdocs.yml"])
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "tutorial/index.html", "errors/index.html", "seeds/index.html"} <= pages
    assert "\\|" not in (tmp_path / "site" / "configuration" / "index.html").read_text()
    css = (tmp_path / "site" / "site.css").read_text()
    assert re.search(r'img\[src\$="\.svg"\] \{\s+max-width: none;\s+min-width: 720px;', css)
    loaded = r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?://[^"]+)"'
    for path in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(loaded, path.read_text()), path
