"""Train three steps under two plans, compare their metrics: python compare_plans.py [FOLDER]"""

import sys
import tempfile
from pathlib import Path

import moemesh as mm

PLANS = {"one": {}, "spread": {"tp": 2, "ep": 2, "dispatcher": "all_gather"}}

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
runs = {}
for name, plan in PLANS.items():
    config = mm.load(None, {"train": {"steps": 3}, "plan": plan})
    runs[name] = mm.train(config, out=folder / name)

worst = 0.0
for one, spread in zip(runs["one"].metrics, runs["spread"].metrics, strict=True):
    for key in ("loss", "grad_norm", "aux_loss"):
        worst = max(worst, abs(getattr(spread, key) / getattr(one, key) - 1))
    print(f"step {one.step}: loss {one.loss:.7f} and {spread.loss:.7f}")
print(f"largest relative difference: {worst:.1e}")
sys.exit(worst > 1e-5)
