"""Multi-token prediction: extra layers behind the last, each of which looks one token further.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2. Module k reads at
position s the stream of module k - 1 (of the model's last layer, for k = 1) and the embedding of
token s + k, and predicts token s + k + 1:

    h_k = Layer(M_k [norm(embedding of token s + k); norm(h_(k-1))])        loss on head(norm(h_k))

Embedding and head are the model's own. The order of the two halves of M_k is that of the released
weights, whose module has a final norm of its own, too.

Legend: T tokens of the residual stream held here, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.layer import Layer
from moemesh.model.layers import RMSNorm
from moemesh.ops.linear import linear


class PredictionLayer(Layer):
    """A layer with what is in front of it: ``projection`` [H, 2 H] and two norms. The norm behind
    it stands beside the head (:mod:`moemesh.model.transformer`)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index)
        hidden, epsilon = config.hidden_size, config.norm_eps
        self.embedding_norm = RMSNorm(hidden, epsilon)
        self.stream_norm = RMSNorm(hidden, epsilon)
        self.projection = nn.Parameter(torch.empty(hidden, 2 * hidden))

    def join(self, x_TH: Tensor, embedded_TH: Tensor) -> Tensor:
        """The layer's input, from the stream and the embeddings of the tokens that are known."""
        both = [self.embedding_norm(embedded_TH), self.stream_norm(x_TH)]
        return linear(torch.cat(both, dim=1), self.projection)
