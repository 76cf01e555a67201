"""Shared fixtures."""

pytest_plugins = ["package_fixtures"]
