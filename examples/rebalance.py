"""Replicas of hot experts on GPUs: twelve experts of two layers on eight GPUs of two nodes."""

import torch

import moemesh as mm

loads = torch.tensor(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
places, replicas, counts = mm.rebalance_experts(
    loads, num_replicas=16, num_groups=4, num_nodes=2, num_gpus=8
)
for layer, (slots, copies) in enumerate(zip(places, counts, strict=True)):
    share = loads[layer][slots] / copies[slots]
    heat = share.view(8, 2).sum(1)
    print(f"layer {layer}: experts of each GPU {slots.view(8, 2).tolist()}")
    print(f"         most loaded GPU {heat.max() / heat.mean():.3f} of the mean")
