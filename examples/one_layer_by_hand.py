"""A mixture-of-experts layer in its four steps, on one device, beside the obvious loop."""

import torch
import torch.nn.functional as F

from moemesh.config.model import ModelConfig
from moemesh.model.moe import MoE

torch.manual_seed(0)
config = ModelConfig(hidden_size=8, num_experts=4, experts_per_token=2, expert_intermediate_size=16)
layer = MoE(config)
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter, std=0.5)
x_TH = torch.randn(6, config.hidden_size)

with torch.no_grad():
    routing = layer.router(x_TH)
    plan = layer.dispatcher.plan(routing.experts_TK)
    rows = layer.dispatcher.dispatch(x_TH, routing.weights_TK, plan).wait()
    y_RH = layer.experts(rows)
    y_TH = layer.dispatcher.combine(y_RH, plan).wait()

    expected_TH = torch.zeros_like(x_TH)
    for token, expert_ids in enumerate(routing.experts_TK.tolist()):
        for slot, expert in enumerate(expert_ids):
            gate, up = layer.experts.gate_up[expert] @ x_TH[token]
            output = layer.experts.down[expert] @ (F.silu(gate) * up)
            expected_TH[token] += routing.weights_TK[token, slot] * output

for token, (ids, weights) in enumerate(zip(routing.experts_TK, routing.weights_TK, strict=True)):
    chosen = ", ".join(f"{i} (weight {w:.2f})" for i, w in zip(ids, weights, strict=True))
    print(f"token {token} goes to experts {chosen}")
print("rows of each expert:", rows.counts_L.tolist())
print("tokens of the rows: ", rows.map.source_R.tolist())
print(f"largest difference from the loop: {(y_TH - expected_TH).abs().max():.1e}")
torch.testing.assert_close(y_TH, expected_TH)
