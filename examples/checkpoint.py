"""A checkpoint of any state: torchrun --nproc_per_node 2 checkpoint.py FOLDER, then without."""

import sys

import torch
import torch.distributed as dist

import moemesh as mm

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(8.0).view(4, 2).chunk(size)[rank]  # each rank holds some rows
    state = {
        "table": mm.Sharded(rows, shape=(4, 2), offset=(rank * len(rows), 0)),
        "weights": {"bias": torch.ones(3), "scale": torch.tensor(0.5)},
        "step": 7,
    }
    mm.save_checkpoint(sys.argv[1], state, step=7)
else:
    print(mm.load_checkpoint(sys.argv[1]))  # verified; all of it, on one process
