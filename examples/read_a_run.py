"""Losses, traffic by axis and memory of a run folder, without torch: python read_a_run.py RUN"""

import sys

import moemesh as mm

run = mm.Run.load(sys.argv[1])

for row in run.metrics[:: max(len(run.metrics) // 10, 1)]:
    print(f"step {row.step:5}  loss {row.loss:.4f}  {row.tokens_per_second:9,.0f} tokens/s")
print(f"validation {run.summary['validation_loss']:.4f}, unigram {run.summary['unigram_loss']:.4f}")

for rank, ledger in run.ledgers.items():
    for axis in sorted({entry.axis for entry in ledger.entries()}):
        total = ledger.total(axis=axis)
        sent = total.wire_bytes / run.ledger_steps / 2**20
        count = total.count / run.ledger_steps
        print(f"rank {rank} sends {sent:8.3f} MiB a step over {axis:6} in {count:.1f} operations")

if run.memory is not None:
    for profile in run.memory.ranks:
        parts = ", ".join(f"{name} {size >> 20}" for name, size in profile.parts().items())
        print(f"rank {profile.rank} MiB: {parts}")

busiest = max(run.loads, key=lambda loads: loads.expert_max_over_mean)
print(
    f"least balanced: layer {busiest.layer} at step {busiest.step}, "
    f"fullest expert {busiest.expert_max_over_mean:.2f} x the mean"
)
print("warnings:", *run.warnings)
