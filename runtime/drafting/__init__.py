"""Draft tokens: guessed cheaply, verified by the model in the step they ride in.

A row carries a sequence's last token and its drafts, with logits for all of them. Each position is
sampled as it would have been without drafts, and the row counts as far as what was sampled equals
what was guessed: tokens are the same with drafts on or off, at any temperature.
"""
