"""The MoE blocks of a transformers Mixtral replaced by MoELayer: equal logits."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moemesh as mm

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
model = MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads)).eval()
tokens = torch.randint(64, (2, 16))
with torch.no_grad():
    expected = model(tokens).logits
    for block in model.model.layers:
        layer = mm.MoELayer(hidden_size=32, expert_size=48, num_experts=4, top_k=2)
        if hasattr(block, "mlp"):  # transformers 5: stacked experts, and only y comes back
            gate, experts = block.mlp.gate, block.mlp.experts
            gate_up, down = experts.gate_up_proj.unflatten(1, (2, 48)), experts.down_proj
            layer.register_forward_hook(lambda module, inputs, outputs: outputs[0])
            block.mlp = layer
        else:  # transformers 4: w1 is the gate, w3 the up projection
            gate, experts = block.block_sparse_moe.gate, block.block_sparse_moe.experts
            gate_up = torch.stack([torch.stack([e.w1.weight, e.w3.weight]) for e in experts])
            down, block.block_sparse_moe = torch.stack([e.w2.weight for e in experts]), layer
        state = {"router.weight": gate.weight, "experts.gate_up": gate_up, "experts.down": down}
        layer.load_state_dict(state)
    difference = (model(tokens).logits - expected).abs().max()
assert difference < 1e-6, difference
print(f"largest difference of logits: {difference:.1e}")
