"""Experts over ranks in one's own program: torchrun --nproc_per_node 2 moe_layer.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import moemesh as mm


class Net(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux = self[0](x)
        return self[1](y), aux.loss


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same on all ranks: they share the router
model = Net(mm.MoELayer(32, 64, num_experts=8, top_k=2), torch.nn.Linear(32, 32))
model._ddp_params_and_buffers_to_ignore = list(mm.expert_parameters(model))
ddp, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), 1e-2)
x = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(30):
    y, aux_loss = ddp(x)
    loss = (y - x.flip(-1)).square().mean() + aux_loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
held = len(model[0].experts.down)
print(f"rank {dist.get_rank()} holds {held} of 8 experts; loss of the last step {loss:.3f}")
