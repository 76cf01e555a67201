"""What a user's folders hold: models that were fetched, and packages made of checkpoints."""
