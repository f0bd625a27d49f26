"""EAGLE in torch: a head that reads the embedding of a token and the feature before it (Li et al. 2024, 2025)."""

from torch import Tensor, nn

from specexport.heads.config import HeadConfig
from specexport.heads.modules import DraftHead, RunModule, norm_class, through_layer


class EagleHead(DraftHead):
    """EAGLE-1 and 2: a linear layer joins both, and decoder layers follow, without a norm before or behind them."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        bias = bool(config.layer_config.get("bias", True))
        self.fc = nn.Linear(config.target_hidden_size + config.hidden_size, config.hidden_size, bias=bias)
        self.body.layers[0].input_layernorm = nn.Identity()  # the file has none
        self.body.norm = nn.Identity()

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """See :meth:`DraftHead.hidden`."""
        state: Tensor = self.fc(self.side_by_side(embedded, features))
        for layer in self.body.layers:
            state = through_layer(layer, state, run)
        return state


class Eagle3Head(DraftHead):
    """EAGLE-3 and P-EAGLE: the attention of the first layer reads both side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, first = config.hidden_size, self.body.layers[0]
        first.hidden_norm = norm_class(config)(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * width, old.out_features, bias=old.bias is not None))

    def hidden(self, embedded: Tensor, features: Tensor, run: RunModule) -> Tensor:
        """See :meth:`DraftHead.hidden`."""
        first, *others = self.body.layers
        normed = first.hidden_norm(features)
        both = self.side_by_side(first.input_layernorm(embedded), normed)
        residual = normed if self.head_config.norm_before_residual else features
        state: Tensor = residual + run(first.self_attn, both)
        state = state + first.mlp(first.post_attention_layernorm(state))
        for layer in others:
            state = through_layer(layer, state, run)
        return state
