"""Hugging Face directories to Megatron checkpoints and back."""
