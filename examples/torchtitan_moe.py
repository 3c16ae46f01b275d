"""The MoE module of torchtitan 0.3 replaced by MoELayer: near outputs (bfloat16 there)."""

import torch
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)

import moemesh as mm


def replaced(moe: torch.nn.Module, group=None) -> mm.MoELayer:
    """For ``block.moe = replaced(block.moe)``, before torchtitan shards the model."""
    router, experts = moe.router, moe.routed_experts.inner_experts
    num_experts, width, hidden = experts.w1_EFD.shape
    layer = mm.MoELayer(
        hidden, width, num_experts, router.top_k, group,
        router_score=router.score_func, router_normalize=router.route_norm,
        router_scale=router.route_scale, router_selection_bias=moe.expert_bias_E is not None,
        aux_loss_coefficient=0.0,
    )  # fmt: skip
    gate_up = torch.stack([experts.w1_EFD, experts.w3_EFD], 1)
    state = {"router.weight": router.gate.weight, "experts.gate_up": gate_up}
    state |= {"experts.down": experts.w2_EDF, "router.selection_bias": moe.expert_bias_E}
    layer.load_state_dict({name: one for name, one in state.items() if one is not None})
    layer.register_forward_hook(lambda module, inputs, outputs: outputs[0])  # y alone
    return layer


sizes = {"dim": 64, "num_experts": 8, "top_k": 2}
router = make_router_config(**sizes, gate_param_init={}, score_func="softmax", route_norm=True)
experts = make_routed_experts_config(**sizes, hidden_dim=32, param_init={}, comm_backend="standard")
moe = make_moe_config(num_experts=8, router=router, routed_experts=experts).build()
for parameter in moe.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
x = torch.randn(2, 16, 64)
with torch.no_grad():
    difference = (replaced(moe)(x) - moe(x)).abs().max() / moe(x).abs().max()
print(f"largest difference: {difference:.1e} of the largest output")
