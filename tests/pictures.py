"""Pictures of the README: the page of a run and an answer of the planner, as a browser shows them.

``python -m tests.pictures runs/tiny`` writes them, the first from the folder of a run. It needs
Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moemesh.report.page import write
from tests.sandbox import ROOT

PICTURES = ROOT / "docs" / "pictures"
#: Width and height of the window, and pixels of the picture for one of the page.
WIDTH, HEIGHT, SCALE = 1100, 960, 0.7
#: The question to the planner, that of the README.
PLAN = (
    *("plan", "--model", "qwen3-30b-a3b", "--cluster", "dgx_h100", "--nodes", "2"),
    *("--seq-len", "4k", "--global-batch", "256"),
)
#: Variant -> Chromium's number of the color scheme that pages get.
SCHEMES = {"light": 1, "dark": 0}
#: Options of a headless browser that sends no request to another machine.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", f"--force-device-scale-factor={SCALE}"),
    f"--window-size={WIDTH},{HEIGHT}",
)


def photograph(page: Path, picture: Path, scheme: int) -> None:
    """Write the top of an HTML page as a PNG file."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *("chromium", *OPTIONS, f"--user-data-dir={profile}"),
                *(f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}"),
                page.resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
        )


def main() -> None:
    if len(sys.argv) != 2 or shutil.which("chromium") is None:
        sys.exit("python -m tests.pictures RUN_FOLDER; chromium must be installed")
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.html")
        words = [sys.executable, "-m", "moemesh", *PLAN, "--html", str(plan)]
        subprocess.run(words, check=True, capture_output=True)
        for subject, page in {"run": write(Path(sys.argv[1])), "plan": plan}.items():
            for name, scheme in SCHEMES.items():
                photograph(page, PICTURES / f"{subject}-{name}.png", scheme)


if __name__ == "__main__":
    main()
