"""Hugging Face models: their head, the layout of their rows, their attention, and `model(..., fused=request)`."""
