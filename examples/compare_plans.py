"""Train three steps under two plans, compare their metrics: python compare_plans.py [FOLDER]"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PLANS = {"one": {}, "spread": {"tp": 2, "ep": 2, "dispatcher": "all_gather"}}

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
metrics = {}
for name, plan in PLANS.items():
    command = [sys.executable, "-m", "moemesh", "train", "--out", str(folder / name)]
    for key, value in ({"train.steps": 3} | {f"plan.{k}": v for k, v in plan.items()}).items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True)
    text = (folder / name / "metrics.jsonl").read_text()
    metrics[name] = [json.loads(line) for line in text.splitlines()]

worst = 0.0
for one, spread in zip(*metrics.values(), strict=True):
    for key in ("loss", "grad_norm", "aux_loss"):
        worst = max(worst, abs(spread[key] / one[key] - 1))
    print(f"step {one['step']}: loss {one['loss']:.7f} and {spread['loss']:.7f}")
print(f"largest relative difference: {worst:.1e}")
sys.exit(worst > 1e-5)
