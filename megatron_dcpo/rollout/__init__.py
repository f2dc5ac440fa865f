"""Engines, which sample responses. No other subpackage knows how transformers and vLLM generate."""
