"""Answers that must follow a grammar."""
