"""Data pipeline of the P-EAGLE drafter, one module per step.

1. ``conversations``: chat rows (JSON Lines, OpenAI format) to token ids with a loss mask.

Later steps, each a module of this package: ``generate_data`` (answers written by the target itself),
``sequence_packing`` (conversations to packed rows) and ``extract_features`` (hidden states of the target).
"""
