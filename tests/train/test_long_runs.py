"""Long runs of wide models: their files are small, and the report reads them in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train.long_runs import write_long_run
from tests.waiting import PATIENCE

MEASURE = """
import json, resource, sys
from pathlib import Path
from moemesh.balance.load_files import load_table
from moemesh.report import page
folder = Path(sys.argv[1])
written = page.write(folder)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
table = load_table(folder)
print(json.dumps([peak, written.stat().st_size, list(table.shape), int(table.sum())]))
"""


def measure(folder: Path) -> tuple[int, int, list[int], int]:
    """Peak bytes of the process that writes the report, bytes of the page, and the sums of the
    loads."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_report_of_100_000_steps_of_a_wide_model_takes_200_mb(tmp_path: Path) -> None:
    folder = write_long_run(tmp_path / "run")
    assert (folder / "loads.jsonl").stat().st_size < 40e6
    peak, page, shape, _ = measure(folder)
    assert shape == [48, 128]
    assert peak <= 200e6, f"{peak / 1e6:.0f} MB"
    assert page <= 1.5e6, f"{page / 1e6:.2f} MB"


def test_memory_does_not_grow_with_the_rows_of_loads(tmp_path: Path) -> None:
    """Also of a run that wrote a row for every step: those of an older version, load_bins = 0."""
    shape = {"layers": 6, "experts": 64}
    few = measure(write_long_run(tmp_path / "few", steps=200, bins=200, **shape))
    many = measure(write_long_run(tmp_path / "many", steps=2000, bins=2000, **shape))
    assert few[2] == many[2] == [6, 64]
    assert np.isclose(many[3] / few[3], 10, rtol=0.01)
    # 2,000 x 6 x 64 whole numbers in lists take 28 MB.
    assert many[0] - few[0] < 12e6
