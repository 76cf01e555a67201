"""Packages that turn texts into vectors: their schema, batching, pooling and front door."""
