"""Metrics and logs. Called by the rest, calls nobody."""
