from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb"]
