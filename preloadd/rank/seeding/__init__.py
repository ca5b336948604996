"""Seeding from daemon to daemon: the listener of a source, and the client of a target."""
