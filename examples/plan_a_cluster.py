"""The best layouts of a model on a cluster, and what one of one's own would cost."""

import moemesh as mm

task = {"model": "qwen3-30b-a3b", "cluster": "dgx_h100", "seq_len": 4096, "global_batch": 256}
answers = mm.plan(**task, trainable=True, top=3)
for answer in answers:
    degrees = {key: getattr(answer.plan, key) for key in ("pp", "dp", "tp", "ep")}
    print(f"{answer.seconds:6.2f} s, {answer.memory_bytes / 2**30:5.1f} GiB: {degrees}")
print(answers.recommended.command)

own = mm.estimate(**task, plan={"tp": 8, "ep": 8, "microbatches": 64, "recompute": "full"})
print(f"tp = ep = 8: {own.seconds:.2f} s, fits: {own['memory']['fits']}")
