"""The MoE blocks of a transformers Mixtral replaced by MoELayer, and put back: equal logits."""

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
    blocks = [layer.mlp for layer in model.model.layers]
    for layer, block in zip(model.model.layers, blocks, strict=True):
        layer.mlp = mm.MoELayer.from_transformers(block)
    difference = (model(tokens).logits - expected).abs().max()
    for layer, block in zip(model.model.layers, blocks, strict=True):
        block.load_state_dict(layer.mlp.to_transformers())
        layer.mlp = block
    assert torch.equal(model(tokens).logits, expected)
assert difference < 1e-6, difference
print(f"largest difference of logits: {difference:.1e}")
