"""A parallel model in one's own loop: torchrun --nproc_per_node 2 own_loop.py FOLDER"""

import sys

import torch
import torch.distributed as dist

import moemesh as mm

dist.init_process_group("gloo")
config = mm.load(None, {"plan": {"tp": 2, "ep": 2}, "model": {"num_layers": 2}})
mesh = mm.Mesh.create(config.plan.layout, "cpu")
model = mm.parallelize(config.model, config.plan, mesh, seq_len=32, global_batch=4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
batch = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))  # on all ranks
for step in range(5):
    result = model.step(batch, clip=1.0)  # forward, backward, gradients complete
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")

state = {"model": model, "optimizer": optimizer, "step": 5}
mm.save_checkpoint(sys.argv[1], state, step=5)
mm.load_checkpoint(sys.argv[1], state)  # in place, under any plan, by any number of ranks
