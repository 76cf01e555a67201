"""Shared fixtures."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["package_fixtures"]

# No test asserts on seconds, how long examples take to make included.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
