"""Quantization-aware training: fine-tune the weights in the formats that they are exported in.

Only this package of headrace imports torch (`[train]` extra), and only when an export asks for it.
"""
