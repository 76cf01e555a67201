"""Processes that work for this one: how they are started, talked to and ended."""
