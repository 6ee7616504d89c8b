"""Engines side by side: each in a process of its own, in its own environment, on the same prompts.

``child.py`` and the ``drive_*.py`` beside it run in the peers' interpreters and import nothing of
aiosched; ``process.py`` and ``engines.py`` are the side that starts them and reads the clock.
"""
