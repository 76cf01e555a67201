"""From logits to one token, by position and seed; with a slow twin that defines it."""
